"""Rank 0's side: the other ranks as one, from their start to their end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from structlog.typing import FilteringBoundLogger

from pageturner import __version__
from pageturner.service.errors import ConfigError, ModelError, PageturnerError, RankLost
from pageturner.service.ranks import messages
from pageturner.service.ranks.channel import ChannelClosed
from pageturner.service.ranks.codec import FORMAT
from pageturner.service.ranks.messages import STEP, BadMessage, Done, End, Failed, Hello, Message, Refused
from pageturner.service.ranks.processes import RankProcess, start_rank
from pageturner.service.ranks.pulse import Lookout

KEY = "model.tensor_parallel_size"
_M = TypeVar("_M", bound=Message)
OnLost = Callable[[RankLost], object]


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. A rank that is stopped is given up after `silent`, one that hangs after twice `step`.

    silent: without a sign of life. loading: so while the model is loaded, as libraries hold the interpreter's
    lock when they start. first_meeting: of a collective then, since one rank may have read its weights long
    before another. step: of a collective from then on, and how long rank 0, when it has carried out a step,
    waits for another rank to have done so. ending: for a process's own end.
    """

    silent: float = 5.0
    loading: float = 60.0
    first_meeting: float = 900.0
    step: float = 4.0
    ending: float = 5.0


class Leader:
    """Starts the ranks from 1 up to `size`, and speaks to all of them.

    A rank that is lost is lost for good: all processes are killed, so that whatever waits for one within rank
    0 fails, and from then on everything here raises RankLost with the first cause. One thread at a time
    speaks (first that which loads, then that which computes); `on_lost` and `close` are for any.
    """

    def __init__(
        self,
        size: int,
        program: Sequence[str],
        logger: FilteringBoundLogger,
        now: Callable[[], float],
        patience: Patience = Patience(),
    ) -> None:
        self.size = size
        self.patience = patience
        self._logger, self._now = logger, now
        self._lock = threading.Lock()  # of the three fields below
        self._loss: RankLost | None = None
        self._on_lost: OnLost | None = None
        self._is_ending = False
        self._has_model = False
        self._processes: tuple[RankProcess, ...] = ()
        try:
            for rank in range(1, size):
                what = f"a process of rank {rank}"
                self._processes += (start_rank(rank, program),)
            what = "a watch over other ranks"
            pulses = {process.rank: process.pulse for process in self._processes}
            self._lookout = Lookout(pulses, self._lose, patience.loading, now)
            self._lookout.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: of a thread
            self._await_ends(0.0)
            for process in self._processes:
                process.close()
                process.pulse.close()
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(KEY, f"{what} is refused: {reason}") from error

    @property
    def processes(self) -> tuple[RankProcess, ...]:
        """Of the ranks from 1, in their order."""
        return self._processes

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the ranks from 1."""
        return tuple(process.process.pid for process in self._processes)

    def close(self, *, in_order: bool = True) -> None:
        """End all processes, and wait for their ends. in_order: they wait for a step, and obey; else they are
        killed. Closing twice is no error."""
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
        for process in self._processes:
            if not in_order:
                process.kill()
                continue
            try:
                messages.send(process.channel, End(), self.patience.ending)
            except (ChannelClosed, TimeoutError):
                process.kill()
        self._await_ends(self.patience.ending)
        self._lookout.close()
        for process in self._processes:
            process.close()

    # A rank that is lost

    def on_lost(self, callback: OnLost) -> None:
        """Called with the loss, once, from any thread; at once if there was one."""
        with self._lock:
            self._on_lost = callback
            loss = self._loss
        if loss is not None:
            callback(loss)

    def check(self) -> None:
        """Raises RankLost if one is."""
        if self._loss is not None:
            raise self._loss

    def expect_signs(self) -> None:
        """The model is loaded: from now on a rank may not be silent for longer than `Patience.silent`, and
        what it refuses is no configuration's fault."""
        self._has_model = True
        self._lookout.bear(self.patience.silent)

    def _lose(self, rank: int, why: str = "") -> None:
        """why: empty for one whose connection is closed."""
        process = self._processes[rank - 1]
        cause = why or process.why_it_ended(self.patience.ending)
        with self._lock:
            if self._loss is not None or self._is_ending:
                return
            self._loss = loss = RankLost(f"{process.name} is lost: {cause}")
            callback = self._on_lost
        self._logger.critical("rank_lost", rank=rank, process=process.process.pid, reason=cause)
        for process in self._processes:
            process.kill()
        if callback is not None:
            callback(loss)
        self._await_ends(self.patience.ending)

    def lost(self, rank: int, why: str = "") -> RankLost:
        """The error to be raised where a rank turns out to be lost. From any thread."""
        self._lose(rank, why)
        return self._loss or RankLost(f"rank {rank} is ended")

    # What is said

    def greet(self) -> None:
        """Hear of each that it runs this very version. Raises ModelError where one does not."""
        for process, hello in self.hear(Hello):
            if (hello.version, hello.format) != (__version__, FORMAT):
                theirs = (
                    f"{process.name} runs Pageturner {hello.version}, with steps in format {hello.format}"
                )
                raise ModelError(f"{KEY}: {theirs}; rank 0 has {__version__} and format {FORMAT}")

    def tell(self, message_of: Callable[[int], Message]) -> None:
        """Say something to each rank, by its number. Raises RankLost."""
        for process in self._processes:
            try:
                messages.send(process.channel, message_of(process.rank), self.patience.loading)
            except (ChannelClosed, TimeoutError):
                raise self.lost(process.rank) from None

    def hear(self, kind: type[_M], timeout: float | None = None) -> list[tuple[RankProcess, _M]]:
        """A message of each rank. timeout: None to wait for as long as it gives signs of life.

        Raises RankLost, or what a rank says in place of it: that it refuses (ConfigError, ModelError).
        """
        return [(process, self._hear(process, kind, timeout)) for process in self._processes]

    def _hear(self, process: RankProcess, kind: type[_M], timeout: float | None) -> _M:
        try:
            message = messages.receive(process.channel, timeout)
            if isinstance(message, Refused):
                raise self._refusal(process, message)
            return messages.expect(message, kind)
        except ChannelClosed:
            raise self.lost(process.rank) from None
        except TimeoutError:
            raise self.lost(process.rank, f"it did not say {kind.__name__} within {timeout:g} s") from None
        except BadMessage as error:
            raise self.lost(process.rank, f"it is not understood: {error}") from error

    def _refusal(self, process: RankProcess, refused: Refused) -> PageturnerError:
        """What a rank says in place of anything else: once steps have been sent it is lost by that."""
        self._logger.error("rank_refused", rank=process.rank, reason=refused.reason, detail=refused.detail)
        if self._has_model:
            return self.lost(process.rank, f"it can't go on: {refused.reason}")
        reason = f"rank {process.rank}: {refused.reason}"
        return ConfigError(refused.key, reason) if refused.key else ModelError(reason)

    def cause_of(self, loss: RankLost) -> PageturnerError:
        """Why a collective failed while the model was loaded: what another rank says of it, or the loss."""
        for process in self._processes:
            try:
                while True:
                    message = messages.receive(process.channel, self.patience.step)
                    if isinstance(message, Refused):
                        return self._refusal(process, message)
            except ChannelClosed:
                return self.lost(process.rank)
            except (TimeoutError, BadMessage):
                continue
        return loss

    # Steps

    def send_step(self, encoded: bytes) -> None:
        """The bytes of a step, to each rank. Raises RankLost."""
        for process in self._processes:
            try:
                process.channel.send(STEP, encoded, self.patience.step)
            except (ChannelClosed, TimeoutError):
                raise self.lost(process.rank) from None

    def outcomes(self) -> tuple[str, ...]:
        """Of the step that was sent, once rank 0 has carried it out: what failed, on whichever ranks it did.

        Raises RankLost.
        """
        failures: tuple[str, ...] = ()
        for process in self._processes:
            try:
                message = messages.receive(process.channel, self.patience.step)
                if isinstance(message, Refused):
                    raise self._refusal(process, message)
                if isinstance(message, Failed):
                    failures += (f"rank {process.rank}: {message.reason}",)
                else:
                    messages.expect(message, Done)
            except ChannelClosed:
                raise self.lost(process.rank) from None
            except TimeoutError:
                why = f"it has not carried out a step {self.patience.step:g} s after rank 0 had"
                raise self.lost(process.rank, why) from None
            except BadMessage as error:
                raise self.lost(process.rank, f"it is not understood: {error}") from error
        return failures

    def _await_ends(self, timeout: float) -> None:
        """timeout: of all together."""
        ends = self._now() + timeout
        for process in self._processes:
            process.await_end(max(0.0, ends - self._now()))
