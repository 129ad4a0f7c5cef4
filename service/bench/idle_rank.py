"""A rank without a model, for `bench ranks`: follows rank 0, and adds up zeros with it where a step asks for
that."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import structlog
import torch

from pageturner import __version__
from pageturner.service.core.outputs import BlockCopies, SchedulerOutput
from pageturner.service.model.tensor_parallel.collectives import Collectives
from pageturner.service.model.tensor_parallel.meeting import exchange_library, meet
from pageturner.service.ranks import messages
from pageturner.service.ranks.codec import FORMAT
from pageturner.service.ranks.follower import Follower
from pageturner.service.ranks.leader import Patience
from pageturner.service.ranks.meeting import RenewedCollectives, find_store
from pageturner.service.ranks.messages import Assignment, Hello, expect
from pageturner.service.ranks.processes import begin

PROGRAM = (sys.executable, "-P", "-c", "from pageturner.service.bench.idle_rank import main; main()")
HIDDEN = "hidden"
"""Of the assignment's configuration: the width of what is added up."""

ADDITIONS = 16
"""In a step that asks for them: as many as eight layers need."""


class NoBlocks:
    """A KV cache of nothing."""

    def apply(self, copies: BlockCopies) -> None:
        """There is nothing to copy."""


def add_up(collectives: Collectives, hidden: int, output: SchedulerOutput) -> None:
    """What a step asks for: nothing, or with an odd number ADDITIONS of its rows by `hidden`."""
    if output.step_id % 2:
        rows = torch.zeros(output.num_tokens, hidden)
        for _ in range(ADDITIONS):
            collectives.all_reduce(rows)


def main() -> None:
    """The program of ranks from 1 on."""
    channel, patience = begin(*sys.argv[1:]).steps, Patience()
    messages.send(channel, Hello(FORMAT, __version__))
    told = expect(messages.receive(channel), Assignment)
    torch.set_num_threads(1)
    loading = timedelta(seconds=patience.loading)
    library = exchange_library(torch.device("cpu"), Path(told.cache_dir))
    meet_here = partial(meet, torch.device("cpu"), rank=told.rank, size=told.size, library=library)
    store = find_store(told.port, loading)
    collectives = RenewedCollectives(
        told.rank, told.size, store, lambda at, timeout: meet_here(at, timeout=timeout)
    )
    collectives.meet(0, loading)
    hidden = told.config[HIDDEN]
    assert isinstance(hidden, int)
    forward = partial(add_up, collectives, hidden)
    Follower(channel, NoBlocks(), forward, collectives, structlog.get_logger(), patience.step).run()
