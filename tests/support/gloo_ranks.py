"""Ranks as processes of their own, by gloo: the real thing, a few seconds each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined] # torch leaves it out of its exports

from pageturner.service.model.tensor_parallel.collectives import Collectives
from pageturner.service.model.tensor_parallel.torch_collectives import open_collectives

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
def gloo_ranks(
    size: int, folder: Path, work: Callable[[Collectives, Tell], None]
) -> Iterator[list[RankProcess]]:
    """`size` processes that do the work, and are gone in the end. work: a function of a module."""
    context = multiprocessing.get_context("spawn")
    ranks = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        args = (rank, size, str(folder / "rendezvous"), work, theirs)
        process = context.Process(target=_run, args=args, daemon=True)
        process.start()
        theirs.close()
        ranks.append(RankProcess(process, ours))
    try:
        yield ranks
    finally:
        for rank_process in ranks:
            rank_process.pipe.close()
            rank_process.process.kill()
            rank_process.process.join()


def _run(
    rank: int, size: int, rendezvous: str, work: Callable[[Collectives, Tell], None], pipe: Connection
) -> None:
    torch.set_num_threads(1)
    store = FileStore(rendezvous, size)
    patience = timedelta(seconds=PATIENCE_SECONDS)
    work(open_collectives(torch.device("cpu"), store, rank, size, patience), pipe.send)
    pipe.recv()  # until the test is done
