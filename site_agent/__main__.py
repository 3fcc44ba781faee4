"""`python -m site_agent`: the agent of one site."""

import signal
import sys
from pathlib import Path

import stamina
import structlog
from pydantic import ValidationError
from pydantic_settings import CliApp

from api.errors import IsthmusError
from api.locks import only_process
from api.logs import log_to_stderr
from api.output_file import make_directory
from api.tls import warning_about
from site_agent.daemon import Daemon
from site_agent.settings import Settings, faults_of_settings
from site_agent.tasks import missing

log = structlog.get_logger()


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or Ctrl-C, 1 if it could not go on, 2 for settings that make no sense."""
    log_to_stderr()
    try:
        settings = CliApp.run(Settings, cli_args=sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        for fault in faults_of_settings(error):
            print(f"isthmus agent: {fault}", file=sys.stderr)  # noqa: T201
        return 2
    stamina.instrumentation.set_on_retry_hooks([])  # the daemon says itself what it waits for
    try:
        _serve(settings)
    except IsthmusError as error:
        print(f"isthmus agent: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _serve(settings: Settings) -> None:
    warning = warning_about(settings.coordinator)
    if warning is not None:
        log.warning(warning)
    for task in settings.tasks.values():
        if (name := missing(task.command)) is not None:
            log.warning("the task's command names what is not there", task=task.name, missing=name, cwd=str(Path.cwd()))
    make_directory(settings.directory)
    what = f"the site directory {settings.directory}"
    with only_process(settings.directory / "agent.pid", what, "stop it, or give this one another --site-dir"):
        daemon = Daemon(settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: daemon.interrupt())
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        daemon.serve()


if __name__ == "__main__":
    sys.exit(main())
