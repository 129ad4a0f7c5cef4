"""Takes requests in, and refuses at once what could never be served or finds the queue full."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from pageturner.service.core.memory.window import SlidingWindow
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outlook import Outlook, Work
from pageturner.service.core.outputs import Acceptance, StopCondition
from pageturner.service.core.request import NewRequest, Request, Sequence
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.deadlines import Deadlines
from pageturner.service.core.scheduling.finish import Finisher, text_failed
from pageturner.service.core.scheduling.policy_events import tell_queued
from pageturner.service.core.scheduling.resume import AFRESH, ChoiceStart, events_of, start_choice
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.errors import (
    DeadlineTooClose,
    DuplicateRequest,
    InvalidArgument,
    PageturnerError,
    QueueFull,
)

SAFETY = 0.9
"""The share of the time to its deadline in which a request has to end, by the forecast, to be taken in."""
WAITING_SHARE = 0.2
"""The share of its spare time that a request may wait in any case: what is left lets it run beside others."""


def asked_work(
    num_prompt_tokens: int, params: SamplingParams, options: SchedulerOptions, num_resumed: int = 0
) -> Work:
    """What a request asks for, before it is known what of it fits. num_resumed: tokens of its answers that
    came with it, and have only to be computed."""
    most = options.max_model_len - num_prompt_tokens if params.max_tokens is None else params.max_tokens
    n = params.num_sequences
    return Work(num_prompt_tokens + num_resumed, n, max(n, n * most - num_resumed))


def check_queue(options: SchedulerOptions, outlook: Outlook, work: Work) -> None:
    """Raise QueueFull unless a request of this work may join the queue; it says when there will be room.

    The bounds are on requests that have yet to start: those that are preempted were let in once.
    """
    num_queued = outlook.num_queued
    if num_queued >= options.max_waiting:
        over = (num_queued + 1 - options.max_waiting) / num_queued
        seconds = outlook.start_seconds(over)
        raise QueueFull(f"{num_queued} requests are waiting already", seconds)
    num_tokens = outlook.num_queued_prompt_tokens + work.num_prompt_tokens
    if num_queued and num_tokens > options.max_queued_tokens:
        over = min(1.0, (num_tokens - options.max_queued_tokens) / outlook.num_queued_prompt_tokens)
        seconds = outlook.start_seconds(over)
        raise QueueFull(f"{num_tokens} prompt tokens would be waiting", seconds, "queued_tokens")


def check_deadline(options: SchedulerOptions, outlook: Outlook, work: Work, seconds: float) -> None:
    """Raise DeadlineTooClose where the queue leaves a request too little of the `seconds` to its deadline.

    Only where a queue stands: a request before which none waits may end too late, but takes nothing from
    others by trying.
    """
    if not (options.deadline_shedding and outlook.is_full):
        return
    most = work.num_max_output_tokens // work.num_sequences
    asked = work.num_prompt_tokens, min(outlook.short_answer, most)
    service = outlook.concurrency.seconds(*asked, work.num_sequences)
    wait = outlook.queue_seconds if outlook.is_in_order else 0.0
    spare = seconds - outlook.concurrency.seconds_alone(*asked)
    longest = max(SAFETY * seconds - service, WAITING_SHARE * spare)
    if wait > max(0.0, longest):
        reason = f"{seconds:.1f} s are left, and it would likely take {service:.1f} s"
        raise DeadlineTooClose(f"{reason} after {wait:.1f} s behind others", wait - max(0.0, longest))


@dataclass(frozen=True, slots=True)
class Room:
    """What a request has to fit into alone: a pool, to which it gives back what a sliding window passed."""

    num_blocks: int
    block_size: int
    window: SlidingWindow | None = None

    @classmethod
    def of(cls, num_blocks: int, block_size: int, window: int | None) -> Room:
        """window: in keys."""
        return cls(num_blocks, block_size, None if window is None else SlidingWindow(window, block_size))

    @property
    def whole(self) -> Room:
        """For a request that gives nothing back: rows that are scored may have to be computed once more."""
        return Room(self.num_blocks, self.block_size)

    def num_peak_blocks(self, num_prompt_tokens: int, max_tokens: int, n: int) -> int:
        """Blocks without which such a request can't go on, by one token a step if there are no more."""
        return views.num_peak_blocks(num_prompt_tokens, max_tokens, n, self.block_size, self.window)

    def likely_peak_blocks(
        self, num_prompt_tokens: int, max_tokens: int, n: int, num_step_tokens: int
    ) -> int:
        """Blocks that it takes where steps have so many tokens for it."""
        shape = (num_prompt_tokens, max_tokens, n, self.block_size)
        return min(self.num_blocks, views.num_peak_blocks(*shape, self.window, num_step_tokens))


def checked_max_tokens(new: NewRequest, options: SchedulerOptions, pool: Room) -> int:
    """The max_tokens in force: as asked, or what fits if none was asked.

    A request must fit the pool alone, at its peak, or it would wait for ever with all behind it. Raises
    InvalidArgument naming the field that makes it too large.
    """
    pool = pool.whole if new.is_scored else pool
    num_prompt, num_blocks, block_size = len(new.prompt_token_ids), pool.num_blocks, pool.block_size
    n = new.params.num_sequences
    field, kind = ("n", "choices") if new.params.beam_search is None else ("beam_search.width", "beams")
    field = field if new.params.best_of is None else "best_of"
    if num_prompt == 0:
        raise InvalidArgument("prompt", "has no tokens")
    if n > min(options.max_n, options.max_num_seqs):
        raise InvalidArgument(field, f"{n} is over the limit of {min(options.max_n, options.max_num_seqs)}")
    room = options.max_model_len - num_prompt
    if room < 1:
        raise InvalidArgument(
            "prompt",
            f"{num_prompt} tokens leave no room to generate; max_model_len is {options.max_model_len}",
        )
    if pool.num_peak_blocks(num_prompt, 1, n) > num_blocks:
        raise InvalidArgument(
            "prompt", f"{num_prompt} tokens never fit the cache of {num_blocks} blocks of {block_size}"
        )
    asked = new.params.max_tokens
    if asked is not None and asked > room:
        raise InvalidArgument(
            "max_tokens",
            f"{asked} and a prompt of {num_prompt} tokens exceed max_model_len {options.max_model_len}",
        )
    wanted = room if asked is None else asked
    fitting = _largest_fitting(num_prompt, wanted, n, pool)
    if asked is not None and fitting < asked:
        raise InvalidArgument(
            "max_tokens",
            f"{asked} for each of {n} {kind} never fits the cache of {num_blocks} blocks of {block_size}; "
            f"at most {fitting} would",
        )
    if fitting < new.params.min_tokens:
        raise InvalidArgument("min_tokens", f"{new.params.min_tokens} is more than the {fitting} that fit")
    return fitting


def _largest_fitting(num_prompt: int, wanted: int, n: int, pool: Room) -> int:
    """The largest max_tokens up to `wanted` whose peak fits; by bisection, since the peak only grows."""
    low, high = 1, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if pool.num_peak_blocks(num_prompt, middle, n) <= pool.num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


class Intake:
    """stop_condition: told of each sequence that comes to be. deadlines: watch each request from then on.
    finisher: ends one that lacks no token."""

    def __init__(
        self, state: SchedulerState, deadlines: Deadlines, finisher: Finisher, stop_condition: StopCondition
    ) -> None:
        self._state = state
        self._deadlines = deadlines
        self._finisher = finisher
        self._stop_condition = stop_condition

    def accept(self, new: NewRequest) -> Acceptance:
        """Queue a request. Raises what `Scheduler.add_request` says; nothing is changed then."""
        state, waiting, manager = self._state, self._state.waiting, self._state.manager
        if new.request_id in state.requests:
            raise DuplicateRequest(new.request_id)
        n, num_prompt_tokens = new.params.num_sequences, len(new.prompt_token_ids)
        pool = Room(manager.device.num_blocks, manager.block_size, manager.window)
        pool = pool.whole if new.is_scored else pool
        max_tokens = checked_max_tokens(new, state.options, pool)
        num_tokens = num_prompt_tokens + new.num_resumed_tokens
        check_queue(state.options, state.outlook(), Work(num_tokens, n, n * max_tokens))
        seq_ids = range(state.next_seq_id, state.next_seq_id + n)
        starts = self._start_choices(seq_ids, new, max_tokens)
        root = manager.root_hash(adapter=new.adapter, salt=new.cache_salt, tenant=new.cache_tenant)
        request = Request(new, state.next_order, max_tokens, root)
        request.num_blocks_peak = pool.likely_peak_blocks(
            num_prompt_tokens, max_tokens, n, state.options.max_num_batched_tokens
        )
        request.policies = state.policy_host.names
        state.next_order += 1
        state.next_seq_id += n
        for index, seq_id in enumerate(seq_ids):
            sequence = Sequence(seq_id, request, index)
            sequence.is_finished = starts[index].is_over
            request.sequences.append(sequence)
            if not sequence.is_finished:
                state.sequences[seq_id] = sequence
        request.is_forked = len(request.unfinished) == 1
        state.enlist(request)
        self._deadlines.watch(request)
        tell_queued(state, request, is_first=True)
        events = tuple(events_of(new, starts))
        if request.unfinished:
            waiting.add(request)
        else:
            events = (*events, self._finisher.complete(request))
        return Acceptance(max_tokens, events)

    def restore(self, request: Request) -> None:
        """Watch a request, and begin the texts of its choices, after a restore."""
        self._deadlines.watch(request)
        for sequence in () if request.new.is_scoring else request.unfinished:
            self._stop_condition.start(sequence.seq_id, request.new)

    def _start_choices(self, seq_ids: range, new: NewRequest, max_tokens: int) -> list[ChoiceStart]:
        """Begin the text of every choice, or of none. Raises TextFailed, or what `start_choice` refuses."""
        if new.is_scoring:  # no text comes of it
            return [AFRESH for _ in seq_ids]
        starts: list[ChoiceStart] = []
        for index, seq_id in enumerate(seq_ids):
            try:
                starts.append(start_choice(new, index, seq_id, max_tokens, self._stop_condition))
            except Exception as error:
                for started in range(seq_ids.start, seq_id + 1):
                    with suppress(Exception):  # their text is dropped
                        self._stop_condition.finish(started)
                raise error if isinstance(error, PageturnerError) else text_failed(error) from error
        return starts
