"""Requests as rows of a table, and all that is known of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from pageturner.service.client import BlockUse, RequestInfo, RequestState
from pageturner.service.top.readings import Reading
from pageturner.service.top.styles import STATE_NAMES, STATE_STYLES, owner_style
from pageturner.service.top.text import Glyphs, count, duration, share


@dataclass(frozen=True, slots=True)
class Column:
    """width: that it wants at least. is_number: set to the right."""

    name: str
    width: int
    is_number: bool
    value: Callable[[RequestInfo, Glyphs], Text]


def _progress(request: RequestInfo, glyphs: Glyphs) -> Text:
    """Of its prompt while that is computed, then of its output."""
    if request.num_output_tokens:
        most = request.max_tokens * request.num_choices
        return Text(f"{request.num_output_tokens:,}/{count(most)}")
    if request.state is not RequestState.RUNNING:
        return Text(glyphs.none, "dim")
    done = max(0, request.num_prompt_tokens - request.num_uncomputed_tokens)
    return Text(f"prompt {share(done, request.num_prompt_tokens, glyphs)}", "dim")


def _state(request: RequestInfo, _glyphs: Glyphs) -> Text:
    text = Text(STATE_NAMES[request.state], STATE_STYLES[request.state])
    if request.queue_position:
        text.append(f" {request.queue_position}", "dim")
    if request.is_paused:
        text.append(" unread", "#e0b83c")
    if request.is_guarded:
        text.append(" guarded", "#c678dd")
    return text


def _blocks(request: RequestInfo, _glyphs: Glyphs) -> Text:
    text = Text(f"{request.num_blocks:,}")
    if request.num_host_blocks:
        text.append(f"+{request.num_host_blocks:,}h", STATE_STYLES[RequestState.SWAPPED])
    return text


def _name(request: RequestInfo, glyphs: Glyphs) -> Text:
    return Text.assemble((glyphs.uses[BlockUse.LIVE] + " ", owner_style(request.number)), request.request_id)


COLUMNS = (
    Column("request", 20, False, _name),
    Column("state", 9, False, _state),
    Column("progress", 11, True, _progress),
    Column("blocks", 6, True, _blocks),
    Column("age", 7, True, lambda request, glyphs: Text(duration(request.age_seconds, glyphs))),
    Column("prompt", 7, True, lambda request, _: Text(f"{request.num_prompt_tokens:,}")),
    Column("waited", 7, True, lambda request, glyphs: Text(duration(request.queue_seconds, glyphs))),
    Column("preempted", 9, True, lambda request, glyphs: Text(f"{request.num_preemptions or glyphs.none}")),
    Column("tenant", 10, False, lambda request, glyphs: Text(request.tenant or glyphs.none)),
    Column(
        "first token", 11, True, lambda request, glyphs: Text(duration(request.first_token_seconds, glyphs))
    ),
    Column("cached", 7, True, lambda request, _: Text(f"{request.num_cached_prompt_tokens:,}")),
    Column("prio", 5, True, lambda request, _: Text(f"{request.priority}")),
    Column("deadline", 8, True, lambda request, glyphs: Text(duration(request.deadline_seconds, glyphs))),
)
"""The first ones are shown wherever there is room for any."""

NUM_ALWAYS = 3


def columns_that_fit(width: int) -> tuple[Column, ...]:
    """As many of COLUMNS as this width has room for, with two cells between each."""
    shown, left = list(COLUMNS[:NUM_ALWAYS]), width - sum(one.width + 2 for one in COLUMNS[:NUM_ALWAYS])
    for column in COLUMNS[NUM_ALWAYS:]:
        left -= column.width + 2
        if left < 0:
            break
        shown.append(column)
    return tuple(shown)


def room_of_first(columns: Sequence[Column], width: int) -> int:
    """What the other columns leave to the first, whose names have any length."""
    return max(columns[0].width, width - sum(column.width + 2 for column in columns[1:]))


def requests_title(reading: Reading, order: str) -> str:
    """How many there are, and in which order."""
    listed, total = len(reading.requests.requests), reading.requests.total_size
    first = f", the first {listed:,} of them" if listed < total else ""
    return f"Requests: {total:,}{first}, by {order}"


def _of(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def details(request: RequestInfo, glyphs: Glyphs) -> list[tuple[str, str]]:
    """All that is known of one."""
    most = request.max_tokens * request.num_choices
    prompt, cached = request.num_prompt_tokens, request.num_cached_prompt_tokens
    choices = _of(request.num_choices, "choice")
    told = [
        ("request", request.request_id),
        ("tenant", request.tenant or glyphs.none),
        ("state", _state(request, glyphs).plain),
        ("priority", str(request.priority)),
        ("prompt", f"{prompt:,} tokens, {cached:,} from the cache"),
        ("output", f"{request.num_output_tokens:,} of {most:,} tokens, {choices}"),
        ("to compute", _of(request.num_uncomputed_tokens, "token")),
        ("blocks", f"{request.num_blocks:,} on the device, {request.num_host_blocks:,} on the host"),
        ("preempted", _of(request.num_preemptions, "time")),
        ("age", duration(request.age_seconds, glyphs)),
        ("waited", duration(request.queue_seconds, glyphs)),
        ("first token", duration(request.first_token_seconds, glyphs)),
    ]
    if request.deadline_seconds is not None:
        told.append(("deadline", f"in {duration(request.deadline_seconds, glyphs)}"))
    return told
