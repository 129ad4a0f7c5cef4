"""A model on several ranks, from rank 0's side: starts the others, and has all load their parts together."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from structlog.typing import FilteringBoundLogger

from pageturner.service.config import LoadedConfig, local_gloo
from pageturner.service.core.options import CacheOptions
from pageturner.service.errors import ConfigError, ModelError, RankLost
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import Backend, gpu_trouble
from pageturner.service.model.build import lean_config
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.tensor_parallel.meeting import exchange_library, meet
from pageturner.service.model.tensor_parallel.shards import plan_shards
from pageturner.service.ranks.leader import KEY, Leader
from pageturner.service.ranks.meeting import Open, RenewedCollectives, open_store
from pageturner.service.ranks.messages import Assignment, Capacity, Identity, Join, Ready, Sizes
from pageturner.service.ranks.ranked_steps import Ranks
from pageturner.service.schema import to_plain
from pageturner.service.startup.identity import part_identity

RANK_PROGRAM = (sys.executable, "-P", "-c", "from pageturner.service.startup.rank import main; main()")
"""-P: the folder one stands in may hold a package named `kernels`."""

SECTIONS = ("model", "cache", "scheduler", "log")
"""Of the configuration, what the other ranks obey."""


@contextmanager
def started_ranks(
    options: ModelOptions,
    backend: Backend,
    logger: FilteringBoundLogger,
    program: Sequence[str] | None = None,
) -> Iterator[LeadingPeers]:
    """The processes of the other ranks, which import their libraries while rank 0 reads the model's files.

    They live on unless the caller fails; then they are ended, and where it failed since one of them did, that
    one's own reason is raised. program: RANK_PROGRAM unless given. Raises ConfigError for ranks without a
    GPU, or that the system refuses, and where this process has ranks already.
    """
    size = options.tensor_parallel_size
    if torch.distributed.is_initialized():
        raise ConfigError(KEY, "this process has met ranks already: of one model on several at a time")
    if backend.device.type == "cuda":
        check_gpus(size)
    peers = LeadingPeers(Leader(size, program or RANK_PROGRAM, logger, time.monotonic), logger)
    try:
        yield peers
    except BaseException as error:
        cause = peers.leader.cause_of(error) if isinstance(error, RankLost) else error
        peers.close()
        if cause is error:
            raise
        raise cause from error


def check_gpus(size: int) -> None:
    """Raises ConfigError unless the first `size` GPUs can be used."""
    for index in range(size):
        if (trouble := gpu_trouble(index)) is not None:
            reason = f"{size} ranks take a GPU each, and cuda:{index} cannot be used: {trouble}"
            raise ConfigError(KEY, reason)


class LeadingPeers:
    """`Peers` of rank 0, once they are met."""

    def __init__(self, leader: Leader, logger: FilteringBoundLogger) -> None:
        self.leader, self._logger = leader, logger
        self._collectives: RenewedCollectives | None = None

    @property
    def collectives(self) -> RenewedCollectives:
        assert self._collectives is not None, "the ranks have not met"
        return self._collectives

    def meet(
        self,
        loaded: LoadedConfig,
        options: ModelOptions,
        artifacts: ModelArtifacts,
        backend: Backend,
        cache_dir: Path,
    ) -> None:
        """Have all ranks read the model's files, find that they are the same, and meet.

        options: of the model, with its products settled by rank 0 for all. Raises ConfigError, ModelError or
        RankLost.
        """
        leader, loading = self.leader, timedelta(seconds=self.leader.patience.first_meeting)
        config = lean_config(artifacts, options)
        if config is not None:  # what is refused is refused before the others load anything
            plan_shards(config, leader.size)
        leader.greet()
        store, port = open_store(options.tensor_parallel_port, loading)
        leader.tell(partial(_assignment, leader.size, port, loaded, options, backend, cache_dir))
        ours = part_identity(artifacts, backend)
        for process, identity in leader.hear(Identity):
            _check_identity(process.name, ours, identity.parts)
        leader.tell(lambda _: Join())
        meets = meets_by(backend, 0, leader.size, cache_dir, self._logger, leader.check)
        self._collectives = RenewedCollectives(0, leader.size, store, meets)
        self._collectives.meet(0, loading)

    def agree(self, cache: CacheOptions) -> CacheOptions:
        """The smallest rank decides for all."""
        found = [capacity_of(cache), *(capacity for _, capacity in self.leader.hear(Capacity))]
        sizes = Sizes(
            min(each.num_blocks for each in found),
            min(each.num_swap_blocks for each in found),
            min(each.num_host_cache_blocks for each in found),
        )
        self.leader.tell(lambda _: sizes)
        return sized(cache, sizes)

    def ready(self) -> Ranks:
        """All have loaded their parts. Raises as `Leader.hear`."""
        self.leader.hear(Ready)
        return Ranks(self.leader, self.collectives)

    def close(self) -> None:
        """The model is not loaded. The others may wait for what rank 0 does not send any more."""
        self.leader.close(in_order=False)
        if self._collectives is not None:
            self._collectives.close()


def meets_by(
    backend: Backend,
    rank: int,
    size: int,
    cache_dir: Path,
    logger: FilteringBoundLogger,
    check: Callable[[], object] = lambda: None,
) -> Open:
    """How any rank meets the others. check: as of `meet`."""
    library = exchange_library(backend.device, cache_dir)

    def note(reason: str) -> None:
        logger.warning("ranks_by_sockets", reason=reason)

    return lambda store, timeout: meet(
        backend.device, store, rank, size, timeout, library, check, note, local_gloo
    )


def _assignment(
    size: int,
    port: int,
    loaded: LoadedConfig,
    options: ModelOptions,
    backend: Backend,
    cache_dir: Path,
    rank: int,
) -> Assignment:
    config = {
        str(key): to_plain(value)
        for key, value in replace(loaded.config, model=options)
        if key.section in SECTIONS and value is not None
    }
    stated = tuple(key for key in loaded.origins if key in config)
    device = backend.device.type if backend.device.type == "cpu" else f"{backend.device.type}:{rank}"
    return Assignment(rank, size, port, str(cache_dir), config, device, stated)


def _check_identity(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raises ModelError where something differs, which it names."""
    differing = [
        f"other {part} ({theirs.get(part, 'none')}, rank 0 {own})"
        for part, own in ours.items()
        if theirs.get(part) != own
    ]
    if differing:
        raise ModelError(f"{KEY}: {name} has {', '.join(differing)}")


def capacity_of(cache: CacheOptions) -> Capacity:
    """What fits on this rank."""
    num_host_cache_blocks = cache.num_host_cache_blocks
    return Capacity(cache.num_blocks, cache.num_host_blocks - num_host_cache_blocks, num_host_cache_blocks)


def sized(cache: CacheOptions, sizes: Sizes) -> CacheOptions:
    """As all ranks have it."""
    return replace(
        cache,
        num_blocks=sizes.num_blocks,
        num_host_blocks=sizes.num_swap_blocks + sizes.num_host_cache_blocks,
        num_host_cache_blocks=sizes.num_host_cache_blocks,
    )
