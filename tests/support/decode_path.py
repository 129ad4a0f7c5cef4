"""Which files of the core a decode step goes through, and how long they are.

`python -m support.decode_path`, called in tests/, prints them. A file counts if one of its functions is
entered, or a value of one of its classes made, between the call of `schedule` and the end of `update`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from pageturner.policies import registry
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import SampledSequence, SampledToken
from support.core_harness import CoreHarness

CORE = "pageturner.service.core."
BLOCK_SIZE = 4
PLAIN, CACHING, GROWING = 6, 7, 8
"""Positions whose KV the step computes: in the middle of a block, at its end (it is cached), in a new one."""


def decode_path(position: int) -> dict[str, int]:
    """File of the core -> its number of lines, in the order of entry, for one step of four decodes."""
    options = SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    harness = CoreHarness(registry.default_policies(), num_blocks=64, block_size=BLOCK_SIZE, options=options)
    for seed in range(4):
        harness.submit((seed,) * 5, max_tokens=32, seed=seed)
    scheduler, modules = harness.scheduler, dict[str, None]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(CORE):
            modules[module] = None

    while True:
        modules.clear()
        sys.setprofile(note)
        output = scheduler.schedule(harness.now)
        sys.setprofile(None)
        rows = [row for part in output.scheduled for row in part.samples]
        sampled = tuple(SampledSequence(row.seq_id, row.epoch, (SampledToken(0),)) for row in rows)
        sys.setprofile(note)
        scheduler.update(output, sampled, harness.now)
        sys.setprofile(None)
        if output.scheduled[0].start == position:
            assert len(rows) == 4, "all four decode"
            return {module.removeprefix(CORE): _num_lines(module) for module in modules}


def _num_lines(module: str) -> int:
    return len(Path(str(sys.modules[module].__file__)).read_text().splitlines())


if __name__ == "__main__":
    for name, position in (("in place", PLAIN), ("caching a block", CACHING), ("in a new block", GROWING)):
        path = decode_path(position)
        print(f"{name}: {len(path)} files, {sum(path.values())} lines")
        for file, num_lines in path.items():
            print(f"  {num_lines:5} {file}")
