"""The deployment that computes: one engine of the service in a process of Ray's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from pageturner.service.config import LoadedConfig, cache_directory
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.engine.api import EngineHealth
from pageturner.service.errors import EngineDead
from pageturner.service.logs import structured
from pageturner.service.scale.agreement import Agreement
from pageturner.service.scale.autoscaling import BUSY, QUEUED_TOKENS
from pageturner.service.scale.calls import Begun, Call, Failure, RouteHint
from pageturner.service.scale.local_services import LocalServices
from pageturner.service.scale.open_streams import LOOK_SECONDS, OpenStreams
from pageturner.service.scale.options import Settings
from pageturner.service.scale.prompts import Reading, TokenizerParts
from pageturner.service.scale.reports import ReplicaReport
from pageturner.v1 import admin_pb2 as pb
from pageturner.v1 import generation_pb2

if TYPE_CHECKING:
    from pageturner.service.engine.async_engine import AsyncEngine
    from pageturner.service.model.artifacts import ModelArtifacts

RECONCILE_SECONDS, FIRST_RECONCILE_SECONDS, NUM_FIRST = 5.0, 0.5, 20
"""How often a replica asks for the agreement, in case it was not reached when that changed: more often at
first, since Ray reaches a replica by all means only some time after it has started."""

MAX_ROUTERS = 256
"""Of which a report says what it counts. Ingresses that are gone are forgotten first."""


class _Joins(Protocol):
    @property
    def join(self) -> Any: ...


class EngineReplica:
    """Its methods are called by Ray, on one event loop; requests, answers and errors pass as bytes."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self,
        settings: Settings,
        coordinator: _Joins,
        own_id: Callable[[], str],
        is_gone: Callable[[str], bool],
    ) -> None:
        self._id = own_id()
        self._coordinator = coordinator
        self._agreeing = asyncio.Lock()
        self._seen: OrderedDict[str, int] = OrderedDict()  # by router, the last that sent last
        loaded = settings.load()
        structured.configure(loaded.config.log)
        self._logger = structlog.get_logger().bind(replica=self._id)
        agreement: Agreement = await coordinator.join.remote()
        # In a thread that ends, as `serve` loads.
        with ThreadPoolExecutor(1, "pageturner-load") as loader:
            self._engine, self._reading = await asyncio.get_running_loop().run_in_executor(
                loader, _load, loaded, settings.version, agreement.prefix_key, self._logger
            )
        await self._engine.start()
        self._services = LocalServices(
            self._engine,
            loaded.config.server,
            self._logger,
            lambda: uuid.uuid4().hex,
            partial(asyncio.sleep, settings.scale.message_seconds),
        )
        self._agreement = replace(agreement, revision=0, policies=b"")
        agreement = await coordinator.join.remote()  # it may have changed while the model was loaded
        if agreement.revision:
            refusal = await self.agree(agreement, b"", Call())
            if isinstance(refusal, Failure):
                raise refusal.error()
        self._streams = OpenStreams(is_gone, self._end)
        self._looking = [asyncio.create_task(self._reconcile()), asyncio.create_task(self._look_for_gone())]

    # What clients ask for

    async def follow(
        self, method: str, request: bytes, call: Call, hint: RouteHint | None = None
    ) -> AsyncGenerator[Begun | bytes | Failure, None]:
        """The messages of a stream, Begun first, a Failure last where it fails."""
        self._note(hint)
        with self._streams.followed(call):
            yield Begun(self._id)
            async with contextlib.aclosing(self._services.follow(method, request, call)) as parts:
                async for part in parts:
                    yield part

    async def ask(
        self, method: str, request: bytes, call: Call, hint: RouteHint | None = None
    ) -> tuple[str, bytes | Failure]:
        """(this replica's id, the answer of a unary method)."""
        self._note(hint)
        answer = await self._services.ask(method, request, call)
        if method == "GetPolicies" and not isinstance(answer, Failure):
            message = pb.GetPoliciesResponse.FromString(answer)
            message.revision = self._agreement.revision
            answer = message.SerializeToString()
        return self._id, answer

    # What the application's other processes ask for

    async def reading(self) -> Reading:
        """What an ingress needs to read prompts as this replica does."""
        return self._reading

    async def is_ready(self) -> bool:
        """Whether new work is welcome."""
        return self._engine.condition.is_ready

    async def agreement(self) -> Agreement:
        """As far as this replica has carried it out."""
        return self._agreement

    async def agree(self, agreement: Agreement, change: bytes, call: Call) -> bytes | Failure:
        """Carry out an agreement that is newer than this replica's. change: from the revision before."""
        async with self._agreeing:
            is_next = agreement.revision == self._agreement.revision + 1
            if agreement.revision <= self._agreement.revision:
                _, answer = await self.ask("GetPolicies", b"", call)
            else:
                request = change if is_next and change else agreement.policies
                answer = await self._services.ask("SetPolicies", request, call)
                if isinstance(answer, Failure):
                    self._logger.warning("policies_refused", reason=str(answer.error()))
                    return answer
                self._agreement = replace(agreement, prefix_key=self._agreement.prefix_key)
        if isinstance(answer, Failure):
            return answer
        message = pb.SetPoliciesResponse.FromString(answer)  # fields as those of GetPoliciesResponse
        message.revision = self._agreement.revision
        return message.SerializeToString()

    # What Ray asks for

    async def record_routing_stats(self) -> dict[str, Any]:
        """The load, and what the prefix cache holds, for the request routers."""
        summary = await self._engine.prefix_summary()
        return ReplicaReport.of(self._engine.load(), summary, self._seen).to_plain()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What replicas are added and taken away by."""
        stats, info = self._engine.load(), self._engine.server_info()
        wanted = stats.num_running_sequences + stats.num_waiting + stats.num_swapped
        return {
            QUEUED_TOKENS: float(stats.num_queued_prompt_tokens),
            BUSY: wanted / info.max_num_seqs,
        }

    async def check_health(self) -> None:
        """Raise where waiting can't help: Ray then starts another replica."""
        condition = self._engine.condition
        if condition.health is EngineHealth.DEAD:
            raise EngineDead(condition.reason or "the engine met a fault")

    async def __del__(self) -> None:
        """Called by Ray once requests have ended, or their time is over."""
        if hasattr(self, "_looking"):
            for task in self._looking:
                task.cancel()
            await self._engine.aclose()

    def _note(self, hint: RouteHint | None) -> None:
        """A router's request has come, and is in the load that is told next."""
        if hint is None or not hint.router:
            return
        self._seen[hint.router] = max(hint.number, self._seen.get(hint.router, -1))
        self._seen.move_to_end(hint.router)
        if len(self._seen) > MAX_ROUTERS:
            self._seen.popitem(last=False)

    async def _end(self, call: Call) -> None:
        abort = generation_pb2.AbortRequest(request_ids=[call.request_id])
        await self._services.ask("Abort", abort.SerializeToString(), call)

    async def _look_for_gone(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                num_ended = await self._streams.end_of_gone()
            except Exception as error:  # Ray's store of names is not reached, and asked again
                self._logger.warning("followers_not_known", reason=str(error))
                continue
            if num_ended:
                self._logger.warning("followers_gone", requests=num_ended)

    async def _reconcile(self) -> None:
        for look in itertools.count():
            await asyncio.sleep(FIRST_RECONCILE_SECONDS if look < NUM_FIRST else RECONCILE_SECONDS)
            try:
                agreement: Agreement = await self._coordinator.join.remote(self._agreement)
            except Exception as error:  # Ray starts the coordinator anew, and this asks again
                self._logger.warning("coordinator_not_reached", reason=str(error))
                continue
            if agreement.revision > self._agreement.revision:
                await self.agree(agreement, b"", Call())


def _load(loaded: LoadedConfig, version: str, prefix_key: bytes, logger: Any) -> tuple[AsyncEngine, Reading]:
    """The engine, not started."""
    from pageturner.service.engine.metrics import Metrics
    from pageturner.service.startup.allocator import bound_arenas
    from pageturner.service.startup.interpreter import share_interpreter
    from pageturner.service.startup.loading import load_model
    from pageturner.service.startup.wiring import build_engine

    bound_arenas(loaded.config.server.malloc_arenas)
    share_interpreter()
    clock = MonotonicClock()
    started_at = clock.now()
    cache_dir, metrics = cache_directory(), Metrics(loaded.config.metrics.max_tenants)
    model = load_model(loaded, cache_dir, logger)
    with TemporaryDirectory() as folder:
        key_file = Path(folder) / "prefix-key"
        key_file.write_bytes(prefix_key)
        config = replace(loaded.config, cache=replace(loaded.config.cache, prefix_key_file=key_file))
        engine = build_engine(config, model, cache_dir, clock, started_at, logger, metrics)
    tokenizer = None if model.tokenizer is None else _parts(model.artifacts)
    cache = loaded.config.cache
    reading = Reading(
        engine.models()[0], tokenizer, model.cache.block_size, cache.share_prefixes_between_tenants, version
    )
    return engine, reading


def _parts(artifacts: ModelArtifacts) -> TokenizerParts:
    assert artifacts.tokenizer is not None
    return TokenizerParts(
        artifacts.tokenizer,
        artifacts.chat_template,
        artifacts.named_templates,
        artifacts.special_tokens,
        artifacts.bos_token,
        artifacts.add_bos,
    )
