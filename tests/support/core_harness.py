"""A scheduler over the fake model, stepped by hand, every invariant checked after every move."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

from pageturner.policies.interfaces import PolicySet
from pageturner.policies.views import Rates
from pageturner.service.core.options import NO_SPECULATION, CacheOptions, SchedulerOptions, SpeculationOptions
from pageturner.service.core.outputs import (
    NO_BLOCK,
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    SampledSequence,
    SchedulerOutput,
    ScoredTokensEvent,
    TextDelta,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest, ResumedChoice
from pageturner.service.core.sampling_params import BeamSearch, SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.core.scheduling.speculation import Drafter
from pageturner.service.core.structured_output import StructuredOutput
from pageturner.service.errors import PageturnerError, RequestAborted, TextFailed
from pageturner.service.policy_host.calls import CallWatch
from support.beam_reference import Answer, expected_answers
from support.fake_disk import FakeDisk
from support.fake_model import FakeModel, Stop, expected_score, expected_tokens
from support.inspection_checks import check_inspection

GUARDED_PATIENCE = 2
"""Steps the guarded request may stand still: one until a step in flight ends, one until its blocks settle."""

P = ParamSpec("P")
R = TypeVar("R")


class NoText:
    """A stop condition without text; asserts that each sequence is started and finished once."""

    def __init__(self) -> None:
        self.live: set[int] = set()

    def start(self, seq_id: int, request: NewRequest) -> None:
        assert seq_id not in self.live
        self.live.add(seq_id)

    def append(self, seq_id: int, token_id: int, *, may_stop: bool, is_stop_token: bool) -> TextDelta:
        assert seq_id in self.live
        return TextDelta("")

    def finish(self, seq_id: int) -> str:
        self.live.remove(seq_id)
        return ""


@dataclass(slots=True)
class Record:
    """What a client of one request has seen."""

    new: NewRequest
    stop: Stop
    outputs: dict[int, list[int]] = field(default_factory=dict)
    token_times: dict[int, list[float]] = field(default_factory=dict)
    finished_choices: set[int] = field(default_factory=set)
    answers: list[Answer] | None = None
    """Of a beam search, what is expected."""
    scores: dict[int | None, list[float]] = field(default_factory=dict)
    end: FinishedEvent | None = None


def _move(method: Callable[P, R]) -> Callable[P, R]:
    """Remember that a move broke, so that nothing that follows hides why."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except PageturnerError:
            raise
        except BaseException:
            harness = args[0]
            assert isinstance(harness, CoreHarness)
            harness.is_broken = True
            raise

    return guarded


class CoreHarness:
    """depth: 0 or 1, as the scheduler's. Time advances by one second a step."""

    model_class: type[FakeModel] = FakeModel

    def __init__(
        self,
        policies: PolicySet,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        depth: int = 0,
        options: SchedulerOptions | None = None,
        enable_prefix_caching: bool = True,
        reuse_partial_blocks: bool = False,
        rates: Rates | None = None,
        scheduler_class: type[Scheduler] = Scheduler,
        speculation: SpeculationOptions = NO_SPECULATION,
        drafter: Callable[[CoreHarness], Drafter] | None = None,
        num_host_cache_blocks: int = 0,
        disk: FakeDisk | None = None,
        window: int | None = None,
        saves_evictions: bool = True,
    ) -> None:
        self.window = window
        self.speculation = speculation
        self.options = options or SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8)
        self.text = NoText()
        self.cache = CacheOptions(
            num_blocks,
            block_size,
            num_host_blocks,
            enable_prefix_caching,
            reuse_partial_blocks,
            num_host_cache_blocks,
            num_disk_cache_blocks=0 if disk is None else 1,
            window=window,
            saves_evictions=saves_evictions,
        )
        self.scheduler = scheduler_class(
            self.options,
            self.cache,
            policies,
            self.text,
            rates or Rates(),
            depth=depth,
            hash_key=b"test",
            watch=CallWatch(escapes=()),
            speculation=speculation,
            drafter=None if drafter is None else drafter(self),
            disk=disk,
        )
        self.model = self.model_class(num_blocks, max(1, num_host_blocks), block_size, window)
        self.disk = disk
        if disk is not None:
            disk.host_pool = self.model.kv_cache.host_pool.numpy()
        self.depth = depth
        self.now = 0.0
        self.records: dict[str, Record] = {}
        self.in_flight: deque[tuple[SchedulerOutput, tuple[SampledSequence, ...]]] = deque()
        self.num_steps = 0
        self.is_broken = False
        self._guarded: str | None = None
        self._guarded_idle_steps = 0

    # --- moves -----------------------------------------------------------------------------

    @_move
    def submit(
        self,
        prompt: tuple[int, ...],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_ids: tuple[int, ...] = (),
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        bypass: bool = False,
        deadline: float | None = None,
        seed: int = 0,
        penalty: float = 0.0,
        request_id: str = "",
        known: tuple[int, ...] | None = None,
        tenant: str = "",
        max_draft_tokens: int | None = None,
        beam_search: BeamSearch | None = None,
        best_of: int | None = None,
        scores_prompt: bool = False,
        continuations: tuple[tuple[int, ...], ...] = (),
        form: StructuredOutput | None = None,
        adapter: str = "",
        hands_over: bool = False,
    ) -> str:
        """Add a request; raises what the scheduler raises.

        known: of an answer that is resumed, how many tokens its client has of each choice, round and round.
        Of a choice with all of them it may know the end, too. continuations: to be scored, in place of an
        answer.
        """
        request_id = request_id or f"r{len(self.records)}"
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_ids,
            presence_penalty=penalty,
            max_draft_tokens=max_draft_tokens,
            beam_search=beam_search,
            best_of=best_of,
            prompt_logprobs=0 if scores_prompt else None,
            structured_output=form,
        )
        if continuations:
            params = SamplingParams(n=len(continuations), max_tokens=max(map(len, continuations)))
        new = NewRequest(
            request_id,
            prompt,
            params,
            seed,
            self.now,
            priority=priority,
            tenant=tenant or f"t{priority}",
            cache_salt=salt,
            bypass_prefix_cache=bypass,
            deadline=deadline,
            adapter=adapter,
            hands_over=hands_over,
        )
        if continuations:
            new = replace(new, is_scoring=True, resumed=tuple(map(ResumedChoice, continuations)))
            known = None
        record = Record(new, Stop(max_tokens, min_tokens, stop_ids))
        if beam_search is not None:
            record.answers = self.expected_answers(record, beam_search)
        if known is not None:
            for index in range(n):
                outputs = self.expected(record, index)
                record.outputs[index] = outputs[: known[index % len(known)]]
                if len(record.outputs[index]) == len(outputs) and known[index % len(known)] % 2:
                    record.finished_choices.add(index)
            resumed = (
                ResumedChoice(tuple(record.outputs[i]), is_finished=i in record.finished_choices)
                for i in range(n)
            )
            record.new = new = replace(new, resumed=tuple(resumed))
        acceptance = self.scheduler.add_request(new)
        self.records[request_id] = record
        self.take(acceptance.events)
        self.check()
        return request_id

    def _schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule(self.now)
        if self.disk is not None:
            self.disk.start(self.scheduler.take_transfers())
        return output

    @_move
    def end_transfers(self, count: int = 1 << 30, pick: int = 0, *, well: bool = True) -> None:
        """Let transfers between host and disk end, at most so many."""
        assert self.disk is not None
        ended = tuple(self.disk.end(pick, well=well) for _ in range(min(count, len(self.disk.under_way))))
        if ended:
            self.scheduler.end_transfers(ended, self.now)
            self.check()
            self.poison_free_blocks()

    @_move
    def step(self) -> SchedulerOutput:
        """Expire, schedule, run; update the oldest step once more than `depth` are in flight."""
        self.now += 1.0
        self.take(self.scheduler.expire(self.now))
        output = self._schedule()
        self.num_steps += 1
        self.check()
        check_inspection(self.scheduler, self.now)
        self._check_progress(output)
        num_tokens = sum(len(part.token_ids) for part in output.scheduled)
        assert num_tokens <= self.options.max_num_batched_tokens, f"budget: a step of {num_tokens} tokens"
        if output:
            self._check_writes(output)
            self.in_flight.append((output, self.model.run(output)))
            self._check_pending()
            self.poison_free_blocks()
        if len(self.in_flight) > self.depth or (self.in_flight and not output):
            self.update()
        return output

    @_move
    def update(self) -> None:
        output, sampled = self.in_flight.popleft()
        self.take(self.scheduler.update(output, sampled, self.now))
        self.check()
        self.poison_free_blocks()

    @_move
    def fail(self, *, moves_blocks: bool = True) -> None:
        """Schedule a step and let it fail, after those before it have ended. moves_blocks: it had begun."""
        self.now += 1.0
        while self.in_flight:
            self.update()
        output = self._schedule()
        if output:
            if moves_blocks:
                self.model.kv_cache.apply(output.block_copies)
            self.take(self.scheduler.fail_step(output, RuntimeError("planted"), self.now))
        self.check()
        self.poison_free_blocks()

    @_move
    def fail_behind(self) -> None:
        """Let the step in flight fail when the next one is planned already, as the engine does."""
        self.now += 1.0
        if not self.in_flight:
            return
        failed, _ = self.in_flight.popleft()
        later = self._schedule()
        self.take(self.scheduler.fail_step(failed, RuntimeError("planted"), self.now))
        self.check()
        if later:
            self.model.kv_cache.apply(later.block_copies)
            self.take(self.scheduler.update(later, (), self.now))
        self.check()
        self.poison_free_blocks()

    @_move
    def abort(self, request_id: str) -> None:
        self.take(self.scheduler.abort_request(request_id, RequestAborted("aborted")))
        self.check()

    @_move
    def run_to_end(self, max_steps: int = 5000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work() and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"progress: requests are unfinished after {max_steps} steps")

    # --- checks ----------------------------------------------------------------------------

    def take(self, events: tuple[Event, ...]) -> None:
        for event in events:
            record = self.records[event.request_id]
            assert record.end is None, f"terminal: {event} follows the end of its request"
            match event:
                case TokenEvent():
                    assert event.index not in record.finished_choices, (
                        "terminal: a token after its choice ended"
                    )
                    record.outputs.setdefault(event.index, []).extend(t.token_id for t in event.tokens)
                    record.token_times.setdefault(event.index, []).extend(self.now for _ in event.tokens)
                case ScoredTokensEvent():
                    self._take_scores(record, event)
                case ChoiceFinishedEvent():
                    assert event.index not in record.finished_choices, "terminal: a choice ended twice"
                    record.finished_choices.add(event.index)
                    if record.answers is not None:
                        assert event.score == record.answers[event.index][1], "tokens: another score"
                case FinishedEvent():
                    record.end = event
                    assert not isinstance(event.error, TextFailed), f"text: {event.error}"
                    if event.error is None:
                        params = record.new.params
                        num_told = params.num_sequences
                        if record.answers is not None:
                            num_told = min(params.n, len(record.answers))
                        assert record.finished_choices == set(range(num_told)), "terminal: early"
                        self._check_scores(record)
            self._check_tokens(record)

    def _take_scores(self, record: Record, event: ScoredTokensEvent) -> None:
        """Each known token is scored once, in order, as it would be without a cache and a scheduler."""
        new, index = record.new, event.index
        prompt = new.prompt_token_ids
        if index is None:
            assert not record.outputs or not any(record.outputs.values()), "scores: after the first token"
        known = prompt if index is None else prompt + new.resumed[index].token_ids
        scores = record.scores.setdefault(index, [])
        first = 1 if index is None else len(prompt)
        assert event.start == len(scores) + (1 if index is None else 0), "scores: a piece is missing or twice"
        for token in event.tokens:
            end = first + len(scores) + 1
            assert token.token_id == known[end - 1], "scores: of another token"
            assert token.logprob == expected_score(list(known[:end]), self.window), (
                f"scores: {new.request_id}[{index}] at {end - 1}, of what unlimited memory does not hold"
            )
            scores.append(token.logprob)

    def _check_scores(self, record: Record) -> None:
        new = record.new
        counts = {index: len(scores) for index, scores in record.scores.items()}
        expected: dict[int | None, int] = {}
        if new.is_scoring:
            expected = {index: len(choice.token_ids) for index, choice in enumerate(new.resumed)}
        elif new.num_score_top is not None and len(new.prompt_token_ids) > 1:
            expected = {None: len(new.prompt_token_ids) - 1}
        assert counts == expected, f"scores: {counts} of {expected}"

    def expected(self, record: Record, index: int) -> list[int]:
        """Outputs of one choice with unlimited memory."""
        if record.answers is not None:
            return record.answers[index][0]
        new = record.new
        return expected_tokens(new.prompt_token_ids, new.seed, index, record.stop, new.adapter, self.window)

    def expected_answers(self, record: Record, search: BeamSearch) -> list[Answer]:
        """All that a beam search comes to with unlimited memory."""
        return expected_answers(record.new.prompt_token_ids, search, record.stop, self.window)

    def _check_tokens(self, record: Record) -> None:
        if record.new.is_scoring:
            assert not record.outputs, "scores: a token was sampled"
        for index, outputs in record.outputs.items():
            expected = self.expected(record, index)
            assert outputs == expected[: len(outputs)], (
                f"tokens: {record.new.request_id}[{index}] is {outputs}, with unlimited memory {expected}"
            )
            if index in record.finished_choices:
                assert outputs == expected, "tokens: a choice ended early"

    def check(self) -> None:
        self.scheduler.check_integrity()

    def _check_writes(self, output: SchedulerOutput) -> None:
        """No request writes a block that another table names or that is cached.

        The step that completes what choices or beams share is exempt: they have the table from the moment it
        is scheduled, but none of them reads before it ended.
        """
        device = self.scheduler.manager.device
        for part in output.scheduled:
            request = self.scheduler.state.requests[part.request_id]
            if len(request.sequences) > 1 and part.end == request.num_shared_tokens:
                continue
            for position in range(max(part.start, part.write_start), part.end):
                block_id = part.block_table[position // self.model.block_size]
                assert not device.is_cached(block_id), f"write: block {block_id} is cached"
                assert device.ref_count(block_id) == 1, f"write: block {block_id} is shared"

    def _check_pending(self) -> None:
        """No block that an unfinished step touches may be taken."""
        device, host = self.scheduler.manager.device, self.scheduler.manager.host
        for output, _ in self.in_flight:
            copies = output.block_copies
            touched = {block for part in output.scheduled for block in part.block_table if block != NO_BLOCK}
            touched |= {copy.source for copy in copies.copies}
            assert not any(map(device.is_available, touched)), "pending: a block in use may be taken"
            sources = {copy.source for copy in copies.swap_ins}
            assert not any(map(host.is_available, sources)), "pending: a swap-in's source may be taken"

    def _check_progress(self, output: SchedulerOutput) -> None:
        """The guarded request computes a token, or ends, within GUARDED_PATIENCE steps."""
        guarded = self.scheduler.guarded_id
        computed = any(part.request_id == guarded for part in output.scheduled)
        is_idle = guarded is not None and guarded == self._guarded and not computed
        self._guarded_idle_steps = self._guarded_idle_steps + 1 if is_idle else 0
        self._guarded = guarded
        assert self._guarded_idle_steps <= GUARDED_PATIENCE, (
            f"progress: guarded request {guarded} stands still"
        )

    def check_finished(self) -> None:
        """After the end: every request has ended and every block is back."""
        for record in self.records.values():
            assert record.end is not None, f"terminal: {record.new.request_id} never ended"
        stats = self.scheduler.stats()
        assert stats.num_blocks_used == 0, f"leak: {stats.num_blocks_used} device blocks"
        assert stats.num_host_blocks_used == 0, f"leak: {stats.num_host_blocks_used} host blocks"
        assert not self.text.live, f"leak: text of sequences {self.text.live}"
        if self.disk is not None:
            self.end_transfers()
            assert not self.scheduler.state.fetching, "leak: fetches"
        assert not self.scheduler.manager.host.num_live, "leak: host blocks of transfers"

    def poison_free_blocks(self) -> None:
        device, host = self.scheduler.manager.device, self.scheduler.manager.host
        self.model.poison(
            {b for b in range(device.num_blocks) if device.is_available(b) and not device.is_cached(b)},
            {b for b in range(host.num_blocks) if host.is_available(b) and not host.is_cached(b)},
        )

    def error_of(self, request_id: str) -> PageturnerError | None:
        end = self.records[request_id].end
        assert end is not None
        return end.error
