"""A machine file is read whole, or refused by the path of a field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pageturner.service.simulator.errors import MachineError
from pageturner.service.simulator.machine import load_machine

GOOD: dict[str, Any] = {
    "name": "toy",
    "derivation": ["by hand"],
    "step_time": {"a_step": 0.01},
    "block_bytes": 1024,
    "cache": {"num_blocks": 100},
}


def load(folder: Path, document: object) -> Any:
    path = folder / "machine.json"
    path.write_text(json.dumps(document))
    return load_machine(str(path))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    machine = load(tmp_path, GOOD)
    assert (machine.name, machine.cache.num_blocks, machine.derivation) == ("toy", 100, ("by hand",))
    assert load(tmp_path, json.loads(machine.to_json())) == machine


@pytest.mark.fault("L")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speed": 1}, "speed is unknown"),
        ({"name": 7}, "name: 7 is not a string"),
        ({"cache": {}}, "cache.num_blocks is missing"),
        ({"cache": []}, "cache is not a table"),
        ({"cache": {"num_blocks": "9"}}, "cache.num_blocks: '9' is not a whole number"),
        ({"cache": {"num_blocks": 0}}, "cache.num_blocks must be at least 1"),
        ({"step_time": {"a_step": 10**400}}, "step_time.a_step: the number is beyond the range of a double"),
        ({"scheduler": {"max_num_seqs": True}}, "scheduler.max_num_seqs: True is not a whole number"),
        ({"step_time": {"a_step": -1}}, "step_time.a_step must be finite and at least 0"),
        ({"measured": {"a_step": None}}, "measured.a_step: None is not a number"),
        ({"block_bytes": 0}, "block_bytes must be at least 1"),
        ({"request_seconds": -1}, "request_seconds must be at least 0"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_by_the_path_of_its_field(
    change: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(MachineError, match=reason):
        load(tmp_path, GOOD | change)


@pytest.mark.parametrize("document", [[], 7, None])
def test_what_is_no_table_is_refused(document: object, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="the file is not a table"):
        load(tmp_path, document)
