"""What the coordinator and agents print about themselves: structlog's events on stderr."""

import sys

import structlog

__all__ = ["log_to_stderr"]


def log_to_stderr() -> None:
    """One event per line. Tracebacks are Python's: with local variables they would show secrets, and take seconds."""
    *others, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    structlog.configure(processors=[*others, renderer], logger_factory=structlog.PrintLoggerFactory(sys.stderr))
