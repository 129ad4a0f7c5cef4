"""Structured logs on stderr: key=value on a terminal, one JSON object a line otherwise.

Prompt and output text reach no log unless `include_text` is set: events that carry text put it under
the keys in `TEXT_KEYS`, and a processor removes those.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Literal, TextIO

import structlog

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]

TEXT_KEYS = frozenset({"prompt", "text", "messages", "output"})


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What is logged, and how.

    level: the least severe kind that is written. format: `auto` is console on a terminal and json
    otherwise. include_text: whether prompts and outputs may be logged.
    """

    level: Level = "info"
    format: Format = "auto"
    include_text: bool = False


def configure(options: LogOptions, stream: TextIO | None = None) -> None:
    """Set up structlog for this process. A bound `request_id` (contextvars) is part of every event."""
    output = sys.stderr if stream is None else stream
    console = options.format == "console" or (options.format == "auto" and output.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=output.isatty())
        if console
        else structlog.processors.JSONRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not options.include_text:
        processors.append(_remove_text)
    if not console:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, options.level.upper())),
        logger_factory=structlog.PrintLoggerFactory(output),
        cache_logger_on_first_use=False,
    )


def _remove_text(
    _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    for key in TEXT_KEYS.intersection(event):
        del event[key]
    return event
