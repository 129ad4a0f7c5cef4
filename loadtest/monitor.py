"""The server watched from outside while it is under load: queue, pool, preemptions, memory over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from pageturner.loadtest.channel import OPEN, Access
from pageturner.v1 import admin_pb2 as pb
from pageturner.v1.admin_pb2_grpc import AdminServiceStub

INTERVAL_SECONDS = 0.5
_LAST_CALL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The server at one moment. at: seconds on the client's clock. The last fields are counted since its
    start, or measured: bytes and seconds, 0 where it does not tell them."""

    at: float
    num_waiting: int
    num_running: int
    num_swapped: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_evictable: int
    num_wasted_slots: int
    num_swap_preemptions: int
    num_recompute_preemptions: int
    num_tail_preemptions: int
    num_scheduled_tokens: int
    resident_bytes: int
    cpu_seconds: float

    @property
    def used_share(self) -> float:
        """Of the blocks: those that requests hold."""
        return self.num_blocks_used / self.num_blocks if self.num_blocks else 0.0


OnSample = Callable[[LoadSample], None]


class Monitor:
    """Keeps what the server tells, in a thread of its own. samples: in order. failure: why there are no more
    of them, in words; empty while there are."""

    def __init__(
        self,
        address: str,
        on_sample: OnSample,
        interval_seconds: float = INTERVAL_SECONDS,
        access: Access = OPEN,
    ) -> None:
        self.samples: list[LoadSample] = []
        self.failure = ""
        self._address, self._on_sample, self._interval = address, on_sample, interval_seconds
        self._access = access

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch meanwhile; at the end the last sample is of the end."""
        with self._access.open_blocking_channel(self._address) as channel:
            stub = AdminServiceStub(channel)
            call = stub.WatchLoad(
                pb.WatchLoadRequest(interval_seconds=self._interval), metadata=self._access.metadata
            )
            thread = threading.Thread(target=self._follow, args=(call,), name="load monitor", daemon=True)
            thread.start()
            try:
                yield
            finally:
                call.cancel()
                thread.join()
            if not self.failure:
                self._ask_once_more(stub)

    def _follow(self, call: Iterator[pb.WatchLoadResponse]) -> None:
        try:
            for message in call:
                self._keep(message)
        except grpc.RpcError as error:
            self._note(error)

    def _ask_once_more(self, stub: AdminServiceStub) -> None:
        try:
            self._keep(
                stub.GetLoad(pb.GetLoadRequest(), timeout=_LAST_CALL_SECONDS, metadata=self._access.metadata)
            )
        except grpc.RpcError as error:
            self._note(error)

    def _note(self, error: grpc.RpcError) -> None:
        assert isinstance(error, grpc.Call)
        if error.code() is not grpc.StatusCode.CANCELLED:
            self.failure = f"{error.code().name}: {error.details()}"

    def _keep(self, message: pb.WatchLoadResponse | pb.GetLoadResponse) -> None:
        load, process = message.load, message.process
        sample = LoadSample(
            at=time.monotonic(),
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_swapped=load.num_swapped,
            num_blocks=load.num_blocks,
            num_blocks_used=load.num_blocks_used,
            num_blocks_evictable=load.num_blocks_evictable,
            num_wasted_slots=load.num_wasted_slots,
            num_swap_preemptions=load.num_swap_preemptions_total,
            num_recompute_preemptions=load.num_recompute_preemptions_total,
            num_tail_preemptions=load.num_tail_preemptions_total,
            num_scheduled_tokens=load.num_scheduled_tokens_total,
            resident_bytes=process.resident_bytes,
            cpu_seconds=process.cpu_seconds_total,
        )
        self.samples.append(sample)
        self._on_sample(sample)
