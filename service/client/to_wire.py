"""What a client asks for, as messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, TypeVar

from pageturner.service.client.messages import build, check_number
from pageturner.service.client.structured import to_structured_output
from pageturner.service.client.values import (
    BeamSearchOptions,
    Options,
    RequestOptions,
    Sampling,
    ScoreOptions,
)
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from pageturner.service.errors import DeadlineExceeded, InvalidArgument
from pageturner.v1 import generation_pb2

_Request = TypeVar("_Request", generation_pb2.GenerateRequest, generation_pb2.GenerateStreamRequest)

LONGEST_TIMEOUT_SECONDS = 27_000 * 3600.0
"""Three years, the longest that gRPC sends. More is no limit at all, and overflows its clocks."""

_OPTIONS = frozenset(Options.__annotations__)
_SCORE_OPTIONS = frozenset(ScoreOptions.__annotations__)
_SAMPLING = frozenset(Sampling.__annotations__)


def to_request(
    kind: type[_Request], prompt: generation_pb2.Prompt, options: Options
) -> tuple[_Request, float | None]:
    """The request and its time limit; None for none. Options of None count as left out.

    Raises InvalidArgument with the path of an option that the wire cannot carry, TypeError for one that
    does not exist.
    """
    given, timeout_seconds = _given(options, _OPTIONS)
    sampling = {name: given.pop(name) for name in tuple(given) if name in _SAMPLING}
    if sampling.get("beam_search") is not None:
        sampling["beam_search"] = to_beam_search(sampling["beam_search"])
    if (form := sampling.get("structured_output")) is not None:
        sampling["structured_output"] = to_structured_output(form)
    message = build(generation_pb2.SamplingParams, "sampling.", **sampling)
    return build(kind, prompt=prompt, sampling=message, **given), timeout_seconds


def to_beam_search(search: BeamSearch | BeamSearchOptions) -> generation_pb2.BeamSearch:
    """Raises InvalidArgument for what the wire cannot carry, TypeError for a field that does not exist."""
    given: dict[str, Any] = asdict(search) if isinstance(search, BeamSearch) else dict(search)
    for name in given:
        if name not in _BEAM_SEARCH:
            raise TypeError(f"there is no option {name!r} of beam_search")
    if "early_stopping" in given:
        stopping = given["early_stopping"]
        try:
            given["early_stopping"] = _EARLY_STOPPING[EarlyStopping(stopping)]
        except ValueError as error:
            known = ", ".join(each.value for each in EarlyStopping)
            raise InvalidArgument(
                "sampling.beam_search.early_stopping", f"{stopping!r} is none of {known}"
            ) from error
    return build(generation_pb2.BeamSearch, "sampling.beam_search.", **given)


_BEAM_SEARCH = frozenset(BeamSearchOptions.__annotations__)
_EARLY_STOPPING = {
    EarlyStopping.HEURISTIC: generation_pb2.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.FIRST: generation_pb2.EARLY_STOPPING_FIRST,
    EarlyStopping.NEVER: generation_pb2.EARLY_STOPPING_NEVER,
}


def to_score_request(
    prompt: generation_pb2.Prompt, continuations: Iterable[str | Iterable[int]], options: ScoreOptions
) -> tuple[generation_pb2.ScoreRequest, float | None]:
    """As `to_request`. Raises TypeError for continuations that are one text or no list."""
    given, timeout_seconds = _given(options, _SCORE_OPTIONS)
    if isinstance(continuations, str | bytes):
        raise TypeError("continuations is one text, not a list of texts or of lists of token ids")
    messages = []
    for index, continuation in enumerate(continuations):
        path = f"continuations[{index}]."
        if isinstance(continuation, str):
            messages.append(build(generation_pb2.Continuation, path, text=continuation))
        else:
            ids = build(generation_pb2.TokenIds, f"{path}token_ids.", ids=continuation)
            messages.append(generation_pb2.Continuation(token_ids=ids))
    request = build(generation_pb2.ScoreRequest, prompt=prompt, continuations=messages, **given)
    return request, timeout_seconds


def _given(options: RequestOptions, known: frozenset[str]) -> tuple[dict[str, Any], float | None]:
    """What was stated beside the time limit, and that limit. Raises TypeError for what does not exist."""
    given: dict[str, Any] = dict(options)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"there is no option {name!r}{hint}")
    given.pop("session", None)  # of the client's own
    return given, to_timeout(given.pop("timeout_seconds", None))


def to_timeout(seconds: float | None, name: str = "timeout_seconds") -> float | None:
    """As gRPC takes it: None for no limit.

    Raises InvalidArgument for NaN and for less than nothing, DeadlineExceeded for nothing: gRPC would let
    a quick enough answer through.
    """
    if seconds is None:
        return None
    number = check_number(seconds, name)
    if not number >= 0:  # also refuses NaN
        raise InvalidArgument(name, f"{number} s is not a time")
    if number == 0:
        raise DeadlineExceeded(f"{name} is 0: the time was over before anything was sent")
    return number if number <= LONGEST_TIMEOUT_SECONDS else None
