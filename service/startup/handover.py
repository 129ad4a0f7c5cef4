"""What a server's role among others comes to: the tier behind its host pool, and whom it asks for KV."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from structlog.typing import FilteringBoundLogger

from pageturner.service.client.async_connection import AsyncConnection
from pageturner.service.client.credentials import Credentials
from pageturner.service.client.targets import parse_targets
from pageturner.service.config import ServiceConfig
from pageturner.service.core.clock import Clock
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.engine.block_receiver import BlockReceiver
from pageturner.service.engine.block_sender import BlockSender
from pageturner.service.engine.handover import Handover, HandoverOptions
from pageturner.service.engine.lower_tier import LowerTier
from pageturner.service.errors import ConfigError, InvalidArgument
from pageturner.service.handover.remote_prefill import OwnKv, RemotePrefill
from pageturner.service.routing.peers import Peers
from pageturner.service.startup.loading import LoadedModel
from pageturner.service.startup.tiers import bytes_of

_PROBES = 8
"""Blocks that are copied to measure how fast they are taken in."""


@dataclass(frozen=True, slots=True)
class OpenedHandover:
    """sender, receiver: the one that the role has; neither where the server computes all itself."""

    options: HandoverOptions
    sender: BlockSender | None = None
    receiver: BlockReceiver | None = None

    @property
    def tier(self) -> LowerTier | None:
        """What stands behind the host pool."""
        return self.sender or self.receiver


def open_handover(
    config: ServiceConfig, model: LoadedModel, logger: FilteringBoundLogger
) -> tuple[LoadedModel, OpenedHandover]:
    """What the role wants, and the model with its rate and size. Raises ConfigError."""
    options = config.handover
    if options.role == "whole":
        return model, OpenedHandover(options)
    if not model.cache.num_host_cache_blocks:
        reason = f"{options.role} needs cache.host_cache_memory, through which blocks pass"
        raise ConfigError("handover.role", reason)
    if config.cache.disk_cache_folder is not None:
        reason = f"{options.role} has another server in the place of cache.disk_cache_folder: leave that out"
        raise ConfigError("handover.role", reason)
    if model.ranks is not None:
        reason = f"{options.role} needs whole blocks, of which each rank has a part (tensor_parallel_size)"
        raise ConfigError("handover.role", reason)
    host_block = partial(bytes_of, model.kv_cache.host_pool)
    if options.role == "prefill":
        sender = BlockSender(host_block)
        cache = replace(model.cache, num_disk_cache_blocks=1, saves_evictions=False)
        return replace(model, cache=cache), OpenedHandover(options, sender=sender)
    capacity = int(options.receive_memory) // model.block_bytes
    if not capacity:
        reason = f"{options.receive_memory} bytes hold not one block of {model.block_bytes}"
        raise ConfigError("handover.receive_memory", reason)
    rate = measure_copies(host_block, model.block_bytes, model.cache.num_host_blocks, time.perf_counter)
    model = replace(
        model,
        rates=replace(model.rates, disk_read_bytes_per_second=rate),
        cache=replace(model.cache, num_disk_cache_blocks=capacity, saves_evictions=False),
    )
    return model, OpenedHandover(options, receiver=BlockReceiver(capacity, host_block, logger))


def build_handover(
    opened: OpenedHandover,
    model: LoadedModel,
    hasher: PrefixHasher,
    fingerprint: str,
    clock: Clock,
    logger: FilteringBoundLogger,
) -> Handover | None:
    """Who has prompts computed elsewhere; None where this server computes all. Raises ConfigError."""
    options = opened.options
    if opened.receiver is None:
        return None
    try:
        targets = parse_targets(options.prefill_targets)
    except InvalidArgument as error:
        raise ConfigError("handover.prefill_targets", error.reason) from error
    credentials = Credentials(
        token_file=options.prefill_token_file,
        tls=options.prefill_tls_ca == "system",
        tls_ca=None if options.prefill_tls_ca == "system" else options.prefill_tls_ca,
        client_certificate=options.prefill_client_certificate,
        client_key=options.prefill_client_key,
    )
    own = OwnKv(fingerprint, layout_of(model), model.cache.block_size, model.block_bytes, model.rates)
    peers = Peers([AsyncConnection(target, credentials) for target in targets], clock.now)
    return RemotePrefill(peers, opened.receiver, hasher, own, options, clock, logger)


def layout_of(model: LoadedModel) -> str:
    """How the bytes of a block lie, as text."""
    return repr(model.kv_cache.layout)


def measure_copies(
    host_block: Callable[[int], memoryview], block_bytes: int, num_blocks: int, timer: Callable[[], float]
) -> float:
    """Bytes a second of blocks that are checked and copied into the host pool."""
    content = bytes(block_bytes)
    started = timer()
    for number in range(_PROBES):
        zlib.crc32(content)
        host_block(number % num_blocks)[:] = content
    return _PROBES * block_bytes / max(timer() - started, 1e-9)
