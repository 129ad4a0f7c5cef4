"""Ranks as processes of their own: the real thing, a few seconds each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined] # torch leaves it out of its exports

from pageturner.service.model.tensor_parallel.collectives import Collectives
from pageturner.service.model.tensor_parallel.meeting import exchange_library, meet
from support.ops import cpu_cache_dir, cpu_library

Tell = Callable[[object], None]
PATIENCE_SECONDS = 120
"""For a process to start on a machine that has much else to do; none waits so long unless something broke."""


@dataclass(frozen=True)
class RankProcess:
    """One rank, and what it tells."""

    process: BaseProcess
    pipe: Connection

    def told(self) -> Any:
        """What it tells next. Raises EOFError if it ends without a word."""
        assert self.pipe.poll(PATIENCE_SECONDS), "a rank is silent"
        return self.pipe.recv()


@contextmanager
def rank_processes(
    size: int, folder: Path, work: Callable[[Collectives, Tell], None], *, shares: bool = True
) -> Iterator[list[RankProcess]]:
    """`size` processes that do the work, and are gone in the end.

    work: a function of a module. shares: whether they exchange by memory, else by gloo.
    """
    if shares:
        cpu_library()  # once, here, and not by the ranks while they wait for each other
    context = multiprocessing.get_context("spawn")
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        args = (rank, size, str(folder / "rendezvous"), work, theirs, shares)
        process = context.Process(target=_run, args=args, daemon=True)
        process.start()
        theirs.close()
        ranks.append(RankProcess(process, ours))
    try:
        yield list(ranks)
    finally:
        for rank_process in ranks:
            rank_process.pipe.close()
            rank_process.process.kill()
            rank_process.process.join()


def _run(
    rank: int,
    size: int,
    rendezvous: str,
    work: Callable[[Collectives, Tell], None],
    pipe: Connection,
    shares: bool,
) -> None:
    torch.set_num_threads(1)
    cpu, patience = torch.device("cpu"), timedelta(seconds=PATIENCE_SECONDS)
    library = exchange_library(cpu, cpu_cache_dir()) if shares else None
    assert (library is not None) is shares, "no compiler, or no memory to share"
    work(meet(cpu, FileStore(rendezvous, size), rank, size, patience, library), pipe.send)
    with suppress(EOFError):
        pipe.recv()  # until the test is done
