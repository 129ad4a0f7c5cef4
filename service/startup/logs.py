"""Structured logs on stderr: key=value on a terminal, one JSON object a line otherwise.

A request's id is bound as a context variable by whoever handles it, and so is part of every line about
it. Prompts are not logged: `server.log_prompts` is the one switch for that, and its default is off.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Literal, TextIO

import structlog

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What is logged, and how.

    level: the least severe kind that is written. format: `auto` is console on a terminal and json
    otherwise.
    """

    level: Level = "info"
    format: Format = "auto"


def configure(options: LogOptions, stream: TextIO | None = None) -> None:
    """Set up structlog for this process. A bound `request_id` (contextvars) is part of every event."""
    output = sys.stderr if stream is None else stream
    console = options.format == "console" or (options.format == "auto" and output.isatty())
    renderer: structlog.typing.Processor = (
        # With rich installed the default formatter writes out every local variable, prompts among them.
        structlog.dev.ConsoleRenderer(
            colors=output.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        if console
        else structlog.processors.JSONRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if not console:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, options.level.upper())),
        logger_factory=structlog.PrintLoggerFactory(output),
        cache_logger_on_first_use=False,
    )
