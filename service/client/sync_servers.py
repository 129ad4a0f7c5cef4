"""A client's servers: calls that may be repeated are, an answer that broke off goes on. Without a loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from google.protobuf.message import Message

from pageturner.service.client import calls
from pageturner.service.client.calls import AnswerCall, Call, StreamCall
from pageturner.service.client.failures import (
    ABORT_SECONDS,
    CHECK_SECONDS,
    REASON_SECONDS,
    RETRY_SECONDS,
    is_away,
    never_ready,
)
from pageturner.service.client.partial_answer import PartialAnswer
from pageturner.service.client.retry import Routing
from pageturner.service.client.sync_connection import SyncConnection
from pageturner.service.client.to_wire import to_timeout
from pageturner.service.client.values import Completion, CompletionBuilder
from pageturner.service.core.outputs import TokenEvent
from pageturner.service.engine.api import StreamEvent
from pageturner.service.errors import DeadlineExceeded, DuplicateRequest, PageturnerError
from pageturner.v1 import generation_pb2

_R = TypeVar("_R", bound=Message)
_T = TypeVar("_T")


class SyncServers:
    """connections: one for each of the routing's targets. sleep: waits between two attempts."""

    def __init__(
        self,
        connections: tuple[SyncConnection, ...],
        routing: Routing,
        sleep: Callable[[float], object],
    ) -> None:
        self._connections = connections
        self._routing = routing
        self._sleep = sleep

    def close(self) -> None:
        """Let go of the connections; a later call connects anew."""
        for connection in self._connections:
            connection.close()

    def ask(self, call: Call[_R, _T]) -> _T:
        """The answer to a call: of the current server, or of another where the call may be repeated."""
        routing = self._routing
        with closing(routing.attempts(call.timeout_seconds, call.wanted)) as attempts:
            while True:
                attempt = replace(call, timeout_seconds=attempts.left_seconds())
                try:
                    answer = self._connections[attempts.server].ask(attempt)
                except PageturnerError as error:
                    if not call.repeats:
                        raise
                    self._sleep(routing.again(attempts, error))
                else:
                    routing.answered(attempts.server)
                    return answer

    def ask_each(self, call: Call[_R, _T]) -> list[_T]:
        """The answers of all servers that give one. Raises the last error where none does."""
        answers, last = [], None
        for connection in self._connections:
            try:
                answers.append(connection.ask(call))
            except PageturnerError as error:
                last = error
        if last is not None and not answers:
            raise last
        return answers

    def follow(self, call: StreamCall[_R, _T]) -> Generator[_T, None, None]:
        """What the messages of a stream of the current server say."""
        return self._connections[self._routing.current].follow(call)

    def partial_answer(self, call: AnswerCall) -> PartialAnswer:
        """For `answer`: nothing has come yet."""
        return PartialAnswer(call.request, allow_inexact=self._routing.retry.allow_inexact)

    def answer(self, call: AnswerCall, answer: PartialAnswer) -> Generator[StreamEvent, None, None]:
        """The events of one answer, of however many streams. answer: of the call's request, nothing taken."""
        routing, holders = self._routing, set[int]()
        with closing(routing.attempts(call.timeout_seconds, call.wanted)) as attempts:
            while True:
                server, num_accepted = attempts.server, answer.num_accepted
                part = replace(
                    call,
                    request=answer.next_request(),
                    read=partial(self._read, server, answer),
                    timeout_seconds=attempts.left_seconds(),
                )
                with closing(self._connections[server].follow(part)) as events:
                    while True:
                        try:
                            event = next(events)
                        except StopIteration:
                            return
                        except PageturnerError as error:
                            failure = error
                            break
                        attempts.succeed()
                        routing.answered(server)
                        if isinstance(event, TokenEvent):
                            attempts.computed()
                        yield event
                if answer.num_accepted > num_accepted:
                    holders.add(server)
                wait = routing.again(attempts, failure, answer)
                if isinstance(failure, DuplicateRequest) and server in holders:
                    self._end_there(server, answer.request_id)
                self._sleep(wait)

    def _read(
        self, server: int, answer: PartialAnswer, message: generation_pb2.GenerateStreamResponse
    ) -> StreamEvent | None:
        """Raises MixedServers before anything is taken of an answer that is not to be had from there."""
        if message.HasField("accepted"):
            self._routing.note_begun(server, message.accepted.fingerprint)
        return answer.take(message)

    @property
    def can_stand_in(self) -> bool:
        """Whether an answer that breaks off may go on elsewhere, or is to be looked at as it begins."""
        routing = self._routing
        return len(self._connections) > 1 and (routing.retry.resumes or routing.is_balanced)

    def complete(self, call: AnswerCall) -> Completion:
        """The whole of an answer, put together from as many streams as it takes."""
        builder = CompletionBuilder()
        with closing(self.answer(call, self.partial_answer(call))) as events:
            for event in events:
                builder.add(event)
        return builder.build()

    def wait_until_serving(self, timeout_seconds: float) -> None:
        """Return once a server can be reached and says it is ready; raises DeadlineExceeded."""
        routing = self._routing
        attempts = routing.attempts(to_timeout(timeout_seconds))
        while True:
            for server in range(len(self._connections)):
                try:
                    if self._is_serving(server, attempts.left_seconds()):
                        routing.current = server
                        return
                except DeadlineExceeded as error:
                    left = attempts.left_seconds()
                    if (left is not None and left <= 0) or len(self._connections) == 1:
                        reason = self._reason(server)
                        raise never_ready(routing.targets[server], timeout_seconds, reason) from error
                except PageturnerError as error:
                    if not is_away(error):
                        raise
            self._sleep(RETRY_SECONDS)

    def _is_serving(self, server: int, left_seconds: float | None) -> bool:
        """An only server is waited for; of several, each is asked in turn."""
        if len(self._connections) > 1:
            seconds = CHECK_SECONDS if left_seconds is None else min(CHECK_SECONDS, left_seconds)
            check = calls.check_health(calls.GENERATION_SERVICE, seconds)
            return self._connections[server].ask(check)
        watch = calls.watch_health(left_seconds)
        with closing(self._connections[server].follow(watch)) as states:
            for is_serving in states:
                if is_serving:
                    return True
        return False

    def _reason(self, server: int) -> str:
        """Why it is not ready, as far as it can be told: a call that waits for a connection is not told."""
        try:
            self._connections[server].ask(calls.check_health(calls.GENERATION_SERVICE, REASON_SECONDS))
        except PageturnerError as error:
            return str(error)
        return "it answers, and is not ready"

    def _end_there(self, server: int, request_id: str) -> None:
        """A server that has not noticed that its client was lost still computes the answer: end that."""
        with suppress(PageturnerError):  # one that is away has nothing to end, or is asked again
            self._connections[server].ask(replace(calls.abort((request_id,)), timeout_seconds=ABORT_SECONDS))
