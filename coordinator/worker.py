"""`python -m coordinator.worker SOCKET`: one of several processes that serve on a socket; see `coordinator.workers`.

Its settings are the first line of standard input. The end of standard input is the end of its parent.
"""

import os
import socket
import sys
import threading

import uvloop

from api.logs import log_to_stderr
from coordinator.ending import end_on_signals
from coordinator.serving import serve
from coordinator.settings import Settings


def main() -> None:
    log_to_stderr()
    end_on_signals()
    settings = Settings.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_die_with_parent, daemon=True).start()
    assert settings.redis_url is not None
    listener = socket.socket(fileno=int(sys.argv[1]))
    uvloop.run(serve(settings, settings.redis_url, listener))


def _die_with_parent() -> None:
    """At once, as a killed parent did: its successor needs the port."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
