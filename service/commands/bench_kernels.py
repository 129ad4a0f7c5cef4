"""`pageturner bench kernels`: attention on this GPU; without one, on paper, and on this CPU."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.service.commands.output import note, write
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError, PageturnerError

if TYPE_CHECKING:
    import torch

    from pageturner.kernels.interface import PagedOps
    from pageturner.service.bench.attention_cases import Case
    from pageturner.service.bench.kernel_plot import Scale, Series
    from pageturner.service.bench.kernel_report import Estimated, Measured
    from pageturner.service.bench.stopwatch import Stopwatch

EXAMPLE = "pageturner bench kernels --batches 1,16,256 --contexts 512,8192 --json --output kernels.json"
_DRIVER = Path("/proc/driver/nvidia/version")
_MOST = 1 << 24
"""Sequences, and tokens of each: far more than any GPU holds."""
_PLOTS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True)
class GpuAtHand:
    """A GPU to measure. free_bytes: of its memory, asked before each case. capability: such as (9, 0)."""

    name: str
    driver: str
    capability: tuple[int, int]
    device: torch.device
    ops: PagedOps
    stopwatch: Stopwatch
    free_bytes: Callable[[], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="cuda measures there; cpu prints the paper estimate for --gpu and times the CPU's kernels "
        "(default: cuda where there is one)",
    )
    parser.add_argument("--gpu", default="H200", metavar="NAME", help="of the estimate (default %(default)s)")
    for name, doc in (("batches", "sequences of the GPU's decode cases"), ("contexts", "tokens of each")):
        parser.add_argument(
            f"--{name}", type=_numbers, metavar="N,...", help=f"{doc} (default: powers of two)"
        )
    parser.add_argument(
        "--kv-dtype",
        choices=("bfloat16", "int8", "fp8"),
        default="bfloat16",
        help="of the estimate's KV cache (default %(default)s); a GPU is measured in that",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (.png, .svg, .pdf)")
    parser.set_defaults(measure=run)


def run(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.attention_cases import BATCHES, CONTEXTS, MODELS, cases

    _check_files(arguments.output, arguments.plot)  # measuring takes minutes
    sizes = arguments.batches or BATCHES, arguments.contexts or CONTEXTS
    chosen = tuple(cases(MODELS, *sizes, arguments.kv_dtype))
    scale: Scale
    gpu = None if arguments.device == "cpu" else find_gpu(wanted=arguments.device == "cuda")
    if gpu is not None and arguments.kv_dtype != "bfloat16":
        raise ConfigError("--kv-dtype", f"{arguments.kv_dtype} is for the estimate, with --device cpu")
    if gpu is None:
        document, lines, panels = _on_paper(chosen, arguments.gpu, arguments.command_line)
        label, scale = f"us on one {arguments.gpu} at best, on paper", "log"
    else:
        document, lines, panels = _measured(chosen, gpu, arguments.command_line)
        label, scale = "fraction of what the machine can do", "linear"
    write(json.dumps(document, indent=2) if arguments.json else "\n".join(lines))
    if arguments.output is not None:
        _save(arguments.output, json.dumps(document, indent=2) + "\n")
    if arguments.plot is not None:
        from pageturner.service.bench.kernel_plot import write_plot

        write_plot(panels, label, arguments.plot, scale=scale)
        note(f"wrote {arguments.plot}")
    return 1 if document.get("stopped") else 0


def find_gpu(*, wanted: bool) -> GpuAtHand | None:
    """torch's current GPU; None where there is none. wanted: ConfigError instead, with the reason."""
    import torch

    from pageturner.service.model.backend import gpu_trouble

    trouble = gpu_trouble(0)
    if trouble is not None:
        if wanted:
            raise ConfigError("--device", f"cuda cannot be used: {trouble}")
        return None
    return describe_gpu(torch.device("cuda", 0), torch.cuda, make_ops)


def make_ops(device: torch.device) -> PagedOps:
    """The CUDA kernels; a case's are compiled when it comes. Raises PageturnerError if they can't be."""
    import torch

    from pageturner.kernels.cuda.selection import make_cuda_ops
    from pageturner.kernels.errors import KernelsUnavailable

    try:
        return make_cuda_ops(device, torch.bfloat16, 64, cache_directory(), debug=False)
    except KernelsUnavailable as error:
        raise PageturnerError(str(error)) from error


def describe_gpu(
    device: torch.device,
    cuda: Any,
    make: Callable[[torch.device], PagedOps],
    driver_file: Path = _DRIVER,
) -> GpuAtHand:
    """cuda: torch.cuda, or what stands for it."""
    from pageturner.service.bench.stopwatch import CudaStopwatch

    def free_bytes() -> int:
        cuda.empty_cache()
        return int(cuda.mem_get_info(device)[0])

    try:
        driver = driver_file.read_text().partition("\n")[0].strip()
    except OSError:
        driver = "unknown"
    return GpuAtHand(
        name=cuda.get_device_name(device),
        driver=driver,
        capability=cuda.get_device_capability(device),
        device=device,
        ops=make(device),
        stopwatch=CudaStopwatch(device, cuda),
        free_bytes=free_bytes,
    )


Found = tuple[dict[str, Any], "list[str]", "dict[str, Series]"]
"""The document, the lines of text, and the panels of a plot."""


def _measured(chosen: Sequence[Case], gpu: GpuAtHand, command: str) -> Found:
    from pageturner.service.bench.kernel_plot import measured_panels
    from pageturner.service.bench.kernel_report import Origin

    found = measure(chosen, gpu)
    origin = Origin(gpu.name, gpu.driver, _versions(), _now(), command)
    return (
        {"origin": asdict(origin), "measured": True} | found.document(),
        [f"{gpu.name}, {gpu.driver}", *found.lines()],
        measured_panels(found),
    )


def measure(chosen: Sequence[Case], gpu: GpuAtHand) -> Measured:
    """All cases, with a remark after each; what was measured until then where the device fails."""
    from pageturner.service.bench import cuda_kernels
    from pageturner.service.bench.attention_contenders import contenders
    from pageturner.service.bench.kernel_report import Measured
    from pageturner.service.bench.kernel_targets import verdicts

    device, stopwatch = gpu.device, gpu.stopwatch
    sizes = cuda_kernels.COPY_BYTES, cuda_kernels.MATMUL_SIZE
    machine = cuda_kernels.measure_machine(device, stopwatch, *sizes)
    results, stopped = [], None
    compared = contenders(gpu.ops)
    try:
        for result in cuda_kernels.measure_cases(chosen, compared, device, stopwatch, gpu.free_bytes):
            results.append(result)
            note(f"{len(results)}/{len(chosen)} {result.case}: {result.skipped or 'done'}")
    except (RuntimeError, KeyboardInterrupt) as error:  # as torch tells of a device that is lost
        stopped = str(error).partition("\n")[0] or type(error).__name__
    return Measured(machine, results, verdicts(results, machine, gpu.capability), stopped)


def _on_paper(chosen: Sequence[Case], name: str, command: str) -> Found:
    from pageturner.kernels.errors import CompilerUnavailable
    from pageturner.service.bench import kernels
    from pageturner.service.bench.kernel_plot import paper_panels
    from pageturner.service.bench.kernel_report import Origin

    found = estimate_cases(chosen, name)
    origin = Origin(platform.processor() or platform.machine(), "none", _versions(), _now(), command)
    document = {"origin": asdict(origin)} | found.document()
    lines = [*found.lines(), "", "MEASURED on this machine's CPU:"]
    try:
        timings = kernels.measure_cpu_kernels(cache_directory(), kernels.SHAPES)
    except CompilerUnavailable as reason:
        return document | {"cpu": None}, [*lines, f"nothing: {reason}"], paper_panels(found)
    document |= {"cpu": kernels.cpu_document(timings)}
    return document, [*lines, *kernels.cpu_lines(timings)], paper_panels(found)


def estimate_cases(chosen: Sequence[Case], name: str) -> Estimated:
    """For the GPU of this name. Raises ConfigError for one whose figures are not known."""
    from pageturner.service.bench.kernel_report import Estimated
    from pageturner.service.bench.paper_estimate import (
        GPUS,
        count_instructions,
        estimate,
        kernels_of,
        read_machine_code,
    )

    if name not in GPUS:
        raise ConfigError("--gpu", f"{name!r} is none of {', '.join(GPUS)}")
    gpu = GPUS[name]
    kernels = kernels_of(chosen)
    instructions = count_instructions(kernels, gpu.arch, read_machine_code(cache_directory()))
    return Estimated(gpu, instructions, [estimate(case, gpu, instructions) for case in chosen])


def _versions() -> dict[str, str]:
    import torch

    from pageturner import __version__

    return {"pageturner": __version__, "torch": torch.__version__, "cuda": torch.version.cuda or "none"}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _check_files(output: Path | None, plot: Path | None) -> None:
    """Raises ConfigError for one whose folder is not there, and a plot of another format."""
    for option, file in (("--output", output), ("--plot", plot)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(option, f"{file}: there is no folder {file.parent}")
    if plot is not None and plot.suffix not in _PLOTS:
        raise ConfigError("--plot", f"{plot} is none of {', '.join(_PLOTS)}")


def _save(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PageturnerError(str(error)) from error


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1 or max(numbers) > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 to {_MOST}")
    return numbers
