"""What a record keeps of a beam search: the log-probabilities of candidates, and which of them stop.

From these a replay chooses the same beams, by the same code. Their tokens are stand-ins there as all tokens
are, but tell the candidates of a beam apart, so that beams part where they parted. A token that completes a
block gets the block's name in its place once beams are chosen, and their tables with them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.outputs import SampledToken, TokenLogprob
from pageturner.service.core.request import Request, Sequence
from pageturner.service.flight.block_names import name_of
from pageturner.service.flight.records import STOP_STAND_IN, PartialName, RowResult


def recorded(row: int, request: Request, best: SampledToken, *, has_no_text: bool) -> RowResult:
    """The result of a beam's row. has_no_text: decoding an answer raised when this was taken."""
    given = best.top_logprobs
    logprobs = struct.pack(f"<{len(given)}f", *(candidate.logprob for candidate in given))
    stops = tuple(place for place, candidate in enumerate(given) if candidate.token_id in request.stop_ids)
    return RowResult(row, (), has_no_text=has_no_text, logprobs=logprobs, stops=stops)


def candidates(result: RowResult) -> tuple[SampledToken, ...]:
    """The result as a replay gives it to the scheduler; empty where it is none of a beam."""
    if not result.logprobs:
        return ()
    values = struct.unpack(f"<{len(result.logprobs) // 4}f", result.logprobs)
    given = tuple(
        TokenLogprob(STOP_STAND_IN if place in result.stops else place + 1, logprob)
        for place, logprob in enumerate(values)
    )
    return (SampledToken(given[0].token_id, given[0].logprob, given),)


def block_names(
    manager: BlockManager, samples: Iterable[tuple[Sequence | None, int]]
) -> tuple[PartialName, ...]:
    """Names of the full blocks that the newest tokens complete of beams that were chosen just now.

    samples: for each row of the step its sequence if it lived, and the number of its tokens before.
    """
    if not manager.caches_prefixes:
        return ()
    chosen = {
        sequence.request.order: sequence.request
        for sequence, num_before in samples
        if sequence is not None
        and sequence.request.beams is not None
        and not sequence.is_finished
        and len(sequence.tokens) > num_before
        and len(sequence.tokens) % manager.block_size == 0
    }
    return tuple(
        PartialName(
            beam.seq_id,
            len(beam.tokens),
            name_of(manager.block_hash(beam, len(beam.tokens) // manager.block_size - 1)),
        )
        for request in chosen.values()
        for beam in request.sequences
    )


def give_names(names: Iterable[PartialName], sequences: Mapping[int, Sequence], block_size: int) -> None:
    """Let the stand-in of the last token of each of these blocks be its name."""
    for named in names:
        sequence = sequences.get(named.seq_id)
        if sequence is not None and 0 < named.num_tokens <= len(sequence.tokens):
            sequence.tokens[named.num_tokens - 1] = named.name
            del sequence.block_hashes[(named.num_tokens - 1) // block_size :]
