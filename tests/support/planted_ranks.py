"""Bugs planted between ranks, each of which a test must catch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.ranks import codec
from pageturner.service.ranks.codec import Resolve, StepDecoder, StepEncoder
from pageturner.service.ranks.pulse import Silences

Codec = Callable[[], tuple[StepEncoder, StepDecoder]]


class _Changed(StepDecoder):
    """Gives something else than was sent. change: of the step."""

    def __init__(self, change: Callable[[SchedulerOutput], SchedulerOutput]) -> None:
        super().__init__()
        self._change = change

    def decode(self, encoded: bytes) -> SchedulerOutput:
        return self._change(super().decode(encoded))


def _with_parts(**changes: Any) -> Callable[[SchedulerOutput], SchedulerOutput]:
    return lambda step: replace(step, scheduled=tuple(replace(part, **changes) for part in step.scheduled))


class _TrustsLength(StepEncoder):
    """Takes a table that is no shorter than the one before for its continuation."""

    def encode(self, output: SchedulerOutput, resolve: Resolve) -> bytes:
        real, codec.extends = codec.extends, lambda table, before: len(table) >= len(before)
        try:
            return super().encode(output, resolve)
        finally:
            codec.extends = real


class _KeepsOldTables(StepEncoder):
    """Continues a table that the other end has forgotten, since its sequence was left out of a step."""

    def encode(self, output: SchedulerOutput, resolve: Resolve) -> bytes:
        before = self._tables
        encoded = super().encode(output, resolve)
        self._tables = before | self._tables
        return encoded


class _SendsUnknown(StepEncoder):
    """Does not fill in what the step before sampled."""

    def encode(self, output: SchedulerOutput, resolve: Resolve) -> bytes:
        return super().encode(output, lambda part: -1)


def _decoding(change: Callable[[SchedulerOutput], SchedulerOutput]) -> Codec:
    return lambda: (StepEncoder(), _Changed(change))


def _without(kind: str) -> Codec:
    return _decoding(lambda step: replace(step, block_copies=replace(step.block_copies, **{kind: ()})))


PLANTED_CODECS: Mapping[str, Codec] = {
    "a table is continued by its length": lambda: (_TrustsLength(), StepDecoder()),
    "a forgotten table is continued": lambda: (_KeepsOldTables(), StepDecoder()),
    "an unknown token is sent": lambda: (_SendsUnknown(), StepDecoder()),
    "clears are lost": _without("clears"),
    "swap-outs are lost": _without("swap_outs"),
    "swap-ins are lost": _without("swap_ins"),
    "copies are lost": _without("copies"),
    "swap-ins and copies change places": _decoding(
        lambda step: replace(
            step,
            block_copies=replace(
                step.block_copies, swap_ins=step.block_copies.copies, copies=step.block_copies.swap_ins
            ),
        )
    ),
    "the adapter is lost": _decoding(_with_parts(adapter="")),
    "drafts are lost": _decoding(_with_parts(num_drafts=0)),
    "scored rows are lost": _decoding(_with_parts(scored=())),
    "sampled rows are lost": _decoding(_with_parts(samples=())),
    "slots below write_start are written": _decoding(
        lambda step: replace(step, scheduled=tuple(replace(part, write_start=0) for part in step.scheduled))
    ),
}


class _ForgetsSigns(Silences):
    """Counts looks, whatever is heard in them."""

    def note(self, rank: int) -> None:
        """Not taken down."""


class _HearsAllAsOne(Silences):
    """Takes one rank's sign for everybody's."""

    def note(self, rank: int) -> None:
        for each in self._num_looks:
            super().note(each)


class _NamesTheFirst(Silences):
    """Somebody is silent: it must be the first."""

    def look(self, most: int) -> int | None:
        return None if super().look(most) is None else min(self._num_looks)


class _CountsInAll(Silences):
    """Silent looks are counted, in a row or not."""

    def note(self, rank: int) -> None:
        self._num_looks[rank] -= 1


class _IsNeverAlarmed(Silences):
    def look(self, most: int) -> int | None:
        super().look(most)
        return None


class _IsAlarmedEarly(Silences):
    def look(self, most: int) -> int | None:
        return super().look(most - 1)


PLANTED_SILENCES: tuple[type[Silences], ...] = (
    _ForgetsSigns,
    _HearsAllAsOne,
    _NamesTheFirst,
    _CountsInAll,
    _IsNeverAlarmed,
    _IsAlarmedEarly,
)
