"""Prompts as the router sees them: the hashes of their blocks, as the replicas' prefix caches name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import tokenizers

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

    block_size: tokens of a block. shares_prefixes: whether proved tenants find one another's blocks.
    """

    model: ModelInfo
    tokenizer: TokenizerParts | None
    block_size: int
    shares_prefixes: bool


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
