"""One run of the memory study: a trace through the real scheduler and its real block tables.

What is real: the scheduler and all its policies, the block pool, tables, forks and copies; with a loaded
model also the KV pool and the time of each step. What is modelled: on a simulated machine the time of a
step; in every run the length of an answer, which the trace states in place of a model's end token, and
which no policy is told.

Contiguous contenders run in the same scheduler on the same pool. A request reaches the scheduler once a run
of blocks is found for all that it reserves, and holds that run as its table until it ends. So they neither
copy, share nor preempt, and all that differs between contenders is how blocks are set aside.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Protocol

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.bench.reservations import Demand, Lengths, RunAllocator
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import (
    SampledSequence,
    SampledToken,
    SchedulerOutput,
    TextDelta,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest, Request, Sequence
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.flight.step_work import work_of
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.runner import Runner
from pageturner.service.model.sampler import Sampler
from pageturner.service.simulator.machine import SimulatedMachine


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """prompt_tokens, and of each choice the tokens of its answer."""

    prompt_tokens: int
    answer_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Shares of all KV slots of the pool, averaged over the time in which requests wait for memory.

    tokens: slots that hold a token. reserved: that will hold one before their request ends. unused: set
    aside, and never filled. free: in no table.
    """

    tokens: float = 0.0
    reserved: float = 0.0
    unused: float = 0.0
    free: float = 0.0

    @property
    def useful(self) -> float:
        """The share of what is set aside that holds tokens."""
        held = self.tokens + self.reserved + self.unused
        return self.tokens / held if held else 0.0


@dataclass(frozen=True, slots=True)
class StudyRun:
    """What one contender came to.

    batch: sequences that run, on average while requests wait. tokens_per_second: output tokens in that time;
    total_tokens_per_second: to the end of the last request. shared: by how much the blocks of all tables,
    each counted by itself, exceed those in use, as a share of the former. num_copies: blocks copied on write.
    """

    name: str
    block_size: int
    use: MemoryUse
    batch: float
    tokens_per_second: float
    total_tokens_per_second: float
    seconds: float
    shared: float
    num_preemptions: int
    num_copies: int


class StepModel(Protocol):
    """Computes a step, for real or in thought."""

    def run(self, output: SchedulerOutput) -> tuple[tuple[SampledSequence, ...], float]:
        """A token for each row to be sampled, and the seconds that the step took."""
        ...


class ModelledSteps:
    """Steps whose time is that of a simulated machine."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._step_time = machine.step_time

    def run(self, output: SchedulerOutput) -> tuple[tuple[SampledSequence, ...], float]:
        """One and the same token everywhere."""
        token = (SampledToken(7),)
        rows = [row for part in output.scheduled for row in part.samples]
        sampled = tuple(SampledSequence(row.seq_id, row.epoch, token) for row in rows)
        return sampled, self._step_time.seconds(work_of(output))


@dataclass(frozen=True, slots=True)
class RealSteps:
    """Steps that a loaded model computes, in its own KV pool."""

    kv_cache: KvCache
    runner: Runner
    sampler: Sampler

    def run(self, output: SchedulerOutput) -> tuple[tuple[SampledSequence, ...], float]:
        """What the model says; nothing in a trace depends on it."""
        started = time.perf_counter()
        self.kv_cache.apply(output.block_copies)
        sampled: tuple[SampledSequence, ...] = ()
        if output.scheduled:
            sampled = self.sampler.sample(self.runner.forward(output), output)
        return sampled, time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class StudySetting:
    """What all contenders share. num_slots: tokens of the KV pool, the budget."""

    trace: tuple[TracedRequest, ...]
    num_slots: int
    limits: SchedulerOptions
    rates: Rates
    token_ids: range = range(100, 1000)


def run_contender(
    name: str, setting: StudySetting, steps: StepModel, demand: Demand | None, block_size: int
) -> StudyRun:
    """The trace from an empty pool to its last answer, all of it waiting from the start. demand: of a
    contiguous contender; None for paging."""
    return _Run(name, setting, steps, demand, block_size).to_end()


class _Lengths:
    """Ends each choice where the trace says. left: tokens to come, by sequence."""

    def __init__(self, trace: Items[TracedRequest]) -> None:
        self._coming = {str(index): list(request.answer_tokens) for index, request in enumerate(trace)}
        self._left: dict[int, int] = {}

    def start(self, seq_id: int, request: NewRequest) -> None:
        self._left[seq_id] = self._coming[request.request_id].pop(0)

    def append(self, seq_id: int, token_id: int, *, may_stop: bool, is_stop_token: bool) -> TextDelta:
        self._left[seq_id] -= 1
        return TextDelta("", matched_stop=None if self._left[seq_id] else "the trace")

    def finish(self, seq_id: int) -> str:
        del self._left[seq_id]
        return ""


@dataclass(slots=True)
class _Held:
    """What is held at a moment. entries: of tables. blocks: each once. tokens, ever: slots that are filled,
    and that will be in the end."""

    sequences: int = 0
    entries: int = 0
    blocks: int = 0
    tokens: int = 0
    ever: int = 0


@dataclass(slots=True)
class _Sums:
    """Over the time in which requests wait, each weighted by its seconds."""

    seconds: float = 0.0
    tokens: float = 0.0
    reserved: float = 0.0
    unused: float = 0.0
    free: float = 0.0
    sequences: float = 0.0
    entries: float = 0.0
    blocks: float = 0.0
    num_outputs: int = 0


@dataclass(slots=True)
class _Run:
    name: str
    setting: StudySetting
    steps: StepModel
    demand: Demand | None
    block_size: int
    scheduler: Scheduler = field(init=False)
    runs: RunAllocator | None = field(init=False, default=None)
    waiting: deque[int] = field(init=False)
    sums: _Sums = field(init=False, default_factory=_Sums)

    def __post_init__(self) -> None:
        num_blocks = self.setting.num_slots // self.block_size
        limits = self.setting.limits
        if self.demand is not None:
            limits = replace(limits, watermark=0.0)  # to the scheduler no block is ever left
        self.scheduler = Scheduler(
            limits,
            CacheOptions(num_blocks, self.block_size, enable_prefix_caching=False),
            registry.default_policies(),
            _Lengths(self.setting.trace),
            self.setting.rates,
        )
        self.waiting = deque(range(len(self.setting.trace)))
        if self.demand is not None:
            self.runs = RunAllocator(self.scheduler.manager.device)

    def to_end(self) -> StudyRun:
        scheduler, sums = self.scheduler, self.sums
        now, num_outputs = 0.0, 0
        while True:
            self._send()
            output = scheduler.schedule(now)
            if not output and not scheduler.has_work():
                break
            sampled, seconds = self.steps.run(output)
            now += seconds
            if self.waiting or scheduler.state.waiting:
                self._add_up(seconds, sum(len(result.tokens) for result in sampled))
            events = scheduler.update(output, sampled, now)
            num_outputs += sum(len(event.tokens) for event in events if isinstance(event, TokenEvent))
        stats, spent = scheduler.stats(), sums.seconds or 1.0
        slots = spent * self.setting.num_slots
        return StudyRun(
            self.name,
            self.block_size,
            MemoryUse(sums.tokens / slots, sums.reserved / slots, sums.unused / slots, sums.free / slots),
            batch=sums.sequences / spent,
            tokens_per_second=sums.num_outputs / spent,
            total_tokens_per_second=num_outputs / now,
            seconds=now,
            shared=1 - sums.blocks / sums.entries if sums.entries else 0.0,
            num_preemptions=stats.num_swap_preemptions_total
            + stats.num_recompute_preemptions_total
            + stats.num_tail_preemptions_total,
            num_copies=stats.num_copied_blocks_total,
        )

    # --- who comes in ----------------------------------------------------------------------

    def _send(self) -> None:
        """Paging: all of the trace at once, the scheduler decides. A contiguous contender: in order, as many
        as find a run."""
        if self.runs is not None:
            self.runs.collect()
        while self.waiting:
            index = self.waiting[0]
            traced = self.setting.trace[index]
            table = None
            if self.runs is not None and self.demand is not None:
                if sum(self.scheduler.num_requests()) >= self.setting.limits.max_num_seqs:
                    return
                (answer,) = traced.answer_tokens
                lengths = Lengths(traced.prompt_tokens, answer, self.setting.limits.max_model_len)
                table = self.runs.take(self.demand(lengths))
                if table is None:
                    return
            self.waiting.popleft()
            self._submit(index, traced, table)

    def _submit(self, index: int, traced: TracedRequest, table: list[int] | None) -> None:
        ids = self.setting.token_ids
        prompt = tuple(ids[(index * 31 + position) % len(ids)] for position in range(traced.prompt_tokens))
        params = SamplingParams(n=len(traced.answer_tokens), ignore_eos=True, temperature=0.0)
        self.scheduler.add_request(NewRequest(str(index), prompt, params, seed=index, arrival_time=0.0))
        if table is not None:
            request = self.scheduler.state.requests[str(index)]
            self.scheduler.manager.restore_tables(request.sequences[0], tuple(table), ())
            self.scheduler.state.holders[request.order] = request

    # --- what is held ----------------------------------------------------------------------

    def _add_up(self, seconds: float, num_outputs: int) -> None:
        sums, num_slots = self.sums, self.setting.num_slots
        held = _Held()
        for request in self.scheduler.state.requests.values():
            if len(request.sequences) == 1:
                self._count_lone(request.sequences[0], held)
            else:
                self._count_group(request, held)
        sums.seconds += seconds
        sums.tokens += seconds * held.tokens
        sums.reserved += seconds * (held.ever - held.tokens)
        sums.unused += seconds * (held.blocks * self.block_size - held.ever)
        sums.free += seconds * (num_slots - held.blocks * self.block_size)
        sums.sequences += seconds * held.sequences
        sums.entries += seconds * held.entries
        sums.blocks += seconds * held.blocks
        sums.num_outputs += num_outputs

    def _count_lone(self, sequence: Sequence, held: _Held) -> None:
        num_blocks = self.scheduler.manager.num_blocks(sequence)
        num_slots = num_blocks * self.block_size
        held.sequences += num_blocks > 0
        held.entries += num_blocks
        held.blocks += num_blocks
        held.tokens += min(num_slots, sequence.num_kv_tokens)
        held.ever += min(num_slots, self._final_tokens(sequence))

    def _count_group(self, request: Request, held: _Held) -> None:
        """Choices share blocks: each counts once, by its fullest holder."""
        size = self.block_size
        filled: dict[int, int] = {}
        ever: dict[int, int] = {}
        for sequence in request.unfinished:
            table, final = self.scheduler.manager.table(sequence), self._final_tokens(sequence)
            held.sequences += bool(table)
            held.entries += len(table)
            for first, block_id in zip(range(0, len(table) * size, size), table, strict=True):
                now, end = sequence.num_kv_tokens - first, final - first
                filled[block_id] = max(filled.get(block_id, 0), min(size, max(0, now)))
                ever[block_id] = max(ever.get(block_id, 0), min(size, max(0, end)))
        held.blocks += len(filled)
        held.tokens += sum(filled.values())
        held.ever += sum(ever.values())

    def _final_tokens(self, sequence: Sequence) -> int:
        """Tokens whose KV it will hold in the end: the last one's is never made."""
        traced = self.setting.trace[int(sequence.request.request_id)]
        return traced.prompt_tokens + traced.answer_tokens[sequence.index] - 1
