"""Exchanges of bytes between the ranks of one machine, through memory that they share (see exchange.h)."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_int32, c_int64, c_uint32, c_void_p
from enum import IntEnum

import torch

from pageturner.kernels import checks
from pageturner.kernels.errors import KernelArgumentError

ALIGNMENT = 64
PLACE_BYTES = 64
"""Of exchange.h's Place."""


class ExchangeRegion(ctypes.Structure):
    """exchange.h's Region. It points into the memory: keep that."""

    _fields_ = (("memory", c_void_p), ("slot_bytes", c_int64), ("rank", c_int32), ("ranks", c_int32))


STRUCTURES = {"exchange_region": ExchangeRegion}


class Outcome(IntEnum):
    """exchange.h's Outcome."""

    ALL_THERE = 0
    STILL_WAITING = 1
    SOMEONE_LEFT = 2


def region_bytes(ranks: int, slot_bytes: int) -> int:
    """What the memory of an exchange must hold."""
    return ranks * (PLACE_BYTES + 2 * slot_bytes)


class Exchange:
    """One rank's end. Each exchange is a `publish` and then `collect` until it has an outcome.

    memory: uint8, zeros at first, the same of all ranks. slot_bytes: what a rank may publish at once. Raises
    KernelArgumentError for memory of another size or alignment.
    """

    def __init__(
        self, library: ctypes.CDLL, memory: torch.Tensor, slot_bytes: int, rank: int, ranks: int
    ) -> None:
        checks.check_shape("memory", memory, (region_bytes(ranks, slot_bytes),), torch.uint8)
        if slot_bytes % ALIGNMENT or memory.data_ptr() % ALIGNMENT:
            raise KernelArgumentError("slot_bytes", str(slot_bytes), f"aligned to {ALIGNMENT} bytes")
        self.slot_bytes = slot_bytes
        self._memory = memory
        self._region = ExchangeRegion(memory.data_ptr(), slot_bytes, rank, ranks)
        self._ranks = ranks
        self._number = 0
        region = ctypes.POINTER(ExchangeRegion)
        self._publish, self._collect, self._leave = (
            library.exchange_publish,
            library.exchange_collect,
            library.exchange_leave,
        )
        self._publish.argtypes, self._publish.restype = (region, c_uint32, c_void_p, c_int64), None
        self._collect.argtypes = (region, c_uint32, c_int64, c_void_p, c_int64, c_int64)
        self._collect.restype = c_int
        self._leave.argtypes, self._leave.restype = (region,), None

    def publish(self, mine: torch.Tensor) -> None:
        """uint8 [at most slot_bytes], contiguous: begins the next exchange."""
        assert mine.numel() <= self.slot_bytes, "a slot holds no more"
        self._number += 1
        self._publish(byref(self._region), self._number, mine.data_ptr(), mine.numel())

    def collect(self, gathered: torch.Tensor, patience_us: int) -> Outcome:
        """uint8 [ranks, as many], rows contiguous: what all have published, if they have within patience."""
        assert gathered.shape[0] == self._ranks
        return Outcome(
            self._collect(
                byref(self._region),
                self._number,
                gathered.shape[1],
                gathered.data_ptr(),
                gathered.stride(0),
                patience_us,
            )
        )

    def leave(self) -> None:
        """The last call: ranks that wait for this one are told."""
        self._leave(byref(self._region))
