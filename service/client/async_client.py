"""The Python client of a Pageturner server, for asyncio.

async with Client("localhost:50051") as client:
    async for event in client.stream("Once upon a time", max_tokens=64):
        if isinstance(event, TokenEvent):
            print(event.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from pageturner.policies.spec import PolicySpec
from pageturner.service.client import calls
from pageturner.service.client.calls import Call, StreamCall
from pageturner.service.client.credentials import CredentialOptions, Credentials, given_credentials
from pageturner.service.client.failures import RETRY_SECONDS, is_away, never_ready, typed_errors
from pageturner.service.client.targets import DEFAULT_TARGET, parse_target
from pageturner.service.client.values import (
    BlockPoolMap,
    Completion,
    Options,
    PromptLike,
    RequestOrder,
    RequestPage,
    Turn,
)
from pageturner.service.client.wire import to_timeout
from pageturner.service.core.clock import Clock, MonotonicClock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import (
    AbortOutcome,
    Activity,
    DrainOutcome,
    ModelInfo,
    RequestState,
    ServerInfo,
    StreamEvent,
)
from pageturner.service.engine.tenants import TenantsReport
from pageturner.service.errors import DeadlineExceeded, Draining, Loading
from pageturner.service.policy_host.reports import PoliciesInfo
from pageturner.service.rpc.status import UnknownStatus

_R = TypeVar("_R", bound=Message)
_T = TypeVar("_T")


class Client:
    """One server, from any event loop: each has a connection of its own, made by its first call.

    target: host:port, a host alone (port 50051), unix:PATH, or another name that gRPC resolves. credentials:
    a token and the files of an encrypted connection, for each of which there is a keyword too. Every failure
    of a call is a `PageturnerError`: the class that the server raised, or `UnknownStatus` with the gRPC code
    for what the server did not say itself. Cancelling the task that awaits a call aborts the request.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        credentials: Credentials | None = None,
        clock: Clock | None = None,
        **options: Unpack[CredentialOptions],
    ) -> None:
        self._target = parse_target(target)
        self._credentials = given_credentials(credentials, options)
        self._clock = clock or MonotonicClock()
        self._channels: dict[asyncio.AbstractEventLoop, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of this loop's connection, and of those whose loop has ended; calls under way fail.

        A later call connects anew.
        """
        self._forget_closed_loops()
        channel = self._channels.pop(asyncio.get_running_loop(), None)
        if channel is not None:
            await channel.close()

    async def generate(self, prompt: PromptLike, **options: Unpack[Options]) -> Completion:
        """The whole answer at once."""
        return await self._ask(calls.generate(prompt, options))

    def stream(self, prompt: PromptLike, **options: Unpack[Options]) -> AsyncGenerator[StreamEvent, None]:
        """The answer as it comes: AcceptedEvent; TokenEvents and a ChoiceFinishedEvent for each choice;
        FinishedEvent.

        Leaving the loop early should be followed by `aclose` (`contextlib.aclosing` does so), which aborts
        the request; else it is aborted when the generator is collected.
        """
        return self._follow(calls.stream(prompt, options))

    def chat(
        self,
        messages: Iterable[Turn],
        *,
        template_variables: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
        **options: Unpack[Options],
    ) -> AsyncGenerator[StreamEvent, None]:
        """`stream` with a conversation for a prompt, through the model's chat template.

        template_variables: for the template, such as `enable_thinking`; values as JSON has them.
        continue_final_message: the answer goes on with the last message in place of a turn of its own.
        """
        return self._follow(calls.chat(messages, template_variables, continue_final_message, options))

    async def abort(self, *request_ids: str) -> Mapping[str, AbortOutcome]:
        """End requests by id; what became of each."""
        return await self._ask(calls.abort(request_ids))

    async def tokenize(
        self, prompt: PromptLike, *, model: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """The ids that a prompt becomes, a conversation through the model's chat template."""
        return await self._ask(calls.tokenize(prompt, model, add_special_tokens))

    async def detokenize(self, token_ids: Iterable[int], *, model: str = "") -> str:
        """The text of ids, special tokens left out."""
        return await self._ask(calls.detokenize(token_ids, model))

    async def models(self) -> tuple[ModelInfo, ...]:
        """Every model served, the default one first."""
        return await self._ask(calls.models())

    async def model(self, name: str = "") -> ModelInfo:
        """One model; raises ModelNotFound."""
        return await self._ask(calls.model(name))

    async def server_info(self) -> ServerInfo:
        """What runs there: version, sizes, measured rates, configuration."""
        return await self._ask(calls.server_info())

    async def policies(self) -> PoliciesInfo:
        """The policy of each axis, and how the shadows compare."""
        return await self._ask(calls.policies())

    async def set_policies(
        self,
        policies: Mapping[str, PolicySpec] = calls.NO_POLICIES,
        *,
        shadows: Mapping[str, PolicySpec | None] = calls.NO_POLICIES,
        preset: str = "",
        expected_revision: int | None = None,
    ) -> PoliciesInfo:
        """Put other policies in force while requests run; axes left out stay as they are.

        shadows: policies to ask and not obey; None ends one. preset: a named set, under `policies`.
        expected_revision: refuse unless it is in force. Raises InvalidArgument, or StaleRevision; nothing
        is changed then.
        """
        return await self._ask(calls.set_policies(policies, shadows, preset, expected_revision))

    async def load(self) -> SchedulerStats:
        """The scheduler's gauges and counters."""
        return await self._ask(calls.load())

    async def tenants(self, limit: int = 100) -> TenantsReport:
        """What tenants hold, may have and were refused: at most `limit`, those that hold most first."""
        return await self._ask(calls.tenants(limit))

    async def drain(self, grace_seconds: float | None = None) -> DrainOutcome:
        """End the server's work in order, and wait until it has ended; leaving before ends nothing of it.

        grace_seconds: how long running requests may go on, by default as the server is configured. The
        process stays, drained, until it is told to end.
        """
        return await self._ask(calls.drain(grace_seconds))

    def watch_load(self, interval_seconds: float) -> AsyncGenerator[SchedulerStats, None]:
        """The load now and then every so often, without end."""
        return self._follow(calls.watch_load(interval_seconds))

    async def list_requests(
        self,
        *,
        page_size: int | None = None,
        page_token: str = "",
        order: RequestOrder = "schedule",
        states: Iterable[RequestState] = (),
        tenant: str | None = None,
    ) -> RequestPage:
        """The requests that live, of every tenant unless one is given; at most page_size (by default 100).

        page_token: `next_page_token` of the page before. states: those alone, if any is given.
        """
        return await self._ask(calls.list_requests(page_size, page_token, order, states, tenant))

    async def abort_requests(
        self, *request_ids: str, tenant: str | None = None
    ) -> Mapping[str, AbortOutcome]:
        """End any tenant's requests, by the ids of `list_requests`, or those of one by its own ids; what
        became of each."""
        return await self._ask(calls.abort_requests(request_ids, tenant))

    async def blocks(self) -> BlockPoolMap:
        """What each block of the device pool is used for, and by which request."""
        return await self._ask(calls.blocks())

    async def activity(self) -> Activity:
        """What was done since the server's start: tokens, ends, latencies."""
        return await self._ask(calls.activity())

    async def flight_record(self) -> bytes:
        """What the scheduler was told and decided of late, without text: a file for `pageturner replay`
        and `pageturner explain`."""
        return b"".join([chunk async for chunk in self._follow(calls.flight_record())])

    async def is_serving(
        self, service: str = calls.GENERATION_SERVICE, *, timeout_seconds: float | None = None
    ) -> bool:
        """Whether the server can be reached and is ready for calls of this service, now.

        Raises UnknownStatus where it is not reached, DeadlineExceeded where it does not answer in time.
        """
        return await self._ask(calls.check_health(service, timeout_seconds))

    async def wait_until_serving(self, timeout_seconds: float) -> None:
        """Return once the server can be reached and says it is ready; raises DeadlineExceeded.

        A server that goes away meanwhile, as one that is restarted does, is waited for again.
        """
        timeout = to_timeout(timeout_seconds)
        end = None if timeout is None else self._clock.now() + timeout
        while True:
            left = None if end is None else max(0.0, end - self._clock.now())
            try:
                async with aclosing(self._follow(calls.watch_health(left))) as states:
                    async for is_serving in states:
                        if is_serving:
                            return
            except DeadlineExceeded as error:
                raise never_ready(self._target, timeout_seconds) from error
            except (UnknownStatus, Draining, Loading) as error:
                if not is_away(error):
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    # Sending

    async def _ask(self, call: Call[_R, _T]) -> _T:
        method = self._channel().unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response.FromString,
        )
        with typed_errors(self._target), _told_from_cancelling():
            response = await method(
                call.request, timeout=call.timeout_seconds, metadata=self._credentials.metadata()
            )
        return call.read(response)

    async def _follow(self, call: StreamCall[_R, _T]) -> AsyncGenerator[_T, None]:
        """What the messages of a stream say. The call ends, on the server too, when this is left."""
        method = self._channel().unary_stream(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.response.FromString,
        )
        rpc = method(
            call.request,
            timeout=call.timeout_seconds,
            wait_for_ready=call.waits,
            metadata=self._credentials.metadata(),
        )
        try:
            with typed_errors(self._target), _told_from_cancelling():
                async for message in rpc:
                    if (value := call.read(message)) is not None:
                        yield value
        finally:
            rpc.cancel()

    def _channel(self) -> grpc.aio.Channel:
        """Of the running loop: gRPC binds a channel to the loop that made it."""
        loop = asyncio.get_running_loop()
        channel = self._channels.get(loop)
        if channel is None:
            self._forget_closed_loops()
            address, options = self._target.address, self._target.channel_options()
            credentials = self._credentials.of_channel()
            channel = self._channels[loop] = (
                grpc.aio.insecure_channel(address, options=options)
                if credentials is None
                else grpc.aio.secure_channel(address, credentials, options=options)
            )
        return channel

    def _forget_closed_loops(self) -> None:
        """Nothing can be awaited there any more; a channel closes when it is collected."""
        for loop in list(self._channels):
            if loop.is_closed():
                self._channels.pop(loop, None)


@contextmanager
def _told_from_cancelling() -> Iterator[None]:
    """gRPC raises CancelledError in a task that nothing cancels when the channel is closed under its call."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnknownStatus(grpc.StatusCode.CANCELLED.name, "the client was closed") from None
