"""`pageturner policies new` and `check`: a policy of one's own, begun and tried."""

from __future__ import annotations

import json
import keyword
import re
import sys
from pathlib import Path
from typing import Any

from pageturner.policies import registry
from pageturner.policies.errors import PolicyError
from pageturner.policies.interfaces import ALL_AXES, AXES
from pageturner.policies.spec import parse_spec
from pageturner.policies.testing import try_policy
from pageturner.service.commands.output import write
from pageturner.service.commands.policy_skeletons import SKELETONS, TEST
from pageturner.service.errors import ConfigError

CHECK_FAILED = 1


def new(words: list[str], folder: Path) -> int:
    """words: AXIS NAME. Writes a policy and its test, and says what to do with them."""
    if len(words) != 2:
        raise ConfigError("policies new", "say AXIS NAME, such as: pageturner policies new victim Youngest")
    axis, name = words
    if axis not in ALL_AXES:
        raise ConfigError(axis, f"no such axis; there are {', '.join(ALL_AXES)}")
    parts = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)
    class_name, module = "".join(part[0].upper() + part[1:] for part in parts), "_".join(parts).lower()
    if not class_name.isidentifier() or keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise ConfigError(name, "is no name for a class and its module; take letters, such as Youngest")
    policy, test = folder / f"{module}.py", folder / f"test_{module}.py"
    made: list[Path] = []
    for path, text in ((policy, SKELETONS[axis]), (test, TEST)):
        try:
            with path.open("x", encoding="utf-8") as file:
                made.append(path)
                file.write(text.replace("CLASS", class_name).replace("MODULE", module).replace("AXIS", axis))
        except OSError as error:
            for begun in made:
                begun.unlink()
            raise ConfigError(str(path), f"cannot be written: {error.strerror}") from error
    write(f"{policy} and {test} are written. Then:")
    write(f"  pageturner policies check {module}:{class_name}")
    write(f"  pytest {test}")
    if axis in AXES:
        write(f'  [policies] {axis} = "{module}:{class_name}"   in a configuration file beside it')
    else:
        write(f"  pageturner simulate --replicas 4 --{axis} {module}:{class_name}")
    return 0


def find_modules_in(folder: Path) -> None:
    """Let a MODULE:CLASS name a file of this folder, behind all that is installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def check(words: list[str], folder: Path, *, as_json: bool) -> int:
    """words: MODULE:CLASS[:OPTION=VALUE,...], or a name. Tries the contract of each axis it answers for."""
    if len(words) != 1:
        raise ConfigError("policies check", "say one MODULE:CLASS, such as my_policies:Youngest")
    find_modules_in(folder)
    verdicts = {axis: try_policy(axis, policy) for axis, policy in _made(words[0]).items()}
    is_kept = all(verdict.holds for each in verdicts.values() for verdict in each)
    if as_json:
        document: dict[str, Any] = {
            axis: [
                {"clause": verdict.clause, "holds": verdict.holds, "fault": verdict.fault} for verdict in each
            ]
            for axis, each in verdicts.items()
        }
        write(json.dumps({"policy": words[0], "holds": is_kept, "axes": document}, indent=2))
        return 0 if is_kept else CHECK_FAILED
    for axis, each in verdicts.items():
        write(f"{axis}: {words[0]}")
        for verdict in each:
            write(f"  {'holds ' if verdict.holds else 'BROKEN'} {verdict.clause}")
            if not verdict.holds:
                write(f"         {verdict.fault}")
    return 0 if is_kept else CHECK_FAILED


def _made(text: str) -> dict[str, Any]:
    """The policy, for each axis whose method it has. Raises ConfigError if it is none."""
    made: dict[str, Any] = {}
    refusals: list[str] = []
    try:
        spec = parse_spec(text)
    except PolicyError as error:
        raise ConfigError("policies check", str(error)) from error
    for axis in ALL_AXES:
        try:
            made[axis] = registry.create(axis, spec.name, spec.options)
        except PolicyError as error:
            refusals.append(str(error))
    if not made:
        # A missing class is refused by all axes for one reason; else each names the method that it asks.
        same = {refusal.partition(": ")[2] for refusal in refusals}
        raise ConfigError(text, same.pop() if len(same) == 1 else "; ".join(refusals))
    return made
