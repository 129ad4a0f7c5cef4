"""Structured logs on stderr: key=value on a terminal, one JSON object a line otherwise.

A request's id is bound as a context variable where the request is handled, and so is part of every line about
it. Prompts are not logged: `server.log_prompts` is the one switch for that, and its default is off.
"""

from __future__ import annotations

import atexit
import logging
import sys
from dataclasses import dataclass
from typing import Literal, TextIO

import structlog

from pageturner.service.logs.writer import LogStream, LogWriter, keep_from_blocking, write_descriptor

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What is logged, and how."""

    level: Level = "info"
    """The least severe kind that is written."""
    format: Format = "auto"
    """`auto` is console on a terminal and json otherwise."""


def detach_stderr(options: LogOptions) -> LogStream:
    """Put a `LogStream` in the place of `sys.stderr`, flushed within a bound when the process ends.

    So all that Python writes there (the log, notes, warnings, tracebacks) neither blocks nor fails, whatever
    becomes of the terminal, pipe or file behind it.
    """
    stderr = sys.stderr
    keep_from_blocking(stderr.fileno())
    lost = structlog.wrap_logger(
        structlog.ReturnLogger(),
        processors=_processors(options, stderr),
        wrapper_class=_level_filter(options),
    )
    writer = LogWriter(
        write_descriptor(stderr.fileno()),
        lambda count: f"{lost.error('log_lines_lost', count=count)}\n".encode(),
    )
    stream = LogStream(writer, stderr.encoding, stderr.isatty())
    sys.stderr = stream
    atexit.register(stream.finish)
    logging.basicConfig(handlers=[_Forwarded()], level=logging.WARNING)
    logging.captureWarnings(True)
    return stream


class _Forwarded(logging.Handler):
    """Gives what libraries log, and Python's warnings, the form of the service's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        """As an event `library` of the record's level, or the nearest below that has a name."""
        try:
            message = record.getMessage()
        except Exception as error:  # a library's wrong format string must not fail its caller
            message = f"{record.msg!s} (not formatted: {error})"
        level = max((level for level in _LEVELS if level <= record.levelno), default=logging.DEBUG)
        logger = structlog.get_logger().bind(logger=record.name, message=message)
        logger.log(level, "library", exc_info=record.exc_info)


_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
"""Those that structlog has names for; a library may define others."""


def configure(options: LogOptions, stream: TextIO | None = None) -> None:
    """Set up structlog for this process. A bound `request_id` (contextvars) is part of every event."""
    output = sys.stderr if stream is None else stream
    structlog.configure(
        processors=_processors(options, output),
        wrapper_class=_level_filter(options),
        logger_factory=structlog.WriteLoggerFactory(output),
        cache_logger_on_first_use=False,
    )


def warnings_on_standard_error() -> structlog.typing.FilteringBoundLogger:
    """A logger for a model within a caller's own process: its warnings, and nothing below."""
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    return logger


def _level_filter(options: LogOptions) -> type[structlog.typing.FilteringBoundLogger]:
    return structlog.make_filtering_bound_logger(getattr(logging, options.level.upper()))


def _processors(options: LogOptions, output: TextIO) -> list[structlog.typing.Processor]:
    """What turns an event into a line. output: where it goes, which decides the format `auto`."""
    console = options.format == "console" or (options.format == "auto" and output.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if console:
        # With rich installed the default formatter writes out every local variable, prompts among them.
        plain = structlog.dev.plain_traceback
        return [*shared, structlog.dev.ConsoleRenderer(colors=output.isatty(), exception_formatter=plain)]
    return [*shared, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
