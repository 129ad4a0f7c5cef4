"""A step as bytes: what the other ranks need of a `SchedulerOutput` in order to compute it, and no more.

Rank 0 alone samples. So sampling parameters, histories, request ids and known tokens stay there, and a rank
is told which rows have logits, no more: `as_computed` says which `SchedulerOutput` comes out at the other
end. Tokens that the step before sampled are filled in by rank 0, which knows them when it sends.

A block table is sent as what it adds to the one that the same sequence had in the message before, so that a
decode costs some 50 bytes however long its context is. Both ends keep the tables of one message; messages are
neither lost nor reordered on their way, and each has a number, which must be the next.

    header     `_HEADER`, little-endian: format, number, step id, counts of all that follows
    ids        int64: sequence id and epoch of each sequence
    words      int32: `_NUM_FIELDS` of each sequence; the tokens of all sequences; what each one's table adds;
               the clears; source and destination of each swap-out, swap-in and copy
    adapters   UTF-8, each behind its length in bytes, uint32
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice

from pageturner.service.core.outputs import (
    UNKNOWN_TOKEN,
    BlockCopies,
    BlockCopy,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
    ScoreRun,
)
from pageturner.service.core.sampling_params import SamplingParams

FORMAT = 1
"""Of the bytes. Any change to them needs another: ranks of two versions refuse each other by it."""

_HEADER = struct.Struct("<HxxIq8I")
_LENGTH = struct.Struct("<I")
_NUM_FIELDS = 8
_SAMPLES, _EXTENDS, _DRAFTS_SHIFT = 1, 2, 2
"""Of a sequence's flags: it has rows that are sampled; its table continues the one before; above them its
drafts."""
_NUMBERS = 1 << 32

Table = tuple[int, ...]
Resolve = Callable[[ScheduledSequence], int]
"""The token that stands for UNKNOWN_TOKEN in a sequence."""

ANY_ROW = SampleRow(-1, 0, 0, 0, SamplingParams())
"""Stands for the rows that are sampled: that there are some is all that a forward asks."""

_ANY = (ANY_ROW,)
_NO_ROWS = range(0)


class BadStep(ValueError):
    """The bytes are no step, or not the one that comes next."""


def as_computed(output: SchedulerOutput, resolve: Resolve) -> SchedulerOutput:
    """The step as the other ranks see it."""
    return replace(output, scheduled=tuple(_as_computed(part, resolve) for part in output.scheduled))


def _as_computed(part: ScheduledSequence, resolve: Resolve) -> ScheduledSequence:
    scored = part.scored_rows
    return ScheduledSequence(
        part.seq_id,
        "",
        part.epoch,
        _known(part, resolve),
        part.start,
        part.write_start,
        part.block_table,
        _ANY if part.samples else (),
        part.adapter,
        part.num_drafts,
        _score_run(scored.start, len(scored)),
    )


def _known(part: ScheduledSequence, resolve: Resolve) -> tuple[int, ...]:
    if UNKNOWN_TOKEN not in part.token_ids:
        return part.token_ids
    return tuple(resolve(part) if token == UNKNOWN_TOKEN else token for token in part.token_ids)


def _score_run(start: int, num_rows: int) -> tuple[ScoreRun, ...]:
    """The rows that are scored, without the tokens that they score."""
    return (ScoreRun(-1, 0, start, (0,) * num_rows, 0),) if num_rows else ()


class StepEncoder:
    """Rank 0's end: one for all the other ranks, which get the same bytes."""

    def __init__(self) -> None:
        self._number = 0
        self._tables: dict[int, Table] = {}

    def encode(self, output: SchedulerOutput, resolve: Resolve) -> bytes:
        """The bytes of a step, to be sent before any other's.

        Raises struct.error for a number that has no place in them; nothing is changed then.
        """
        before, no_table = self._tables, ()
        tables: dict[int, Table] = {}
        ids: list[int] = []
        fields: list[int] = []
        tokens: list[int] = []
        blocks: list[int] = []
        adapters: dict[str, int] = {}
        for part in output.scheduled:
            seq_id, table = part.seq_id, part.block_table
            kept: Table = before.get(seq_id, no_table)
            tables[seq_id] = table
            num_kept = len(kept)
            if table is not kept:
                if not extends(table, kept):
                    num_kept = 0
                blocks += table[num_kept:]
            token_ids = _known(part, resolve)
            tokens += token_ids
            scored = part.scored_rows if part.scored else _NO_ROWS
            flags = part.num_drafts << _DRAFTS_SHIFT
            if part.samples:
                flags |= _SAMPLES
            if num_kept:
                flags |= _EXTENDS
            ids += (seq_id, part.epoch)
            fields += (
                len(token_ids),
                part.start,
                part.write_start,
                len(table) - num_kept,
                flags,
                scored.start,
                len(scored),
                adapters.setdefault(part.adapter, len(adapters)),
            )
        copies = output.block_copies
        pairs = (copies.swap_outs, copies.swap_ins, copies.copies)
        moved = chain.from_iterable((pair.source, pair.destination) for kind in pairs for pair in kind)
        words = (*fields, *tokens, *blocks, *copies.clears, *moved)
        number = (self._number + 1) % _NUMBERS
        counts = (
            len(output.scheduled),
            len(tokens),
            len(blocks),
            len(copies.clears),
            *map(len, pairs),
            len(adapters),
        )
        names = [name.encode() for name in adapters]
        encoded = b"".join(
            (
                _HEADER.pack(FORMAT, number, output.step_id, *counts),
                struct.pack(f"<{len(ids)}q", *ids),
                struct.pack(f"<{len(words)}i", *words),
                *chain.from_iterable((_LENGTH.pack(len(name)), name) for name in names),
            )
        )
        self._number, self._tables = number, tables
        return encoded


def extends(table: Table, before: Table) -> bool:
    """Whether a table is the one before with blocks behind it, or none."""
    return table[: len(before)] == before


class StepDecoder:
    """Another rank's end."""

    def __init__(self) -> None:
        self._number = 0
        self._tables: dict[int, Table] = {}

    def decode(self, encoded: bytes) -> SchedulerOutput:
        """The step `as_computed`. Raises BadStep, after which no further one can be read."""
        try:
            return self._decode(encoded)
        except (struct.error, UnicodeDecodeError, LookupError) as error:
            raise BadStep(f"{len(encoded)} bytes are no step: {error}") from error

    def _decode(self, encoded: bytes) -> SchedulerOutput:
        (made_in,) = struct.unpack_from("<H", encoded)
        if made_in != FORMAT:
            raise BadStep(f"a step in format {made_in}; this rank reads {FORMAT}")
        _, number, step_id, num_sequences, num_tokens, num_blocks, num_clears, *num_pairs, num_adapters = (
            _HEADER.unpack_from(encoded)
        )
        expected = (self._number + 1) % _NUMBERS
        if number != expected:
            raise BadStep(f"message {number} came where {expected} was due")
        ids = struct.unpack_from(f"<{2 * num_sequences}q", encoded, _HEADER.size)
        token = _NUM_FIELDS * num_sequences
        block = token + num_tokens
        num_words = block + num_blocks + num_clears + 2 * sum(num_pairs)
        place = _HEADER.size + 8 * len(ids)
        words = struct.unpack_from(f"<{num_words}i", encoded, place)
        adapters = _read_names(encoded, place + 4 * num_words, num_adapters)
        copies = _read_copies(iter(words[block + num_blocks :]), num_clears, num_pairs)

        before, tables = self._tables, dict[int, Table]()
        columns = [words[column:token:_NUM_FIELDS] for column in range(_NUM_FIELDS)]
        scheduled = []
        for (
            seq_id,
            epoch,
            length,
            start,
            write_start,
            num_new,
            flags,
            first_scored,
            num_scored,
            adapter,
        ) in zip(ids[::2], ids[1::2], *columns, strict=True):
            table = before[seq_id] if flags & _EXTENDS else ()
            if num_new:
                table += words[block : block + num_new]
                block += num_new
            tables[seq_id] = table
            scheduled.append(
                ScheduledSequence(
                    seq_id,
                    "",
                    epoch,
                    words[token : token + length],
                    start,
                    write_start,
                    table,
                    _ANY if flags & _SAMPLES else (),
                    adapters[adapter],
                    flags >> _DRAFTS_SHIFT,
                    _score_run(first_scored, num_scored) if num_scored else (),
                )
            )
            token += length
        self._number, self._tables = number, tables
        return SchedulerOutput(step_id, tuple(scheduled), copies)


def _read_copies(words: Iterator[int], num_clears: int, num_pairs: list[int]) -> BlockCopies:
    clears = tuple(islice(words, num_clears))
    kinds = []
    for count in num_pairs:
        sources_and_destinations = list(islice(words, 2 * count))
        kinds.append(tuple(map(BlockCopy, sources_and_destinations[::2], sources_and_destinations[1::2])))
    return BlockCopies(clears, *kinds)


def _read_names(encoded: bytes, place: int, count: int) -> list[str]:
    """The rest of the message, which ends with them."""
    names = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(encoded, place)
        place += _LENGTH.size
        names.append(encoded[place : place + length].decode())
        place += length
    if place != len(encoded):
        raise BadStep(f"{len(encoded)} bytes, of which a step takes {place}")
    return names
