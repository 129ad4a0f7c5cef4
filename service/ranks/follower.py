"""The other ranks' side: carries out each step that rank 0 sends, and says what became of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.engine.step_computation import BlockStore
from pageturner.service.ranks import messages
from pageturner.service.ranks.channel import Channel
from pageturner.service.ranks.codec import StepDecoder
from pageturner.service.ranks.messages import STEP, BadMessage, Done, End, Failed, Ready, Renew

LONGEST_REASON = 500
"""Characters of an error that are told: it may quote anything."""


class Group(Protocol):
    """The collectives of this rank."""

    def meet(self, generation: int, timeout: timedelta) -> None:
        """Form a group with all other ranks. Raises RankLost."""
        ...

    def close(self) -> None:
        """Leave it, whereupon those that wait for this rank fail."""
        ...


class Follower:
    """Obeys rank 0, until it says that no step follows.

    forward: computes the rows of a step; what comes of them is rank 0's to use.
    """

    def __init__(
        self,
        channel: Channel,
        kv_cache: BlockStore,
        forward: Callable[[SchedulerOutput], object],
        group: Group,
        logger: FilteringBoundLogger,
        step_seconds: float,
    ) -> None:
        self._channel = channel
        self._kv_cache = kv_cache
        self._forward = forward
        self._group = group
        self._logger = logger
        self._timeout = timedelta(seconds=step_seconds)
        self._decoder = StepDecoder()

    def run(self) -> None:
        """Raises ChannelClosed where rank 0 is gone, RankLost where ranks do not meet again, and BadStep or
        BadMessage for what is not understood: after any of them this rank can't go on."""
        messages.send(self._channel, Ready())
        while True:
            kind, payload = self._channel.receive()
            if kind == STEP:
                messages.send(self._channel, self._carry_out(self._decoder.decode(payload)))
                continue
            match messages.read(kind, payload):
                case End():
                    return
                case Renew(generation):
                    self._group.close()
                    self._group.meet(generation, self._timeout)
                    messages.send(self._channel, Ready())
                case other:
                    raise BadMessage(f"{type(other).__name__} came where a step was due")

    def _carry_out(self, output: SchedulerOutput) -> Done | Failed:
        try:
            self._kv_cache.apply(output.block_copies)
            if output.scheduled:
                self._forward(output)
        except Exception as error:
            self._group.close()  # at once: the others may wait for what this rank does not send
            self._logger.error("step_failed", step_id=output.step_id, exc_info=error)
            return Failed(f"{type(error).__name__}: {error}"[:LONGEST_REASON])
        return Done()
