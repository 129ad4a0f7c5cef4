"""`pageturner calibrate`: a machine file for `simulate`, from a server that is timed or from a recording."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import note, write
from pageturner.service.commands.progress import progress, reading
from pageturner.service.commands.result_files import check_file
from pageturner.service.errors import ConfigError

HELP = "fit the simulator's step times to this machine"
EXAMPLE = "pageturner calibrate --out machine.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    parser.add_argument(
        "--recording",
        type=Path,
        metavar="FILE",
        help="fit what `serve --record` wrote, instead of starting a server",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the machine file there")
    parser.add_argument("--json", action="store_true", help="the machine and the errors of the fit")


def run(arguments: argparse.Namespace) -> int:
    if arguments.out:
        check_file("--out", arguments.out)
    if arguments.recording:
        from pageturner.service.simulator.recordings import fit_machine

        with reading(str(arguments.recording)) as on_bytes:
            found = fit_machine(arguments.recording, on_bytes)
    else:
        from pageturner.service.bench.calibrate import CALIBRATION_WORK, calibrate

        with progress(CALIBRATION_WORK) as advance:
            found = calibrate(config_arguments(arguments), advance)
    machine, error = found.machine, found.error
    for text in found.notes:
        note(text)
    for text in found.warnings:
        note(f"warning: {text}")
    if arguments.out:
        try:
            arguments.out.write_text(machine.to_json(), encoding="utf-8")
        except OSError as failure:
            raise ConfigError("--out", f"{arguments.out}: {failure.strerror}") from failure
    if arguments.json:
        document = {
            "machine": dataclasses.asdict(machine),
            "error": dataclasses.asdict(error),
            "notes": found.notes,
            "warnings": found.warnings,
        }
        write(json.dumps(document, indent=2))
        return 0
    for name, seconds in dataclasses.asdict(machine.step_time).items():
        write(f"{name:<18}{seconds * 1e6:14.4f} us")
    write(f"{'a request':<18}{machine.request_seconds * 1e6:14.4f} us beside its steps")
    write(
        f"relative error over {error.num_steps} steps: mean {error.mean:.1%}, "
        f"median {error.median:.1%}, largest {error.largest:.1%}"
    )
    return 0
