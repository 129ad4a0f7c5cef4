"""A simulated server in the large: the scheduler's batches under its default policies, many steps at once.

Between two changes of its batch a server's steps differ only by the tokens that each adds, so a stretch of
decode steps is one sum. Blocks are counted in tokens and cached in chunks; a victim of shortage recomputes.
That is enough for a thousand servers and a million requests on one core. `pageturner bench fleet` prints how
far it is from the scheduler itself, which `replica.SchedulerReplica` runs.

It knows first-come-first-served, full-prompt, decode-first and least-computed, one choice a request and no
deadlines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pageturner.service.simulator.chunks import Chains, ChunkCache
from pageturner.service.simulator.decode_batch import DecodeBatch, Job
from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.outcomes import NOTHING, Outcome, Progress
from pageturner.service.simulator.stretches import StretchTime
from pageturner.service.simulator.workload import WorkloadRequest


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
        self._waiting: deque[Job] = deque()
        self._queued_tokens = 0
        self._prefilling: list[Job] = []
        self._decoding = DecodeBatch()
        self._private = 0  # tokens of running requests outside of the chunks that they hold
        self._chunks: list[tuple[Job, int]] = []  # of the step under way: who is prefilled, and how far
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
        job = Job(index, num_prompt, num_output, digests, num_prompt)
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
            self.until = now + self._time.seconds(self._stretch, num_decoding, self._decoding.context)
        else:
            self.until = None
        if not self._refused:
            return NOTHING
        refused, self._refused = self._refused, []
        return Progress((), refused)

    def finish(self) -> Progress:
        """What it did until `until` is done."""
        self.until = None
        started: list[int] = []
        ended: list[int] = []
        num_tokens = self._stretch * len(self._decoding)
        self._private += num_tokens
        self.num_scheduled_tokens += num_tokens
        for job in self._decoding.advance(self._stretch):
            self._end(job)
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
        seconds = self._time.seconds(1, count, self._decoding.context)
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
        return max(1, min(self._decoding.steps_to_an_end, room))

    def _cut(self, now: float) -> None:
        """End the stretch with the step that is under way at `now`."""
        count, context = len(self._decoding), self._decoding.context
        steps = self._time.steps_until(now - self._began, count, context)
        if steps < self._stretch:
            self._stretch = steps
            self.until = self._began + self._time.seconds(steps, count, context)

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

    def _fits(self, job: Job) -> bool:
        """Whether a slot is free, and blocks for every token that it knows beside the watermark."""
        num_running = len(self._prefilling) + len(self._decoding)
        if num_running >= self._options.max_num_seqs:
            return False
        num_chunks = min(len(job.digests), job.num_known // self._chunk)
        held = num_chunks - self._cache.num_new(job.digests[:num_chunks])
        needed = job.num_known - held * self._chunk + self._block_size
        return needed + (self._watermark if num_running else 0) <= self._num_free_tokens()

    def _start(self, job: Job) -> None:
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

    def _first_token(self, job: Job, started: list[int], ended: list[int]) -> None:
        """Its prompt is computed, so it gets a token; it decodes from now on, or has ended."""
        if job.num_known == job.num_prompt:
            started.append(job.index)
        job.num_known += 1
        self._private += 1
        if job.num_known < job.num_prompt + job.num_output:
            self._decoding.add(job)
            return
        self._end(job)
        ended.append(job.index)

    def _end(self, job: Job) -> None:
        num_known = job.num_known
        self._leave(job, num_known, num_known)
        self._cache.add(job.digests[job.num_chunks : (num_known - 1) // self._chunk])
        self._outcomes[job.index] = Outcome(job.num_output, max(0, job.num_cached))

    def _leave(self, job: Job, num_known: int, num_computed: int) -> None:
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
        decoding = self._decoding.shortest()
        job = min(self._prefilling, key=lambda job: (job.num_computed, -job.index), default=None)
        if job is not None and (decoding is None or job.num_computed <= decoding[0]):
            self._prefilling.remove(job)
            self._leave(job, job.num_known, job.num_computed)
        else:
            assert decoding is not None, "nothing runs, and blocks are short"
            job = decoding[1]
            self._decoding.remove(job)
            self._leave(job, job.num_known, job.num_known - 1)
        job.num_computed = job.num_chunks = 0
        self._waiting.appendleft(job)
        self._queued_tokens += job.num_known
        self.num_preemptions += 1
