"""`python -m site_agent`: the agent of one site."""

import signal
import sys
from types import FrameType
from typing import NoReturn

import structlog
from pydantic import ValidationError
from pydantic_settings import CliApp

from api.errors import IsthmusError
from site_agent.daemon import Daemon
from site_agent.settings import Settings


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or Ctrl-C, 1 if it could not go on, 2 for settings that make no sense."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        settings = CliApp.run(Settings, cli_args=sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        for fault in error.errors():
            print(f"isthmus agent: {'.'.join(map(str, fault['loc']))}: {fault['msg']}", file=sys.stderr)  # noqa: T201
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        Daemon(settings).serve()
    except KeyboardInterrupt:
        return 0
    except IsthmusError as error:
        print(f"isthmus agent: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
