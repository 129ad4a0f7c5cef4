"""Replicas of the spoken model without Ray: each stream breaks where a test says, or is refused."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pageturner.service.errors import PageturnerError
from pageturner.service.scale.calls import Begun, Call, Failure, ReplicaLost, RouteHint
from pageturner.v1 import generation_pb2 as pb
from support.resumed_streams import SpokenService


@dataclass(frozen=True, slots=True)
class Break:
    """What becomes of one stream: lost behind so many messages, ended early behind them, or refused."""

    after: int = 0
    error: PageturnerError | None = None
    is_early_end: bool = False


@dataclass
class ScriptedReplicas:
    """Implements `answers.Replicas`. breaks: one a stream, in order; those beyond are whole.

    names: of the replicas, of which each stream goes to the first that its hint does not avoid.
    """

    breaks: Sequence[Break] = ()
    names: Sequence[str] = ("a", "b", "c")
    make: Callable[[], SpokenService] = SpokenService
    hints: list[RouteHint] = field(default_factory=list)
    requests: list[pb.GenerateStreamRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_open: int = 0

    def __post_init__(self) -> None:
        self._left: Iterator[Break] = iter(self.breaks)

    def _chosen(self, hint: RouteHint) -> str:
        self.hints.append(hint)
        return next((name for name in self.names if name not in hint.avoid), self.names[0])

    async def follow(
        self, method: str, request: bytes, call: Call, hint: RouteHint
    ) -> AsyncGenerator[Begun | bytes | Failure, None]:
        assert method == "GenerateStream"
        message = pb.GenerateStreamRequest.FromString(request)
        self.requests.append(message)
        self.num_open += 1
        try:
            yield Begun(self._chosen(hint))
            broken = next(self._left, None)
            if broken is not None and broken.error is not None:
                yield Failure.of(broken.error)
                return
            try:
                (messages,) = self.make().streams(message)
            except PageturnerError as error:
                yield Failure.of(error)
                return
            for each in messages if broken is None else messages[: broken.after]:
                yield each.SerializeToString()
            if broken is not None and not broken.is_early_end:
                raise ReplicaLost("planted")
        finally:
            self.num_open -= 1

    async def ask(
        self, method: str, request: bytes, call: Call, hint: RouteHint
    ) -> tuple[str, bytes | Failure]:
        chosen, broken = self._chosen(hint), next(self._left, None)
        if broken is None:
            return chosen, request
        if broken.error is None:
            raise ReplicaLost("planted")
        return chosen, Failure.of(broken.error)

    async def ask_all(self, method: str, request: bytes, call: Call) -> list[bytes | Failure]:
        assert method == "Abort"
        self.aborted += pb.AbortRequest.FromString(request).request_ids
        return []
