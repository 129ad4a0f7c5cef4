"""What a record keeps of a beam search: the log-probabilities of candidates, and which of them stop.

From these a replay chooses the same beams, by the same code. Their tokens are stand-ins there as all tokens
are, but tell the candidates of a beam apart, so that beams part where they parted. A token that completes a
block gets the block's name in its place once beams are chosen, and their tables with them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping

from pageturner.service.core.beam_search import BeamGroup, Hypothesis, num_common
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.outputs import SampledToken, TokenLogprob
from pageturner.service.core.request import Request, Sequence
from pageturner.service.flight.beam_records import RecordedBeams, RecordedCandidates, RecordedHypothesis
from pageturner.service.flight.block_names import name_of
from pageturner.service.flight.records import STOP_STAND_IN, PartialName, RowResult


def recorded(row: int, request: Request, best: SampledToken, *, has_no_text: bool) -> RowResult:
    """The result of a beam's row. has_no_text: decoding an answer raised when this was taken."""
    logprobs, stops = _packed(request, best.top_logprobs)
    return RowResult(row, (), has_no_text=has_no_text, logprobs=logprobs, stops=stops)


def candidates(result: RowResult) -> tuple[SampledToken, ...]:
    """The result as a replay gives it to the scheduler; empty where it is none of a beam."""
    if not result.logprobs:
        return ()
    given = _unpacked(result.logprobs, result.stops)
    return (SampledToken(given[0].token_id, given[0].logprob, given),)


def _packed(request: Request, given: tuple[TokenLogprob, ...]) -> tuple[bytes, tuple[int, ...]]:
    logprobs = struct.pack(f"<{len(given)}f", *(candidate.logprob for candidate in given))
    return logprobs, tuple(
        place for place, candidate in enumerate(given) if candidate.token_id in request.stops
    )


def _unpacked(logprobs: bytes, stops: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    values = struct.unpack(f"<{len(logprobs) // 4}f", logprobs)
    return tuple(
        TokenLogprob(STOP_STAND_IN if place in stops else place + 1, logprob)
        for place, logprob in enumerate(values)
    )


# --- names of blocks -------------------------------------------------------------------------


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


# --- a search as a value ---------------------------------------------------------------------


def state_of(request: Request) -> RecordedBeams | None:
    """Where its search stands; None for a request that has none."""
    group, num_prompt = request.beams, request.num_prompt_tokens
    if group is None:
        return None
    paths = [request.sequences[place].tokens[num_prompt:] for place in group.beams]
    hypotheses = []
    for known in group.hypotheses:
        nearest, num_shared = _nearest([token.token_id for token in known.tokens], paths)
        is_stopped = known.matched is not None
        hypotheses.append(RecordedHypothesis(known.score, len(known.tokens), nearest, num_shared, is_stopped))
    return RecordedBeams(
        tuple(group.beams),
        tuple(score for score in group.scores if score > -math.inf),
        tuple(_nearest(paths[rank], paths[:rank]) for rank in range(1, len(paths))),
        tuple(hypotheses),
        tuple(
            RecordedCandidates(place, epoch, *_packed(request, given))
            for place, (epoch, given) in group.candidates.items()
        ),
        group.num_settled,
    )


def _nearest(tokens: list[int], paths: list[list[int]]) -> tuple[int, int]:
    """Which of the paths begins with most of these tokens, and with how many."""
    shared = [num_common((tokens, path), 0) for path in paths]
    return shared.index(max(shared)), max(shared)


def restored(state: RecordedBeams, request: Request) -> BeamGroup:
    """The search of a request whose sequences are restored already: their stand-ins come to differ where the
    tokens did, and those of answers that ended."""
    num_prompt, paths = request.num_prompt_tokens, [request.sequences[place].tokens for place in state.places]
    for rank, (nearest, num_shared) in enumerate(state.forks, 1):
        end = num_prompt + num_shared
        paths[rank][:end] = paths[nearest][:end]
        if end < len(paths[rank]):  # else it is the same beam, in a place for which there was no other
            paths[rank][end] = paths[rank][end] or rank  # a name is there where it completes a block
    hypotheses = []
    for known in state.hypotheses:
        tokens = paths[known.nearest][num_prompt : num_prompt + known.num_shared]
        tokens += [_ENDED] * (known.num_tokens - known.num_shared)
        if known.is_stopped:
            tokens[-1] = STOP_STAND_IN
        matched = STOP_STAND_IN if known.is_stopped else None
        hypotheses.append(Hypothesis(known.score, tuple(map(SampledToken, tokens)), matched))
    return BeamGroup(
        list(state.places),
        [*state.scores, *[-math.inf] * (len(state.places) - len(state.scores))],
        {each.place: (each.epoch, _unpacked(each.logprobs, each.stops)) for each in state.candidates},
        hypotheses=tuple(hypotheses),
        num_settled=state.num_settled,
    )


_ENDED = -3
"""Stands for what an answer that ended has and no beam."""
