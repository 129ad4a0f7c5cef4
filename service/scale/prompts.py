"""Prompts as the router sees them: the hashes of their blocks, as the replicas' prefix caches name them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

import tokenizers

from pageturner.service.core.clock import Clock
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.engine.api import ModelInfo
from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.prompt_limits import InputLimits
from pageturner.service.engine.prompts import PromptReader
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import PageturnerError
from pageturner.service.rpc import from_wire
from pageturner.service.scale.calls import Call, RouteHint
from pageturner.v1 import generation_pb2 as pb

MAX_DIGESTS = 1024
"""Of one prompt: what agrees for so long is sent where it lies, whatever follows."""

ASK_AGAIN_SECONDS = 1.0
"""Between two questions for how prompts are read, while replicas of another version answer."""

INLINE_CHARACTERS = 4096
"""Longer prompts are read in threads beside the event loop."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer on its way to another process, as `Tokenizer` takes it; templates as their sources."""

    backend: tokenizers.Tokenizer = field(repr=False)
    chat_template: str | None
    named_templates: Mapping[str, str]
    special_tokens: Mapping[str, str | tuple[str, ...]]
    bos_token: str | None
    add_bos: bool

    def make(self) -> Tokenizer:
        """The tokenizer that a replica has."""
        template = self.chat_template
        return Tokenizer(
            self.backend,
            chat_template=ChatTemplate(template, self.special_tokens) if template else None,
            named_templates={
                name: ChatTemplate(source, self.special_tokens)
                for name, source in self.named_templates.items()
            },
            bos_token=self.bos_token,
            add_bos=self.add_bos,
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """What it takes to read prompts as a replica does. tokenizer: None for a model of token ids.

    block_size: tokens of a block. shares_prefixes: whether proved tenants find one another's blocks. version:
    of the application (`Settings.version`).
    """

    model: ModelInfo
    tokenizer: TokenizerParts | None
    block_size: int
    shares_prefixes: bool
    version: str = ""


class PromptRouting:
    """key: that all replicas' caches hash under."""

    def __init__(self, reading: Reading, key: bytes) -> None:
        tokenizer = None if reading.tokenizer is None else reading.tokenizer.make()
        longest = None if tokenizer is None else tokenizer.max_token_chars
        self._limits = InputLimits.of_model(reading.model.max_model_len, longest).generation
        self._prompts = PromptReader(tokenizer, reading.model, INLINE_CHARACTERS)
        self._reading = reading
        self._hasher = PrefixHasher(key)

    async def hint(
        self, request: pb.GenerateStreamRequest | pb.ScoreRequest, call: Call, session: str
    ) -> RouteHint:
        """What its replica is chosen by. A prompt that can't be read is no error here: its replica will say
        what is wrong with it."""
        tenant = call.caller.tenant or request.tenant
        unread = RouteHint(session=session, tenant=tenant, priority=request.priority)
        if request.bypass_prefix_cache or request.adapter:
            return unread  # an adapter's blocks are named by its content, which replicas alone have read
        try:
            prompt = from_wire.to_prompt(request.prompt, self._limits)
            token_ids = await self._prompts.encode(prompt, self._limits, tenant=call.caller.tenant)
        except PageturnerError:
            return unread
        size = self._reading.block_size
        digests = self._hasher.chain(
            token_ids[: MAX_DIGESTS * size],
            size,
            adapter="",
            salt=request.cache_salt,
            tenant="" if self._reading.shares_prefixes else call.caller.tenant,
        )
        return replace(unread, num_prompt_tokens=len(token_ids), digests=tuple(digests), block_size=size)


class PromptRoutings:
    """How prompts are read by the replicas that there are.

    version: of this ingress. While an application is replaced, replicas of the version before may be all that
    there are; then theirs is the way until one of this version answers. ask: (what any replica says, the key
    that all hash under). Raises what it raises; those that wait for one answer share it and its failure.
    """

    def __init__(
        self, version: str, ask: Callable[[], Awaitable[tuple[Reading, bytes]]], clock: Clock
    ) -> None:
        self._version = version
        self._ask = ask
        self._clock = clock
        self._current: PromptRouting | None = None
        self._is_own = False
        self._asked_at = 0.0
        self._asking: asyncio.Task[PromptRouting] | None = None

    async def current(self) -> PromptRouting:
        """As last told; waits for an answer only where there was none yet."""
        is_due = not self._is_own and self._clock.now() - self._asked_at >= ASK_AGAIN_SECONDS
        if self._current is None or is_due:
            asking = self._asked()
            if self._current is None:
                return await asyncio.shield(asking)
        return self._current

    def _asked(self) -> asyncio.Task[PromptRouting]:
        if self._asking is None or self._asking.done():
            self._asked_at = self._clock.now()
            self._asking = asyncio.create_task(self._read())
            # What fails is told to those that wait; where nobody does, what was told before stays.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._asking

    async def _read(self) -> PromptRouting:
        reading, key = await self._ask()
        self._current = await asyncio.to_thread(PromptRouting, reading, key)
        self._is_own = reading.version == self._version
        return self._current
