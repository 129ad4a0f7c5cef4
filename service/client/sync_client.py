"""The Python client of a Pageturner server, for code without an event loop: scripts, threads, notebooks.

with SyncClient("localhost:50051") as client:
    for event in client.stream("Once upon a time", max_tokens=64):
        if isinstance(event, TokenEvent):
            print(event.text, end="", flush=True)
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from pageturner.policies.spec import PolicySpec
from pageturner.service.client import admin_calls, calls
from pageturner.service.client.answer_streams import AnswerStream
from pageturner.service.client.balancing import Balancing, Mixed
from pageturner.service.client.calls import AnswerCall
from pageturner.service.client.credentials import CredentialOptions, Credentials, given_credentials
from pageturner.service.client.from_wire import most_telling
from pageturner.service.client.retry import STANDARD, Retried, Retry, balanced
from pageturner.service.client.sync_connection import SyncConnection
from pageturner.service.client.sync_servers import SyncServers
from pageturner.service.client.targets import DEFAULT_TARGET, parse_targets
from pageturner.service.client.values import (
    BlockPoolMap,
    Completion,
    Options,
    PromptLike,
    RequestOrder,
    RequestPage,
    ScoreOptions,
    Turn,
)
from pageturner.service.core.clock import Clock, MonotonicClock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.engine.api import (
    AbortOutcome,
    Activity,
    AdapterInfo,
    DrainOutcome,
    ModelInfo,
    RequestState,
    ScoreAnswer,
    ServerInfo,
)
from pageturner.service.engine.tenants import TenantsReport
from pageturner.service.policy_host.reports import PoliciesInfo


class SyncClient:
    """A service, from any thread; the threads share connections, made by the first call, and a forked child
    makes its own. The methods are those of `Client`, without `await`.

    target: host:port, a host alone (port 50051), unix:PATH, or another name that gRPC resolves; or several
    servers that stand in for one another: calls go to the first that works and stay with it.
    balancing: spreads them over all that work instead: `round-robin`, `least-load`, `power-of-two`, or
    `session`, by the option of that name. mixed: what becomes of servers that compute other tokens than the
    others: `warn`, `refuse` or `allow`.
    retry: what is done where a server is away, is full, or is lost in the middle of an answer. on_retry: told
    each time. credentials: a token and the files of an encrypted connection; there is a keyword for each too.
    random: draws from [0, 1), so that the waits of many clients differ.

    Every failure of a call is a `PageturnerError`: the class that the server raised, or `UnknownStatus` with
    the gRPC code for what the server did not say itself. A call that is left, by Ctrl-C too, aborts its
    request.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        credentials: Credentials | None = None,
        balancing: Balancing | None = None,
        mixed: Mixed = "warn",
        retry: Retry = STANDARD,
        on_retry: Callable[[Retried], object] | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], object] = time.sleep,
        random: Callable[[], float] = random.random,
        **options: Unpack[CredentialOptions],
    ) -> None:
        targets, proof = parse_targets(target), given_credentials(credentials, options)
        routing = balanced(targets, balancing, mixed, retry, clock or MonotonicClock(), random, on_retry)
        self._servers = SyncServers(
            tuple(
                SyncConnection(each, proof, routing.takes_load(number))
                for number, each in enumerate(routing.targets)
            ),
            routing,
            sleep,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections; calls under way fail. A later call connects anew."""
        self._servers.close()

    def score(
        self,
        prompt: PromptLike,
        continuations: Iterable[str | Iterable[int]],
        **options: Unpack[ScoreOptions],
    ) -> ScoreAnswer:
        """How likely continuations of a prompt are, texts or lists of token ids, whose KV they share.

        A text is tokenized by itself: a space that belongs to it stands at its beginning.
        """
        return self._servers.ask(calls.score(prompt, continuations, options))

    def generate(self, prompt: PromptLike, **options: Unpack[Options]) -> Completion:
        """The whole answer at once.

        Where its server is lost another one goes on with it, as with a `stream`. An only server, which has to
        come back first, computes it anew.
        """
        if self._servers.can_stand_in:
            return self._servers.complete(calls.stream(prompt, options))
        return self._servers.ask(calls.generate(prompt, options))

    def stream(self, prompt: PromptLike, **options: Unpack[Options]) -> AnswerStream:
        """The answer as it comes: AcceptedEvent; TokenEvents and a ChoiceFinishedEvent for each choice;
        FinishedEvent.

        Where it breaks off it goes on, on another server or the same, with exactly the tokens that would have
        come. `with client.stream(...) as events` aborts the request when the block is left; so does `close`,
        and at last the collection of the stream.
        """
        return self._answer(calls.stream(prompt, options))

    def chat(
        self,
        messages: Iterable[Turn],
        *,
        template_variables: Mapping[str, object] | None = None,
        continue_final_message: bool = False,
        tools: Iterable[object] = (),
        template: str = "",
        **options: Unpack[Options],
    ) -> AnswerStream:
        """`stream` with a conversation for a prompt, through the model's chat template.

        template_variables: for the template, such as `enable_thinking`; values as JSON has them.
        continue_final_message: the answer goes on with the last message in place of a turn of its own.
        tools: what the assistant may call, as JSON has it. template: one of the model's by name.
        """
        call = calls.chat(messages, template_variables, continue_final_message, tools, template, options)
        return self._answer(call)

    def abort(self, *request_ids: str) -> Mapping[str, AbortOutcome]:
        """End requests by id, on whichever server they run; what became of each."""
        return most_telling(self._servers.ask_each(calls.abort(request_ids)))

    def tokenize(
        self, prompt: PromptLike, *, model: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """The ids that a prompt becomes, a conversation through the model's chat template."""
        return self._servers.ask(calls.tokenize(prompt, model, add_special_tokens))

    def render(self, prompt: PromptLike, *, model: str = "") -> str:
        """The text that is tokenized of a prompt: of a conversation, what the model's template writes."""
        return self._servers.ask(calls.render(prompt, model))

    def detokenize(self, token_ids: Iterable[int], *, model: str = "") -> str:
        """The text of ids, special tokens left out."""
        return self._servers.ask(calls.detokenize(token_ids, model))

    def models(self) -> tuple[ModelInfo, ...]:
        """Every model served, the default one first."""
        return self._servers.ask(calls.models())

    def model(self, name: str = "") -> ModelInfo:
        """One model; raises ModelNotFound."""
        return self._servers.ask(calls.model(name))

    def server_info(self) -> ServerInfo:
        """What runs there: version, sizes, measured rates, configuration."""
        return self._servers.ask(admin_calls.server_info())

    def policies(self) -> PoliciesInfo:
        """The policy of each axis, and how the shadows compare."""
        return self._servers.ask(admin_calls.policies())

    def set_policies(
        self,
        policies: Mapping[str, PolicySpec] = admin_calls.NO_POLICIES,
        *,
        shadows: Mapping[str, PolicySpec | None] = admin_calls.NO_POLICIES,
        preset: str = "",
        expected_revision: int | None = None,
    ) -> PoliciesInfo:
        """Put other policies in force while requests run; axes left out stay as they are.

        shadows: policies to ask and not obey; None ends one. preset: a named set, under `policies`.
        expected_revision: refuse unless it is in force. Raises InvalidArgument, or StaleRevision; nothing
        is changed then.
        """
        return self._servers.ask(admin_calls.set_policies(policies, shadows, preset, expected_revision))

    def load(self) -> SchedulerStats:
        """The scheduler's gauges and counters."""
        return self._servers.ask(admin_calls.load())

    def tenants(self, limit: int = 100) -> TenantsReport:
        """What tenants hold, may have and were refused: at most `limit`, those that hold most first."""
        return self._servers.ask(admin_calls.tenants(limit))

    def drain(self, grace_seconds: float | None = None) -> DrainOutcome:
        """End the server's work in order, and wait until it has ended; see `Client.drain`."""
        return self._servers.ask(admin_calls.drain(grace_seconds))

    def watch_load(self, interval_seconds: float) -> Generator[SchedulerStats, None, None]:
        """The load now and then every so often, without end."""
        return self._servers.follow(admin_calls.watch_load(interval_seconds))

    def list_requests(
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
        return self._servers.ask(admin_calls.list_requests(page_size, page_token, order, states, tenant))

    def abort_requests(self, *request_ids: str, tenant: str | None = None) -> Mapping[str, AbortOutcome]:
        """End any tenant's requests, by the ids of `list_requests`, or those of one by its own ids; what
        became of each."""
        return self._servers.ask(admin_calls.abort_requests(request_ids, tenant))

    def blocks(self) -> BlockPoolMap:
        """What each block of the device pool is used for, and by which request."""
        return self._servers.ask(admin_calls.blocks())

    def prefix_summary(self) -> PrefixSummary:
        """Which prompts' beginnings the server's prefix cache holds, as fingerprints of blocks."""
        return self._servers.ask(admin_calls.prefix_summary())

    def watch_prefix_summary(self, interval_seconds: float) -> Generator[PrefixSummary, None, None]:
        """The same now, and again whenever it has changed, without end; only changes cross the wire."""
        return self._servers.follow(admin_calls.watch_prefix_summary(interval_seconds))

    def activity(self) -> Activity:
        """What was done since the server's start: tokens, ends, latencies."""
        return self._servers.ask(admin_calls.activity())

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Let requests name the adapter in a folder of the server's, below the one that it loads from.

        Raises InvalidArgument for one that is not served; nothing is changed then. A name that is loaded
        already stands for the new one from then on.
        """
        return self._servers.ask(admin_calls.load_adapter(name, os.fspath(path)))

    def unload_adapter(self, name: str, wait_seconds: float = 0.0) -> int:
        """Let no request name an adapter any more; how many still have it after so long, and go on."""
        return self._servers.ask(admin_calls.unload_adapter(name, wait_seconds))

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, then those that wait for the end of their last request."""
        return self._servers.ask(admin_calls.adapters())

    def flight_record(self) -> bytes:
        """What the scheduler was told and decided of late, without text: a file for `pageturner replay`
        and `pageturner explain`."""
        return b"".join(self._servers.follow(admin_calls.flight_record()))

    def is_serving(
        self, service: str = calls.GENERATION_SERVICE, *, timeout_seconds: float | None = None
    ) -> bool:
        """Whether the server can be reached and is ready for calls of this service, now.

        Raises UnknownStatus where it is not reached, DeadlineExceeded where it does not answer in time.
        """
        return self._servers.ask(calls.check_health(service, timeout_seconds))

    def wait_until_serving(self, timeout_seconds: float) -> None:
        """Return once a server can be reached and says it is ready; raises DeadlineExceeded.

        A server that goes away meanwhile, as one that is restarted does, is waited for again.
        """
        self._servers.wait_until_serving(timeout_seconds)

    def _answer(self, call: AnswerCall) -> AnswerStream:
        answer = self._servers.partial_answer(call)
        return AnswerStream(self._servers.answer(call, answer), answer)
