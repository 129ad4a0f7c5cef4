"""Mistakes in giving back what a sliding window has passed, for the machine that has windows."""

from __future__ import annotations

from typing import Any

from pageturner.service.core.memory.block import Block, Release
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.window import SlidingWindow
from pageturner.service.core.memory.windowed import WindowedBlockManager, WindowedBlockPool
from pageturner.service.core.request import Sequence
from support.bad_machines import PlantedBug
from support.scheduler_machine import WindowMachine


def _one_block_too_many(original: Any) -> Any:
    def num_hidden_blocks(self: SlidingWindow, position: int) -> int:
        return int(original(self, position + self.block_size))

    return num_hidden_blocks


def _the_step_in_flight_forgotten(original: Any) -> Any:
    def release(self: WindowedBlockManager, sequence: Sequence, *, fence: int) -> Release:
        found: Release = original(self, sequence, fence=0)
        return found

    return release


def _what_continues_an_evicted_block_stays_cached(_original: Any) -> Any:
    def chain_end(self: WindowedBlockPool, block: Block) -> Block:
        while blocks := [later for later in self._chains.continuations(block) if later.in_heap]:
            block = blocks[0]
        return block

    return chain_end


def _tails_are_cut_whose_heads_are_gone(_original: Any) -> Any:
    return BlockManager.num_tail_blocks


PLANTED_WINDOW_BUGS = (
    PlantedBug(
        "one-block-too-many",
        SlidingWindow,
        "num_hidden_blocks",
        _one_block_too_many,
        "window|tokens",
        machine=WindowMachine,
    ),
    PlantedBug(
        "step-in-flight-forgotten",
        WindowedBlockManager,
        "_release",
        _the_step_in_flight_forgotten,
        "pending",
        machine=WindowMachine,
    ),
    PlantedBug(
        "cached-behind-an-evicted-block",
        WindowedBlockPool,
        "_chain_end",
        _what_continues_an_evicted_block_stays_cached,
        "chain",
        machine=WindowMachine,
    ),
    PlantedBug(
        "tail-cut-without-a-head",
        WindowedBlockManager,
        "num_tail_blocks",
        _tails_are_cut_whose_heads_are_gone,
        "window|tokens",
        (),
        (("reclaim", "tail-first"), ("admission", "first-chunk")),
        machine=WindowMachine,
        seed=4,
    ),
)
