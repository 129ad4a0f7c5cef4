"""On a GPU, in this order: its primitives, the runtime, every kernel by the checks that the emulator passes.

The attention kernels come through the operations, in test_cuda_ops.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support import row_kernels
from support.block_checks import BLOCK_SIZES, PAIRS, check_copy_blocks, check_pack_blocks
from support.cuda_cases import gpu_launcher
from support.ops import cpu_cache_dir
from support.primitive_cases import CHECKS, probe_sources
from support.row_checks import (
    Heads,
    Rows,
    check_rms_norm,
    check_rope,
    check_rows_of_any_batch,
    check_silu_and_mul,
    check_write_kv,
    normal,
)

from pageturner.kernels.cuda import variants
from pageturner.kernels.cuda.compiler import Compiler
from pageturner.kernels.cuda.cupy_runtime import CupyRuntime, probe_gpu
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.cuda.variants import DTYPES

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BF16, FP16 = DTYPES
HEADS = {
    "smollm2": Heads(num_heads=9, num_kv_heads=3, head_dim=64),
    "smallest": Heads(num_heads=1, num_kv_heads=1, head_dim=16, num_rows=3),
    "wide": Heads(num_heads=32, num_kv_heads=8, head_dim=128, block_size=32, num_rows=500),
    "odd": Heads(num_heads=5, num_kv_heads=5, head_dim=80, block_size=64, num_rows=70),
}


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    sources = probe_sources(tmp_path_factory.mktemp("probes"))
    return Launcher(CupyRuntime(CUDA, Compiler(cpu_cache_dir(), sources=sources)))


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return gpu_launcher()


@pytest.mark.parametrize("name", CHECKS)
def test_a_primitive_is_what_its_definition_says(probes: Launcher, name: str) -> None:
    CHECKS[name](probes)


def test_every_shipped_kernel_loads(launcher: Launcher) -> None:
    """Within the device's shared memory, asked for before the first launch."""
    launcher.prepare(variants.shipped())


def test_the_gpu_is_the_one_that_torch_has(launcher: Launcher) -> None:
    gpu, properties = probe_gpu(CUDA), torch.cuda.get_device_properties(CUDA)
    assert gpu.name == properties.name
    assert gpu.capability == (properties.major, properties.minor)
    assert gpu.num_multiprocessors == properties.multi_processor_count
    assert gpu.memory_bytes == properties.total_memory


def test_a_launch_is_captured_on_the_stream_of_its_moment(launcher: Launcher) -> None:
    """A remembered stream would run at once, and leave the graph empty."""
    gate_up = normal(8, 256, dtype=BF16, seed=1).to(CUDA)
    given = gate_up.clone()
    expected = row_kernels.silu_and_mul(launcher, gate_up).clone()
    graph = torch.cuda.CUDAGraph()
    gate_up.zero_()
    with torch.cuda.graph(graph):
        output = _silu_and_mul_into_new(launcher, gate_up)
    gate_up.copy_(given)
    output.fill_(torch.nan)
    torch.cuda.synchronize()
    assert output.isnan().all()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


def test_a_launch_waits_for_its_own_stream(launcher: Launcher) -> None:
    gate_up = torch.zeros(64, 4096, dtype=BF16, device=CUDA)
    given = normal(64, 4096, dtype=BF16, seed=1).to(CUDA)
    expected = row_kernels.silu_and_mul(launcher, given).clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so, as the next
    with torch.cuda.stream(side):
        # Some 30 ms of the GPU, behind which the copy and then the kernel are queued.
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        gate_up.copy_(given)
        output = _silu_and_mul_into_new(launcher, gate_up)
    side.synchronize()
    assert torch.equal(output, expected)


def _silu_and_mul_into_new(launcher: Launcher, gate_up: torch.Tensor) -> torch.Tensor:
    """Without the guards of `row_kernels`, whose checks would wait for the GPU."""
    from pageturner.kernels.cuda import row_grids
    from pageturner.kernels.cuda.arguments import SiluAndMulArguments

    output = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    args = SiluAndMulArguments(
        gate_up=gate_up.data_ptr(),
        output=output.data_ptr(),
        gate_up_stride=gate_up.stride(0),
        num_rows=output.shape[0],
        size=output.shape[1],
    )
    launcher.launch(variants.silu_and_mul(gate_up.dtype), row_grids.silu_and_mul(args), args)
    return output


def test_cupy_allocates_nothing(launcher: Launcher) -> None:
    import cupy

    check_silu_and_mul(launcher, 4, 256, BF16)
    assert cupy.get_default_memory_pool().total_bytes() == 0
    assert cupy.get_default_pinned_memory_pool().n_free_blocks() == 0


OUT_OF_BOUNDS = """
import sys, torch
from pathlib import Path
from pageturner.kernels.cuda.block_moves import Move
from pageturner.kernels.cuda.compiler import Compiler
from pageturner.kernels.cuda.cupy_runtime import CupyRuntime
from pageturner.kernels.cuda.runtime import Launcher
from support import row_kernels
launcher = Launcher(CupyRuntime(torch.device("cuda"), Compiler(Path(sys.argv[1]), bounds_check=True)))
pool = torch.zeros(4, 32, dtype=torch.int16, device="cuda")
row_kernels.run_chains(launcher, pool, [[Move(0, 1)]])
torch.cuda.synchronize()
print("within")
row_kernels.run_chains(launcher, pool, [[Move(0, 4)]])
torch.cuda.synchronize()
print("unseen")
"""


def test_the_debug_build_stops_at_a_bound(launcher: Launcher) -> None:
    """In a process of its own: a trap ends all that CUDA does in one."""
    tests = str(next(path for path in sys.path if path.endswith("tests")))
    program = f"import sys; sys.path.insert(0, {tests!r})" + OUT_OF_BOUNDS
    command = [sys.executable, "-c", program, str(cpu_cache_dir())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["within"]
    assert done.returncode != 0
    assert "CUDA error" in done.stderr


@pytest.mark.parametrize("rows", ["contiguous", "merged", "unaligned"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_write_kv(launcher: Launcher, heads: Heads, dtype: torch.dtype, rows: Rows) -> None:
    check_write_kv(launcher, heads, dtype, rows)


@pytest.mark.parametrize("rows", ["contiguous", "merged", "unaligned"])
@pytest.mark.parametrize("table", ["float32", "own"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_rope(launcher: Launcher, heads: Heads, dtype: torch.dtype, table: str, rows: Rows) -> None:
    check_rope(launcher, heads, dtype, torch.float32 if table == "float32" else dtype, rows)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 257, 576, 1024, 1032, 4096])
def test_rms_norm(launcher: Launcher, size: int, dtype: torch.dtype, residual: bool) -> None:
    check_rms_norm(launcher, (9, 1, size), dtype, residual=residual)


@pytest.mark.parametrize("rows", ["merged", "unaligned"])
@pytest.mark.parametrize("shape", [(7, 3, 64), (5, 2, 320), (4, 3, 257)])
def test_rms_norm_of_strided_heads(launcher: Launcher, shape: tuple[int, int, int], rows: Rows) -> None:
    check_rms_norm(launcher, shape, FP16, residual=False, rows=rows)


@pytest.mark.parametrize("size", [64, 576, 1027])
def test_a_row_is_normed_alike_in_any_batch(launcher: Launcher, size: int) -> None:
    check_rows_of_any_batch(launcher, size, BF16)


@pytest.mark.parametrize("gap", [0, 8, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 8, 100, 1536])
def test_silu_and_mul(launcher: Launcher, size: int, dtype: torch.dtype, gap: int) -> None:
    check_silu_and_mul(launcher, 300, size, dtype, gap)


@pytest.mark.parametrize("block_bytes", [*BLOCK_SIZES, 368_640])
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_copies(launcher: Launcher, pairs: list[tuple[int, int]], block_bytes: int) -> None:
    check_copy_blocks(launcher, pairs, block_bytes)


@pytest.mark.parametrize("block_bytes", [*BLOCK_SIZES, 368_640])
def test_packing(launcher: Launcher, block_bytes: int) -> None:
    check_pack_blocks(launcher, [7, 0, 3, 9, 8], block_bytes)
