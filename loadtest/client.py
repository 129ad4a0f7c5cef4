"""One request over the wire, watched closely: when each of its tokens came, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import grpc

from pageturner.loadtest.workload.plan import PlannedRequest
from pageturner.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from pageturner.v1.generation_pb2_grpc import GenerationServiceAsyncStub

Now = Callable[[], float]
Metadata = tuple[tuple[str, str], ...]


class Outcome(Enum):
    """SHED: refused because the queue was full. ABANDONED: cancelled by the client, as the workload says.
    CANCELLED: aborted by another, or out of time."""

    OK = "ok"
    SHED = "shed"
    ABANDONED = "abandoned"
    CANCELLED = "cancelled"
    FAILED = "failed"


_OUTCOMES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Outcome.SHED,
    grpc.StatusCode.CANCELLED: Outcome.CANCELLED,
    grpc.StatusCode.ABORTED: Outcome.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: Outcome.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message that brought tokens: when, and how many."""

    at: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What became of one request; times are seconds on one clock.

    scheduled_at: when it was due, from which latencies count, so that a client that falls behind cannot
    flatter the server. turn: place in its conversation, from 0. is_slow_reader: pauses between its messages
    are the client's own. num_swaps, num_recomputes, num_tail_reclaims: its preemptions, by kind.
    policies: those in force when it ended, by axis.
    """

    index: int
    outcome: Outcome
    error: str
    scheduled_at: float
    sent_at: float
    ended_at: float
    num_prompt_tokens: int
    turn: int = 0
    is_slow_reader: bool = False
    arrivals: tuple[Arrival, ...] = ()
    num_cached_prompt_tokens: int = 0
    queue_seconds: float = 0.0
    num_swaps: int = 0
    num_recomputes: int = 0
    num_tail_reclaims: int = 0
    policies: tuple[tuple[str, str], ...] = ()

    @property
    def num_output_tokens(self) -> int:
        """Those that came, whatever the server counted."""
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def send_lag(self) -> float:
        """Seconds by which the client was late in sending."""
        return self.sent_at - self.scheduled_at

    @property
    def end_to_end(self) -> float:
        """Seconds from being due to the end."""
        return self.ended_at - self.scheduled_at

    @property
    def last_token(self) -> float | None:
        """Seconds from being due to the last message with tokens; None where no token came."""
        return self.arrivals[-1].at - self.scheduled_at if self.arrivals else None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from being due; None where no token came."""
        return self.arrivals[0].at - self.scheduled_at if self.arrivals else None

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds a token after the first; None below two tokens."""
        if self.num_output_tokens < 2:
            return None
        return (self.arrivals[-1].at - self.arrivals[0].at) / (self.num_output_tokens - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between one message with tokens and the next: the pauses that a reader sees."""
        return [
            later.at - earlier.at for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)
        ]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer. answer: the tokens that came, for the next turn."""

    record: RequestRecord
    answer: tuple[int, ...]


def to_message(request: PlannedRequest, model: str) -> pb.GenerateStreamRequest:
    """Greedy, and past the model's end tokens, so that the output is as long as the workload says."""
    return pb.GenerateStreamRequest(
        model=model,
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=request.prompt_token_ids)),
        sampling=pb.SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True),
        priority=request.priority,
        tenant=request.tenant,
    )


async def send(
    stub: GenerationServiceAsyncStub,
    request: PlannedRequest,
    *,
    model: str,
    scheduled_at: float,
    timeout_seconds: float,
    now: Now,
    metadata: Metadata = (),
) -> Exchange:
    """Send it and read its stream as the request's reader would. What goes wrong is in the record, never
    raised."""
    sent_at = now()
    conduct = request.conduct
    arrivals: list[Arrival] = []
    answer: list[int] = []
    finished: pb.Finished | None = None
    outcome, error = Outcome.OK, ""
    try:
        call = stub.GenerateStream(to_message(request, model), timeout=timeout_seconds, metadata=metadata)
        async for message in call:
            kind = message.WhichOneof("event")
            if kind == "delta" and message.delta.token_ids:
                arrivals.append(Arrival(now(), len(message.delta.token_ids)))
                answer += message.delta.token_ids
            elif kind == "finished":
                finished = message.finished
            if conduct.cancel_after is not None and len(answer) >= conduct.cancel_after:
                call.cancel()
                outcome = Outcome.ABANDONED
                break
            if conduct.pause_seconds:
                await asyncio.sleep(conduct.pause_seconds)
    except grpc.aio.AioRpcError as status:
        outcome = _OUTCOMES.get(status.code(), Outcome.FAILED)
        error = f"{status.code().name}: {status.details()}"
    else:
        if outcome is not Outcome.ABANDONED:
            error = _fault(finished, arrivals, request)
            outcome = Outcome.FAILED if error else Outcome.OK
    ended_at = now()
    finished = finished or pb.Finished()
    preemptions = finished.timings.preemptions
    record = RequestRecord(
        index=request.index,
        outcome=outcome,
        error=error,
        scheduled_at=scheduled_at,
        sent_at=sent_at,
        ended_at=ended_at,
        num_prompt_tokens=len(request.prompt_token_ids),
        turn=request.turn,
        is_slow_reader=conduct.pause_seconds > 0,
        arrivals=tuple(arrivals),
        num_cached_prompt_tokens=finished.usage.cached_prompt_tokens,
        queue_seconds=finished.timings.queue_seconds,
        num_swaps=preemptions.swaps,
        num_recomputes=preemptions.recomputes,
        num_tail_reclaims=preemptions.tail_reclaims,
        policies=tuple(sorted(finished.policies.items())),
    )
    return Exchange(record, tuple(answer))


def _fault(finished: pb.Finished | None, arrivals: list[Arrival], request: PlannedRequest) -> str:
    """How a stream that ended with status OK broke its contract; empty if it did not."""
    num_tokens = sum(arrival.num_tokens for arrival in arrivals)
    if finished is None:
        return "the stream ended with status OK but without Finished"
    if finished.usage.output_tokens != num_tokens:
        return f"Finished counts {finished.usage.output_tokens} tokens, {num_tokens} came"
    if num_tokens != request.output_tokens:
        return f"{num_tokens} tokens came, {request.output_tokens} were asked for with ignore_eos"
    return ""
