"""A machine to simulate: its step times, pools and bounds, in a JSON file that says where they come from."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pageturner.service.core.drafting.draft_counts import LEAST_ROW_COST
from pageturner.service.core.options import NO_SPECULATION, CacheOptions, SchedulerOptions, SpeculationOptions
from pageturner.service.errors import ConfigError
from pageturner.service.simulator.errors import MachineError
from pageturner.service.simulator.step_time import StepTimeModel
from pageturner.service.simulator.tables import read_table

_SHIPPED = "machines"

_AT_LEAST_ONE = frozenset(
    ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_n")
)


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """What a simulation runs on.

    derivation: how the figures were found, in words. block_bytes: of one KV block over all
    layers. measured: what policies are told of it, where that has ceased to be true (a link grown busy);
    else step_time itself. request_seconds: from a client's send to the queue and from a token to its
    reader, together. speculation: as configured; what comes true of the drafts is the workload's to say.
    """

    name: str
    derivation: tuple[str, ...]
    step_time: StepTimeModel
    block_bytes: int
    cache: CacheOptions
    scheduler: SchedulerOptions = SchedulerOptions()
    request_seconds: float = 0.0
    measured: StepTimeModel | None = None
    speculation: SpeculationOptions = NO_SPECULATION

    def __post_init__(self) -> None:
        """Raises ValueError for a bound with which no scheduler could work."""
        for section in ("cache", "scheduler"):
            for name, value in dataclasses.asdict(getattr(self, section)).items():
                if value is None:
                    continue  # read_table takes it where it is a choice
                least = 1 if name in _AT_LEAST_ONE else 0
                if not least <= value < math.inf:
                    raise ValueError(f"{section}.{name} must be at least {least}, not {value}")
        if self.scheduler.watermark >= 1:
            raise ValueError(f"scheduler.watermark must be below 1, not {self.scheduler.watermark}")
        if self.block_bytes < 1:
            raise ValueError(f"block_bytes must be at least 1, not {self.block_bytes}")
        if not (math.isfinite(self.request_seconds) and self.request_seconds >= 0):
            raise ValueError(f"request_seconds must be at least 0, not {self.request_seconds}")

    @property
    def row_cost(self) -> float:
        """What one more row, its logits included, adds to a step of one row, as a share of that."""
        steps = self.step_time
        row = steps.a_token + steps.a_sample
        one = steps.a_step + steps.a_sequence + row
        return min(1.0, max(LEAST_ROW_COST, row / one)) if one else LEAST_ROW_COST

    def to_json(self) -> str:
        """The text of a file that `load_machine` reads back as this."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def shipped_machines() -> tuple[str, ...]:
    """Names of the machines that come with the package."""
    folder = resources.files("pageturner.service.simulator") / _SHIPPED
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir()))


def load_machine(source: str) -> SimulatedMachine:
    """A machine by the path of its file or by the name of a shipped one. Raises MachineError."""
    try:
        if source in shipped_machines():
            folder = resources.files("pageturner.service.simulator") / _SHIPPED
            text = (folder / f"{source}.json").read_text(encoding="utf-8")
        else:
            text = Path(source).read_text(encoding="utf-8")
        return read_table(SimulatedMachine, json.loads(text))
    except OSError as error:
        known = ", ".join(shipped_machines())
        raise MachineError(f"{source}: {error.strerror}; shipped are {known}") from error
    except (ConfigError, ValueError, RecursionError) as error:
        raise MachineError(f"{source} is no machine file: {error}") from error
