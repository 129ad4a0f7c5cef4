"""Carries a plan out: the only code that turns decisions into changed tables and counters.

Order matters: preemptions free blocks, admissions pin what they claim before anything is allocated, and
only then do chunks grow tables. The plan was booked on a ledger, so nothing here can fall short.
"""

from __future__ import annotations

from pageturner.service.core.memory.block import Release
from pageturner.service.core.outputs import (
    UNKNOWN_TOKEN,
    BlockCopies,
    BlockCopy,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
)
from pageturner.service.core.request import Sequence
from pageturner.service.core.scheduling.scores import score_runs
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_plan import Chunk, StepPlan
from pageturner.service.core.scheduling.transitions import Transitions

_UNKNOWN = (UNKNOWN_TOKEN,)


class Committer:
    """transitions: carry out preemptions and admissions."""

    def __init__(self, state: SchedulerState, transitions: Transitions) -> None:
        self._state = state
        self._manager = state.manager
        self._transitions = transitions

    def commit(self, plan: StepPlan, step_id: int) -> SchedulerOutput:
        """Carry `plan` out. Returns the step for the model to compute, falsy if there is nothing to do."""
        swap_outs: list[BlockCopy] = []
        for preemption in plan.preemptions:
            swap_outs += self._transitions.preempt(preemption, step_id)
        swap_ins = self._transitions.admit_all(plan.admissions, step_id) if plan.admissions else []
        copies: list[BlockCopy] = []
        scheduled = self._decode(plan.decodes, step_id)
        for chunk in plan.chunks:
            if not chunk.is_in_place:
                copy = self._make_room(chunk, step_id)
                if copy is not None:
                    copies.append(copy)
            scheduled.append(self._schedule(chunk, step_id))
        for request in plan.bypassed:
            request.num_bypasses += 1
        self._state.producing = plan.producing
        counters = self._state.counters
        counters["bypasses"] += len(plan.bypassed)
        counters["swapped_out_blocks"] += len(swap_outs)
        counters["swapped_in_blocks"] += len(swap_ins)
        counters["copied_blocks"] += len(copies)
        num_rows = len(plan.decodes) + sum(chunk.num_tokens == 1 for chunk in plan.chunks)
        num_tokens = len(plan.decodes) + sum(chunk.num_tokens for chunk in plan.chunks)
        counters["scheduled_tokens"] += num_tokens
        pace = self._state.pace
        pace.new_output_tokens += num_rows
        pace.new_prompt_tokens += num_tokens - num_rows
        clears, self._state.pending_clears = tuple(self._state.pending_clears), []
        block_copies = BlockCopies(clears, tuple(swap_outs), tuple(swap_ins), tuple(copies))
        return SchedulerOutput(step_id, tuple(scheduled), block_copies)

    def _decode(self, sequences: tuple[Sequence, ...], step_id: int) -> list[ScheduledSequence]:
        """The last token of each: `_make_room` and `_schedule` for what `plan_decodes` looked at."""
        tables, block_size, sample = self._manager.tables, self._manager.block_size, self._sample
        scheduled = []
        for sequence in sequences:
            seq_id, start = sequence.seq_id, sequence.num_computed_tokens
            if start == len(tables[seq_id]) * block_size:
                self._manager.grow(sequence, start + 1)
            sequence.num_computed_tokens = sequence.num_kv_tokens = start + 1
            sequence.last_step = step_id
            samples, tokens = sequence.sample_rows, sequence.tokens
            if samples is None:
                samples = sample(sequence)
            else:
                sequence.num_in_flight += 1
            token_ids = (tokens[start],) if start < len(tokens) else _UNKNOWN
            new, epoch, table = sequence.request.new, sequence.epoch, tables[seq_id]
            name, adapter = new.request_id, new.adapter
            scheduled.append(
                ScheduledSequence(seq_id, name, epoch, token_ids, start, start, table, samples, adapter)
            )
        return scheduled

    def _make_room(self, chunk: Chunk, step_id: int) -> BlockCopy | None:
        """Blocks for the chunk's slots; a copy if the first of them lies in a shared block."""
        sequence = chunk.sequence
        end = sequence.num_computed_tokens + chunk.num_tokens
        copy = None
        if end > sequence.num_kv_tokens:
            read_until_then = Release(step_id, self._state.now)
            copy = self._manager.prepare_write(sequence, sequence.num_kv_tokens, read_until_then)
        self._manager.grow(sequence, end)
        return copy

    def _schedule(self, chunk: Chunk, step_id: int) -> ScheduledSequence:
        sequence, request = chunk.sequence, chunk.sequence.request
        start, write_start = sequence.num_computed_tokens, sequence.num_kv_tokens
        end = start + chunk.num_tokens
        sequence.num_computed_tokens = end
        if end > write_start:
            sequence.num_kv_tokens = end
        sequence.last_step = step_id
        samples: tuple[SampleRow, ...] = ()
        scored = () if sequence.next_scored >= end else score_runs(sequence, start, end)
        if chunk.is_last and not request.is_forked:
            samples = self._fork(sequence, step_id)
        elif chunk.is_last and not request.new.is_scoring:
            samples = self._sample(sequence)
        token_ids = sequence.tokens[start:end]
        if len(token_ids) < chunk.num_tokens:
            token_ids.append(UNKNOWN_TOKEN)
        return ScheduledSequence(
            sequence.seq_id,
            request.request_id,
            sequence.epoch,
            tuple(token_ids),
            start,
            write_start,
            self._manager.tables[sequence.seq_id],
            samples,
            request.new.adapter,
            scored=scored,
        )

    def _fork(self, lead: Sequence, step_id: int) -> tuple[SampleRow, ...]:
        """What all share is computed: every choice gets the lead's table, and one without a token its first.

        Beams have none before their first tokens are chosen, by one row for all.
        """
        request = lead.request
        if request.beams is not None and not lead.num_output_tokens:
            return self._sample(lead)
        num_shared = request.num_shared_tokens
        for child in request.unfinished:
            if child is not lead:
                self._manager.fork(lead, child, num_shared)
                child.num_computed_tokens = child.num_kv_tokens = num_shared
                child.last_step = step_id
        request.is_forked = True
        if request.new.is_scoring:
            return ()
        beginning = (sequence for sequence in request.unfinished if not sequence.num_output_tokens)
        return tuple(row for sequence in beginning for row in self._sample(sequence))

    @staticmethod
    def _sample(sequence: Sequence) -> tuple[SampleRow, ...]:
        """What is asked for its next token; remembered where every step asks the same."""
        request = sequence.request
        new = request.new
        num_tokens = len(sequence.tokens) + sequence.num_in_flight
        is_banned = num_tokens < request.min_total_tokens and not request.has_timely_ends
        sequence.num_in_flight += 1
        rows = (
            SampleRow(
                sequence.seq_id,
                sequence.epoch,
                sequence.index,
                new.seed,
                request.row_params,
                new.prompt_token_ids if request.needs_history else (),
                sequence.output_view() if request.needs_history else (),
                request.stop_ids if is_banned else (),
                request.stop_ids if request.has_timely_ends else (),
            ),
        )
        if not is_banned and not request.needs_history:
            sequence.sample_rows = rows
        return rows
