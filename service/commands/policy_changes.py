"""`pageturner policies set` and `show`: the policies of a running server."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from pageturner.policies.errors import PolicyError, UnknownAxisError
from pageturner.policies.interfaces import AXES
from pageturner.policies.presets import PRESETS
from pageturner.policies.spec import PolicySpec, parse_choice
from pageturner.service.client import DEFAULT_TARGET, Client
from pageturner.service.client.targets import TARGET_FORMS
from pageturner.service.commands import signals
from pageturner.service.commands.credentials import add_credential_flags, credentials_of
from pageturner.service.commands.output import note, wrapped, write
from pageturner.service.errors import ConfigError
from pageturner.service.policy_host.reports import PoliciesInfo, PolicyInfo

HANGS_AFTER_SECONDS = 1.0
"""A call of a policy that lasts longer is told of as one that hangs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("show and set")
    group.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar=TARGET_FORMS,
        help=f"the server (default {DEFAULT_TARGET})",
    )
    add_credential_flags(group)
    group.add_argument("--preset", default="", metavar="NAME", help="set all axes, AXIS=POLICY goes over it")
    group.add_argument(
        "--shadow",
        action="append",
        default=[],
        metavar="AXIS=POLICY",
        help="ask this policy too and do not obey it; AXIS=none ends that; may be repeated",
    )
    group.add_argument(
        "--revision", type=int, metavar="N", help="refuse unless the policies are at this revision"
    )


def show(arguments: argparse.Namespace) -> int:
    signals.run(_show(arguments))
    return 0


def change(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """words: AXIS=POLICY each."""
    policies = dict(map(_choice, words))
    shadows = {axis: None if spec.name == "none" else spec for axis, spec in map(_choice, arguments.shadow)}
    if not (policies or shadows or arguments.preset):
        raise ConfigError("policies set", "say AXIS=POLICY, --shadow AXIS=POLICY or --preset NAME")
    signals.run(_change(arguments, policies, shadows))
    return 0


def _choice(text: str) -> tuple[str, PolicySpec]:
    try:
        return parse_choice(text)
    except UnknownAxisError as error:
        raise ConfigError(error.axis, str(error)) from error
    except PolicyError as error:
        raise ConfigError("policies set", str(error)) from error


async def _show(arguments: argparse.Namespace) -> None:
    async with Client(arguments.target, credentials=credentials_of(arguments)) as client:
        _print(await client.policies(), as_json=arguments.json)


async def _change(
    arguments: argparse.Namespace,
    policies: dict[str, PolicySpec],
    shadows: dict[str, PolicySpec | None],
) -> None:
    async with Client(arguments.target, credentials=credentials_of(arguments)) as client:
        info = await client.set_policies(
            policies, shadows=shadows, preset=arguments.preset, expected_revision=arguments.revision
        )
        config = (await client.server_info()).config
    _print(info, as_json=arguments.json)
    for key, value in _implied(arguments.preset).items():
        now = config.get(key)
        if now != str(value):
            note(f"{arguments.preset} means {key} = {value} too, which only a restart changes ({now})")


def _implied(preset: str) -> dict[str, object]:
    """The scheduler's options that belong to a preset."""
    if preset not in PRESETS:
        return {}
    return {f"scheduler.{name}": value for name, value in PRESETS[preset].core_options.items()}


def _print(info: PoliciesInfo, *, as_json: bool) -> None:
    if as_json:
        write(json.dumps(dataclasses.asdict(info), indent=2, default=str))
        return
    write(f"revision {info.revision}")
    width = max(len(axis) for axis in AXES) + 2
    for policy in info.axes:
        for number, line in enumerate(_lines(policy)):
            write(wrapped(f"{policy.axis if number == 0 else '':<{width}}", line))


def _lines(policy: PolicyInfo) -> list[str]:
    lines = [_call(policy.name, policy.options)]
    if policy.is_quarantined:
        lines[0] += "  QUARANTINED: the default decides"
        lines.append(f"why: {policy.quarantine_reason}")
    if policy.asking_seconds > HANGS_AFTER_SECONDS:
        lines.append(f"HANGS: asked {policy.asking_seconds:.0f} s ago, and no answer yet")
    if policy.num_calls:
        lines.append(_time(policy.seconds / policy.num_calls, policy.step_seconds, policy.num_calls))
    if policy.num_faults:
        lines.append(f"{policy.num_faults} bad answers, the last: {policy.last_fault}")
    shadow = policy.shadow
    if shadow is not None:
        lines.append(
            f"shadow {_call(shadow.name, shadow.options)}: "
            f"{shadow.num_disagreements} of {shadow.num_compared} answers differ"
        )
        if shadow.is_stopped:
            lines.append(f"shadow is asked no more: {shadow.last_fault}")
        elif shadow.num_faults:
            lines.append(f"shadow's bad answers: {shadow.num_faults}, the last: {shadow.last_fault}")
        lines += [f"{one.subject}: {one.obeyed}, not {one.shadow}" for one in shadow.samples]
    return lines


def _time(call_seconds: float, step_seconds: float, num_calls: int) -> str:
    return f"{1e6 * call_seconds:.1f} us a call, {1e3 * step_seconds:.3f} ms a step; {num_calls} calls"


def _call(name: str, options: object) -> str:
    assert isinstance(options, dict)
    return (
        f"{name}({', '.join(f'{option}={json.dumps(value)}' for option, value in sorted(options.items()))})"
    )
