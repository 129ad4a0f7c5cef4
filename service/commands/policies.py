"""`pageturner policies`: the axes, what is built in on each, and when which one wins.

`show` and `set` after it speak of a running server's, `new` and `check` of one of your own."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from pathlib import Path

from pageturner.policies import interfaces, registry
from pageturner.policies.interfaces import ALL_AXES, FLEET_AXES
from pageturner.service.commands import policy_authoring, policy_changes
from pageturner.service.commands.output import wrapped, write
from pageturner.service.errors import ConfigError

HELP = "list the scheduling policies of each axis; show or set those of a running server"
EXAMPLE = "pageturner policies set victim=least-computed reclaim=cost-model:swap_weight=2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help=f"AXIS ...: list only these ({', '.join(ALL_AXES)}). show: what a server runs with. "
        "set AXIS=POLICY[:OPTION=VALUE,...] ...: change it. new AXIS NAME: write a policy and its test here. "
        "check MODULE:CLASS: try one against the contract of its axis; exit code 1 if it is broken",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    policy_changes.add_arguments(parser)


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except OSError as error:  # it was deleted meanwhile
        raise ConfigError("the working folder", f"{error.strerror}") from error


def run(arguments: argparse.Namespace) -> int:
    match arguments.words:
        case ["show"]:
            return policy_changes.show(arguments)
        case ["set", *words]:
            return policy_changes.change(arguments, words)
        case ["new", *words]:
            return policy_authoring.new(words, _working_folder())
        case ["check", *words]:
            return policy_authoring.check(words, _working_folder(), as_json=arguments.json)
    for axis in arguments.words:
        if axis not in ALL_AXES:
            raise ConfigError(
                axis, f"no such axis; there are {', '.join(ALL_AXES)}, and the words show, set, new and check"
            )
    axes = arguments.words or ALL_AXES
    described = {axis: registry.describe(axis) for axis in axes}
    if arguments.json:
        document = {
            axis: {
                "question": _question(axis),
                "default": registry.DEFAULTS[axis],
                "policies": [dataclasses.asdict(policy) for policy in policies],
            }
            for axis, policies in described.items()
        }
        write(json.dumps(document, indent=2, default=str))
        return 0
    for axis, policies in described.items():
        write(wrapped(f"{axis}: ", _question(axis)))
        width = max(len(policy.name) for policy in policies) + 2
        for policy in policies:
            mark = "*" if policy.name == registry.DEFAULTS[axis] else " "
            write(wrapped(f"  {mark} {policy.name:<{width}}", policy.summary))
            for option in policy.options:
                default = "required" if option.required else f"default {option.default}"
                write(wrapped(f"    {'':<{width}}", f"{option.name}: {option.type}, {default}"))
        write()
    write("* is the default. In a configuration, under [policies]:")
    write('victim = { name = "...", option = ... }, or, for a class of your own,')
    write('victim = "my_module:MyPolicy".')
    if set(axes) & set(FLEET_AXES):
        write("routing is chosen by who sends requests to several servers, not by one:")
        write("simulate --replicas 8 --routing session")
    return 0


def _question(axis: str) -> str:
    """The first line of the axis's interface, which asks what the policy answers."""
    return (inspect.getdoc(getattr(interfaces, f"{axis.capitalize()}Policy")) or "").partition("\n")[0]
