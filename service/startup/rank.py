"""The program of a rank other than 0: loads its part of the model, and carries out what rank 0 sends.

Started by `service.ranks.processes` with the numbers of its sockets, and told everything over the first; it
reads neither a file of configuration nor the environment. It lives no longer than rank 0 does.
"""

from __future__ import annotations

import gc
import sys
from datetime import timedelta
from pathlib import Path
from threading import Thread
from traceback import format_exc
from typing import TYPE_CHECKING

from pageturner import __version__
from pageturner.service.errors import ConfigError, PageturnerError
from pageturner.service.ranks import messages
from pageturner.service.ranks.channel import Channel, ChannelClosed
from pageturner.service.ranks.codec import FORMAT
from pageturner.service.ranks.follower import LONGEST_REASON
from pageturner.service.ranks.leader import Patience
from pageturner.service.ranks.messages import END, Assignment, Hello, Identity, Join, Refused, Sizes, expect
from pageturner.service.ranks.processes import EXIT_ORPHANED, Channels, begin

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from pageturner.service.core.options import CacheOptions
    from pageturner.service.model.tensor_parallel.collectives import Collectives


def main() -> None:
    """The program. Its arguments: the numbers of its sockets."""
    sys.exit(run(begin(*sys.argv[1:])))


def run(channels: Channels) -> int:
    """Serve as a rank; the exit code."""
    channel = channels.steps
    try:
        messages.send(channel, Hello(FORMAT, __version__))
        import torch  # noqa: F401 # seconds, in which rank 0 reads the model's files

        assignment = expect(messages.receive(channel), Assignment)
        try:
            _serve(channels, assignment)
        except ChannelClosed:
            raise
        except PageturnerError as error:
            key, reason = (error.key, error.reason) if isinstance(error, ConfigError) else ("", str(error))
            _refuse(channel, Refused(reason, key))
            return 1
        except Exception as error:  # whatever it is: rank 0's log has the reason, and not an exit code
            reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
            _refuse(channel, Refused(reason, detail=format_exc()))
            return 1
    except ChannelClosed:
        return EXIT_ORPHANED
    return 0


def _refuse(channel: Channel, refused: Refused) -> None:
    """Say why this rank can't serve, and wait for rank 0 to have read it: its end would be noticed first."""
    messages.send(channel, refused)
    while channel.receive() != END:  # steps may be on their way
        pass


def _serve(channels: Channels, assignment: Assignment) -> None:
    import structlog

    from pageturner.service.config import LoadedConfig, load_config
    from pageturner.service.logs import structured
    from pageturner.service.model.decoder import Decoder
    from pageturner.service.model.loader import load_artifacts
    from pageturner.service.ranks.adapters import AdapterHolder
    from pageturner.service.ranks.follower import Follower
    from pageturner.service.ranks.meeting import RenewedCollectives, find_store
    from pageturner.service.startup.container import anonymous_memory
    from pageturner.service.startup.identity import part_identity
    from pageturner.service.startup.parts import choose_threads, load_part
    from pageturner.service.startup.placement import choose_backend
    from pageturner.service.startup.ranks import meets_by

    channel = channels.steps
    given = {**assignment.config, "model.device": assignment.device}
    config = load_config(environ={}, given=given).config
    loaded = LoadedConfig(config, dict.fromkeys(assignment.stated, "rank 0"))
    structured.detach_stderr(config.log)
    structured.configure(config.log)
    logger: FilteringBoundLogger = structlog.get_logger().bind(rank=assignment.rank)
    cache_dir, patience = Path(assignment.cache_dir), Patience()
    loading = timedelta(seconds=patience.first_meeting)
    choose_threads(config.model, logger)
    backend = choose_backend(config, cache_dir, logger)
    backend.adopt_thread()
    before_loading = anonymous_memory()
    artifacts = load_artifacts(config.model, cache_dir)
    messages.send(channel, Identity(part_identity(artifacts, backend)))
    expect(messages.receive(channel), Join)
    rank, size = assignment.rank, assignment.size
    meets = meets_by(backend, rank, size, cache_dir, logger)
    collectives = RenewedCollectives(rank, size, find_store(assignment.port, loading), meets)
    collectives.meet(0, loading)
    peers = FollowingPeers(channel, collectives)
    part = load_part(loaded, config.model, artifacts, backend, before_loading, logger, peers)
    if isinstance(part.model, Decoder):
        holder = AdapterHolder(channels.adapters, part.model.read_adapter, part.adapters, logger)
        Thread(target=holder.run, name="pageturner-adapters", daemon=True).start()
    gc.collect()
    gc.freeze()
    follower = Follower(channel, part.kv_cache, part.runner.forward, collectives, logger, patience.step)
    follower.run()
    collectives.close()


class FollowingPeers:
    """`Peers` of a rank other than 0."""

    def __init__(self, channel: Channel, collectives: Collectives) -> None:
        self._channel = channel
        self.collectives = collectives

    def agree(self, cache: CacheOptions) -> CacheOptions:
        from pageturner.service.startup.ranks import capacity_of, sized

        messages.send(self._channel, capacity_of(cache))
        return sized(cache, expect(messages.receive(self._channel), Sizes))
