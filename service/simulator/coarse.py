"""A simulated server in the large: the scheduler's batches under its default policies, many steps at once.

Between two changes of its batch a server's steps differ only by the tokens that each adds, so a stretch of
decode steps is one sum. Blocks are counted in tokens and cached in chunks; a victim of shortage recomputes.
That is enough for a thousand servers and a million requests on one core. `pageturner bench fleet` prints how
far it is from the scheduler itself, which `replica.SchedulerReplica` runs.

It knows first-come-first-served, full-prompt, decode-first and least-computed, one choice a request and no
deadlines.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pageturner.service.simulator.chunks import Chains, ChunkCache
from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.replica import Outcome, Progress
from pageturner.service.simulator.stretches import StretchTime
from pageturner.service.simulator.workload import WorkloadRequest


@dataclass(slots=True)
class _Job:
    """A request on this server.

    num_known: tokens of prompt and answer. num_computed: of those, while it is prefilled. last_step: the
    server's count of decode steps at which it ends, once it decodes. digests: its chain, of which it holds
    the first num_chunks while it runs. num_cached: prompt tokens found in the cache when it first started;
    below 0 before that.
    """

    index: int
    num_prompt: int
    num_output: int
    digests: tuple[int, ...]
    num_known: int
    num_computed: int = 0
    last_step: int = 0
    num_chunks: int = 0
    num_cached: int = -1


class CoarseReplica:
    """One server, as `replica.SchedulerReplica` is one. chains: of the workload's requests."""

    def __init__(
        self, requests: Sequence[WorkloadRequest], machine: SimulatedMachine, chains: Chains
    ) -> None:
        self.until: float | None = None
        self.num_scheduled_tokens = 0
        self.num_preemptions = 0
        self._requests = requests
        self._chains = chains
        self._chunk = chains.chunk_tokens
        self._options = machine.scheduler
        self._block_size = machine.cache.block_size
        self._has_cache = machine.cache.enable_prefix_caching
        self._capacity = machine.cache.num_blocks * machine.cache.block_size
        self._watermark = self._options.watermark * self._capacity
        self._cache = ChunkCache()
        self._outcomes: dict[int, Outcome] = {}
        self._refused: list[int] = []
        self._model = machine.step_time
        self._time = StretchTime.of(machine.step_time)
        self._waiting: deque[_Job] = deque()
        self._queued_tokens = 0
        self._prefilling: list[_Job] = []
        self._decoding: list[tuple[int, int, _Job]] = []  # by last_step, then index: a heap
        self._num_steps = 0  # of decodes
        self._context = 0  # tokens that the next step's decodes read together
        self._private = 0  # tokens of running requests outside of the chunks that they hold
        self._chunks: list[tuple[_Job, int]] = []  # of the step under way: who is prefilled, and how far
        self._began = 0.0
        self._stretch = 0  # decode steps under way, at once; 0 where nothing decodes
        self._is_mixed = False

    # --- what the fleet asks ---------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """All that are there."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return self._queued_tokens

    def outcome(self, index: int) -> Outcome:
        """What became of a request that ended; told once."""
        return self._outcomes.pop(index)

    def submit(self, index: int, at: float, now: float) -> None:
        """It is sent here, and taken before the next step, which tells if it was refused. A stretch of decode
        steps that is under way ends with the step of this moment, if the request could start then."""
        planned = self._requests[index]
        if planned.num_choices > 1 or planned.deadline_seconds is not None:
            raise WorkloadError("coarse replicas know neither deadlines nor several choices of a request")
        num_prompt, options = planned.num_prompt_tokens, self._options
        is_refused = (
            num_prompt >= options.max_model_len
            or num_prompt + self._block_size > self._capacity
            or len(self._waiting) >= options.max_waiting
            or self._queued_tokens + num_prompt > options.max_queued_tokens
        )
        if is_refused:
            self._outcomes[index] = Outcome(0, 0, has_failed=True)
            self._refused.append(index)
            return
        num_output = min(planned.output.num_tokens, options.max_model_len - num_prompt)
        digests = self._chains.of(index).digests if self._has_cache else ()
        job = _Job(index, num_prompt, num_output, digests, num_prompt)
        self._waiting.append(job)
        self._queued_tokens += num_prompt
        if self.until is not None and not self._is_mixed and len(self._waiting) == 1 and self._fits(job):
            self._cut(now)

    def begin(self, now: float) -> Progress:
        """Begin the next step, or stretch of steps, if there is anything to do."""
        self._make_room()
        self._plan_prefills()
        self._began = now
        num_decoding = len(self._decoding)
        self._is_mixed = bool(self._chunks)
        if self._is_mixed:
            self._stretch = 1 if num_decoding else 0
            self.until = now + self._mixed_seconds()
        elif num_decoding:
            self._stretch = self._longest_stretch()
            self.until = now + self._time.seconds(self._stretch, num_decoding, self._context)
        else:
            self.until = None
        if not self._refused:
            return _NOTHING
        refused, self._refused = self._refused, []
        return Progress((), refused)

    def finish(self) -> Progress:
        """What it did until `until` is done."""
        self.until = None
        started: list[int] = []
        ended: list[int] = []
        steps, decoding = self._stretch, self._decoding
        num_decoding = len(decoding)
        self._num_steps += steps
        self._context += steps * num_decoding
        self._private += steps * num_decoding
        self.num_scheduled_tokens += steps * num_decoding
        while decoding and decoding[0][0] <= self._num_steps:
            job = heapq.heappop(decoding)[2]
            num_known = job.num_prompt + job.num_output
            self._context -= num_known
            self._end(job, num_known)
            ended.append(job.index)
        for job, num_tokens in self._chunks:
            self.num_scheduled_tokens += num_tokens
            job.num_computed += num_tokens
            if job.num_computed == job.num_known:
                self._prefilling.remove(job)
                self._first_token(job, started, ended)
        self._chunks = []
        self._cache.shrink(self._num_idle_chunks())
        return Progress(started, ended)

    # --- time ------------------------------------------------------------------------------

    def _mixed_seconds(self) -> float:
        """Of a step that prefills, beside the decodes."""
        model, count = self._model, len(self._decoding)
        seconds = self._time.seconds(1, count, self._context)
        for job, num_tokens in self._chunks:
            start = job.num_computed
            num_pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
            seconds += (
                model.a_sequence
                + model.a_token * num_tokens
                + model.a_read_token * (start + num_tokens)
                + model.an_attended_pair * num_pairs
            )
            if start + num_tokens == job.num_known:
                seconds += model.a_sample
        return seconds

    def _longest_stretch(self) -> int:
        """Decode steps until the first ends or the blocks do."""
        count = len(self._decoding)
        room = self._num_free_tokens() // count
        return max(1, min(self._decoding[0][0] - self._num_steps, room))

    def _cut(self, now: float) -> None:
        """End the stretch with the step that is under way at `now`."""
        count = len(self._decoding)
        steps = self._time.steps_until(now - self._began, count, self._context)
        if steps < self._stretch:
            self._stretch = steps
            self.until = self._began + self._time.seconds(steps, count, self._context)

    # --- who runs --------------------------------------------------------------------------

    def _plan_prefills(self) -> None:
        """Share the step's budget out: decodes, then prompts that have begun, then those that may."""
        budget = self._options.max_num_batched_tokens - len(self._decoding)
        chunks = self._chunks
        for job in self._prefilling:
            if budget <= 0:
                return
            count = min(budget, job.num_known - job.num_computed)
            chunks.append((job, count))
            budget -= count
        waiting = self._waiting
        while waiting and budget > 0 and self._fits(waiting[0]):
            job = waiting.popleft()
            self._queued_tokens -= job.num_known
            self._start(job)
            count = min(budget, job.num_known - job.num_computed)
            chunks.append((job, count))
            budget -= count

    def _fits(self, job: _Job) -> bool:
        """Whether a slot is free, and blocks for every token that it knows beside the watermark."""
        num_running = len(self._prefilling) + len(self._decoding)
        if num_running >= self._options.max_num_seqs:
            return False
        num_chunks = min(len(job.digests), job.num_known // self._chunk)
        held = num_chunks - self._cache.num_new(job.digests[:num_chunks])
        needed = job.num_known - held * self._chunk + self._block_size
        return needed + (self._watermark if num_running else 0) <= self._num_free_tokens()

    def _start(self, job: _Job) -> None:
        num_chunks = min(len(job.digests), job.num_known // self._chunk)
        chain = job.digests[:num_chunks]
        hit = self._cache.num_hits(chain) * self._chunk
        if hit >= job.num_known:  # the last token is always computed, for its logits
            hit = job.num_known - self._block_size
        job.num_computed = max(0, hit)
        if job.num_cached < 0:
            job.num_cached = job.num_computed
        job.num_chunks = num_chunks
        self._cache.hold(chain)
        self._private += job.num_known - num_chunks * self._chunk
        self._prefilling.append(job)

    def _first_token(self, job: _Job, started: list[int], ended: list[int]) -> None:
        """Its prompt is computed, so it gets a token; it decodes from now on, or has ended."""
        if job.num_known == job.num_prompt:
            started.append(job.index)
        job.num_known += 1
        self._private += 1
        num_left = job.num_prompt + job.num_output - job.num_known
        if num_left == 0:
            self._end(job, job.num_known)
            ended.append(job.index)
            return
        job.last_step = self._num_steps + num_left
        self._context += job.num_known
        heapq.heappush(self._decoding, (job.last_step, job.index, job))

    def _end(self, job: _Job, num_known: int) -> None:
        self._leave(job, num_known, num_known)
        self._cache.add(job.digests[job.num_chunks : (num_known - 1) // self._chunk])
        self._outcomes[job.index] = Outcome(job.num_output, max(0, job.num_cached))

    def _leave(self, job: _Job, num_known: int, num_computed: int) -> None:
        """Give its blocks up; of what is computed, full chunks stay cached."""
        self._cache.release(job.digests[: job.num_chunks], num_computed // self._chunk)
        self._private -= num_known - job.num_chunks * self._chunk

    # --- blocks ----------------------------------------------------------------------------

    def _num_free_tokens(self) -> int:
        """Tokens that blocks held by no request have room for; half of each one's last block is lost."""
        num_running = len(self._prefilling) + len(self._decoding)
        lost = num_running * self._block_size // 2
        return self._capacity - self._cache.num_held * self._chunk - self._private - lost

    def _num_idle_chunks(self) -> int:
        return self._num_free_tokens() // self._chunk

    def _make_room(self) -> None:
        """Preempt until the next step of those that decode has blocks: of all that run, who has least."""
        while self._decoding and self._num_free_tokens() < len(self._decoding):
            if len(self._decoding) + len(self._prefilling) == 1:
                return
            self._preempt()

    def _preempt(self) -> None:
        steps = self._num_steps
        decoding = min(
            self._decoding, key=lambda entry: (_num_known(entry[2], steps), -entry[1]), default=None
        )
        prefilling = min(self._prefilling, key=lambda job: (job.num_computed, -job.index), default=None)
        if prefilling is not None and (
            decoding is None or prefilling.num_computed <= _num_known(decoding[2], steps)
        ):
            self._prefilling.remove(prefilling)
            self._leave(prefilling, prefilling.num_known, prefilling.num_computed)
            job = prefilling
        else:
            assert decoding is not None, "nothing runs, and blocks are short"
            job = decoding[2]
            self._decoding.remove(decoding)
            heapq.heapify(self._decoding)
            job.num_known = _num_known(job, steps)
            self._context -= job.num_known
            self._leave(job, job.num_known, job.num_known - 1)
        job.num_computed = job.num_chunks = 0
        self._waiting.appendleft(job)
        self._queued_tokens += job.num_known
        self.num_preemptions += 1


_NOTHING = Progress()


def _num_known(job: _Job, num_steps: int) -> int:
    """Tokens of a request that decodes, after so many steps of its server."""
    return job.num_prompt + job.num_output - (job.last_step - num_steps)
