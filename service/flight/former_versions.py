"""Flight records of former versions of the format, brought to the present one as plain JSON values.

Version 1 named the class of every value under "is", not of unions alone; had all of a checkpoint in one
table; kept names of blocks as numbers there; and had other words for some fields.
"""

from __future__ import annotations

import base64
from typing import Any

from pageturner.policies.spec import PolicySpec
from pageturner.service.flight.block_names import hash_of

_DECISIONS = {"Yielded": "Preempted", "ChampionChosen": "GuardedChosen"}
_DECIDERS = {"champion": "guarded request"}
_SEQUENCE_FIELDS = {"num_published_blocks": "num_cached_blocks"}


_FORMER_OPTIONS = {("reclaim", "cost-model"): {"tail_weight": 1.0}}
"""By axis and policy, options that it lacked once, at the values with which it decides as it did then."""


def as_it_was(axis: str, choice: PolicySpec) -> PolicySpec:
    """The policy of a record, which names every option that the policy had."""
    former = _FORMER_OPTIONS.get((axis, choice.name), {})
    return PolicySpec(choice.name, {**former, **choice.options})


_FORMER_BOUNDS = {"deadline_shedding": False}
"""Options of the scheduler that records lacked once, at the values with which it decides as it did then."""


def with_bounds(setting: Any) -> Any:
    """The setting of a record, with every option of the scheduler. Raises as a damaged line would."""
    return setting | {"options": _FORMER_BOUNDS | setting["options"]}


def from_version_1(line: Any) -> Any:
    """A line of version 1, its head or an entry, as it is written today. Raises as a damaged line would."""
    if "format" not in line:
        entry = {name: part if name == "is" else _without_kinds(part) for name, part in line.items()}
        if "decisions" in line:
            entry["decisions"] = [_decision(decision) for decision in line["decisions"]]
        return entry
    head = _without_kinds(line)
    if head["start"] is not None and "checkpoint" in head["start"]:
        head["start"]["checkpoint"] = _checkpoint(head["start"]["checkpoint"])
    return head


def _decision(plain: dict[str, Any]) -> dict[str, Any]:
    renamed = {"is": _DECISIONS.get(plain["is"], plain["is"])}
    if "by" in plain:
        renamed["by"] = _DECIDERS.get(plain["by"], plain["by"])
    return plain | renamed


def _without_kinds(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _without_kinds(part) for name, part in plain.items() if name != "is"}
    return [_without_kinds(part) for part in plain] if isinstance(plain, list) else plain


def _checkpoint(plain: dict[str, Any]) -> dict[str, Any]:
    requests, guard = plain.pop("requests"), plain.pop("guard")
    for request in requests:
        for sequence in request["sequences"]:
            fields = sequence["fields"]
            sequence["fields"] = {_SEQUENCE_FIELDS.get(name, name): fields[name] for name in fields}
    plain["guarded"] = plain.pop("champion")
    plain["producing"] = [[_hash(name), maker] for name, maker in plain["producing"]]
    for pool in (plain["device"], plain["host"]):
        for block in pool["blocks"]:
            name = block.pop("name")
            block["block_hash"] = _hash(name) if name else None
            block["parent_hash"] = None  # version 1 did not record parents of blocks
    for seat in guard["seats"].values():
        seat["quarantine_reason"] = "too many faults" if seat.pop("is_quarantined", False) else ""
    plain["policies"] = {"axes": guard["seats"], "faults": guard["faults"], "stale": guard["stale"]}
    return {"requests": requests, "scheduler": plain}


def _hash(name: int) -> str:
    return base64.b64encode(hash_of(name)).decode()
