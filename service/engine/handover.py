"""Prefill and decode apart: the values that cross between two servers, and what the engine asks of them.

A decoding server, asked for an answer to a long prompt, has another compute the prompt's KV, takes the
blocks into the tier behind its host pool, and starts the request as one whose blocks were cached there. So a
hand-over can be late, cut short, or not come at all: what is missing is computed here, and no token depends
on it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.core.request import NewRequest
from pageturner.service.errors import ConfigError
from pageturner.service.sizes import Bytes

Role = Literal["whole", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class HandoverOptions:
    """Prompts computed by one server, answers by another. Both need cache.host_cache_memory."""

    role: Role = "whole"
    """whole computes both. prefill is whole, and also computes prompts for servers that ask. decode has the
    servers of prefill_targets compute long prompts, and computes itself what they don't."""
    prefill_targets: tuple[str, ...] = ()
    """HOST:PORT of the servers that compute prompts, of equal fingerprints; those that are away are passed
    by."""
    prefill_token_file: Path | None = None
    """Holds the token of an admin's identity there; read for each call. Unset where they ask for none."""
    prefill_tls_ca: str | None = None
    """Certificate of their authority, where they are reached over TLS; "system" trusts those that gRPC
    brings."""
    prefill_client_certificate: Path | None = None
    """This server's certificate, where they ask for one (tls.client_ca there): of an admin's identity, unless
    a token is sent."""
    prefill_client_key: Path | None = None
    """Its private key."""
    min_tokens: int = 256
    """Prompts that lack fewer tokens here are computed here: their transfer would take as long."""
    patience_seconds: float = 10.0
    """How long a server may give no block of a prompt before what it has not given is computed here. All of
    them may take that and 8 times what this server would."""
    receive_memory: Bytes = Bytes(256 << 20)
    """What may lie here of blocks that were handed over, until the requests that want them start."""
    allow_inexact: bool = False
    """Whether KV is given to servers with the same weights and tokenizer whose fingerprints differ in other
    parts (machine, kernels, code): tokens may then be others than one server would compute."""

    def __post_init__(self) -> None:
        if self.role not in ("whole", "prefill", "decode"):
            raise ConfigError("handover.role", f"{self.role!r} is none of whole, prefill, decode")
        if (self.role == "decode") != bool(self.prefill_targets):
            reason = "names the servers that prefill for a decode server, and for no other"
            raise ConfigError("handover.prefill_targets", reason)
        if (self.prefill_client_certificate is None) != (self.prefill_client_key is None):
            reason = "goes with handover.prefill_client_key, and that with it"
            raise ConfigError("handover.prefill_client_certificate", reason)
        if self.prefill_client_certificate is not None and self.prefill_tls_ca is None:
            reason = "is shown over TLS: handover.prefill_tls_ca"
            raise ConfigError("handover.prefill_client_certificate", reason)
        if self.min_tokens < 1:
            raise ConfigError("handover.min_tokens", f"{self.min_tokens} is not at least 1")
        if not 0 < self.patience_seconds <= 3600:
            raise ConfigError("handover.patience_seconds", f"{self.patience_seconds} is not in (0, 3600]")
        if self.receive_memory < 1:
            raise ConfigError("handover.receive_memory", "0 bytes hold no block")


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """What a decoding server asks for. fingerprint, layout: its own, which the KV must fit.

    first_block: the first that it lacks. tenant: on whose behalf.
    """

    token_ids: tuple[int, ...]
    fingerprint: str
    layout: str
    first_block: int = 0
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    request_id: str = ""
    deadline_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class HandedBlock:
    """The KV of a full block over all layers, as it lies in the pool. index: its place in the prompt."""

    index: int
    content: bytes


class Handover(Protocol):
    """Has prompts computed elsewhere, for an engine that decodes."""

    async def fetch(self, new: NewRequest, look: Callable[[], Awaitable[PrefixSummary]]) -> None:
        """Before a request goes to the scheduler: take in what another server computes of its prompt, if that
        is worth it. Whatever fails is logged and left to this server; only being cancelled is raised, and
        what `look` raises.

        look: says what is cached here already, once the step that runs has ended.
        """
        ...

    async def close(self) -> None:
        """The last call."""
        ...


class PrefillSource(Protocol):
    """Computes prompts for others. `AsyncEngine` is one."""

    def prefill(self, order: PrefillOrder) -> AsyncGenerator[HandedBlock, None]:
        """The blocks of a prompt, in order, each once it is made, and no more where memory was short.

        Raises HandoverRefused where KV of this server would mean nothing there, and what refuses or ends a
        request.
        """
        ...
