"""What the emulator says of kernels with bugs, and that it leaves right ones alone."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import pytest
import torch
from support.emulator_probe import SOURCE, SOURCES, THREADS, EmulatorArguments, line, run
from support.ops import cpu_cache_dir

from pageturner.kernels.cuda.emulation.build import Builder
from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.emulation.schedule import (
    GREEDY,
    GREEDY_EAGER,
    IN_ORDER,
    REVERSED,
    SCHEDULES,
    SHUFFLED,
    Schedule,
)
from pageturner.kernels.cuda.variants import Variant
from pageturner.kernels.errors import KernelFault, KernelsUnavailable

UCONTEXT = ("-DSIMT_UCONTEXT",)

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
both_switches = pytest.mark.parametrize("flags", [(), UCONTEXT], ids=["own-switch", "ucontext"])


@pytest.fixture(scope="module", autouse=True)
def compiled_beside_each_other() -> None:
    """Most of the kernels: one by one, as tests come to them, they would keep one core busy."""
    text = (SOURCES / SOURCE).read_text()
    plain = re.findall(r"^__global__ void (\w+)\(", text, re.MULTILINE)
    switched = re.findall(r"^template <bool \w+> __global__ void (\w+)\(", text, re.MULTILINE)
    expressions = [*plain, *(f"{name}<{value}>" for name in switched for value in ("true", "false"))]
    variants = [Variant(SOURCE, expression, THREADS, 0, EmulatorArguments) for expression in expressions]
    Builder(cpu_cache_dir(), SOURCES).build(variants)


def fault(*parts: str) -> pytest.RaisesExc[KernelFault]:
    return pytest.raises(KernelFault, match=".*".join(map(re.escape, parts)))


def numbers(count: int = 512) -> torch.Tensor:
    return torch.arange(float(count))


def schedules_that_show(expression: str, wanted: torch.Tensor, *, threads: int = THREADS) -> set[str]:
    """Schedules under which the kernel's result is wrong, with the search for races off."""
    found = {
        str(schedule): run(expression, numbers(), schedule=schedule, threads=threads, races=False)
        for schedule in SCHEDULES
    }
    return {schedule for schedule, output in found.items() if not torch.equal(output[: len(wanted)], wanted)}


ALL = set(map(str, SCHEDULES))


def test_a_missing_barrier_of_the_block_changes_the_result() -> None:
    wanted = numbers(THREADS).roll(-32)
    assert schedules_that_show("rotate<true>", wanted) == set()
    assert schedules_that_show("rotate<false>", wanted) == ALL


def test_a_missing_barrier_of_the_warp_changes_the_result() -> None:
    wanted = numbers(THREADS).view(-1, 2).flip(1).ravel()
    assert schedules_that_show("rotate_lanes<true>", wanted) == set()
    assert schedules_that_show("rotate_lanes<false>", wanted) == ALL


def test_a_wait_too_weak_reads_what_has_not_come() -> None:
    wanted = numbers(128) + numbers()[128:256]
    assert schedules_that_show("wait_for<0>", wanted, threads=32) == set()
    assert schedules_that_show("wait_for<1>", wanted, threads=32) == ALL - {"greedy-eager"}


def test_a_buffer_refilled_too_early_shows_where_a_warp_runs_ahead() -> None:
    wanted = numbers(384).view(3, THREADS).sum(0)
    assert schedules_that_show("refill<true>", wanted) == set()
    assert schedules_that_show("refill<false>", wanted) >= {"greedy", "greedy-eager"}


@every_schedule
@pytest.mark.parametrize(
    ("kernel", "threads", "places"),
    [
        ("rotate<{}>", THREADS, {"rotated write", "rotated read"}),
        ("rotate_lanes<{}>", THREADS, {"lane write", "lane read"}),
        ("refill<{}>", THREADS, {"refill", "sum"}),
        ("overlap<{}>", THREADS, {"overlapping write"}),
    ],
)
def test_a_race_is_told_with_both_places_under_every_schedule(
    schedule: Schedule, kernel: str, threads: int, places: set[str]
) -> None:
    run(kernel.format("true"), numbers(), schedule=schedule, threads=threads)
    with fault("a race with") as raised:
        run(kernel.format("false"), numbers(), schedule=schedule, threads=threads)
    assert {place for place in map(line, places) if place in str(raised.value)} == set(map(line, places))


@every_schedule
def test_a_wait_too_weak_is_told_under_every_schedule(schedule: Schedule) -> None:
    run("wait_for<0>", numbers(), schedule=schedule, threads=32)
    with fault(line("copied sum"), "the copy that began at", line("copy"), "is not waited for"):
        run("wait_for<1>", numbers(), schedule=schedule, threads=32)


@every_schedule
def test_a_block_may_end_before_its_copies(schedule: Schedule) -> None:
    found = run("leaves_a_copy", numbers(), schedule=schedule, blocks=2, shared_bytes=2048)
    assert torch.equal(found[:THREADS], numbers()[::4])


def test_votes_and_shuffles_order_nothing() -> None:
    run("rotate_lanes<true>", numbers())
    with fault(line("vote read"), "a race with thread", line("vote write")):
        run("votes_for_a_barrier", numbers(), schedule=REVERSED)


@both_switches
def test_a_divergent_barrier_is_told_with_both_places(flags: tuple[str, ...]) -> None:
    with fault(
        "divergent_barrier: ", line("the other barrier"), "divergent __syncthreads", line("one barrier")
    ):
        run("divergent_barrier", flags=flags)


def test_a_divergent_shuffle_is_told_with_both_places() -> None:
    with fault(line("the other shuffle"), "divergent __shfl_sync", line("one shuffle")):
        run("divergent_warp", numbers())


@both_switches
def test_a_deadlock_names_each_waiting_thread_and_its_line(flags: tuple[str, ...]) -> None:
    with fault(
        "deadlock in block (0, 0, 0); threads 0 to 4 are in __syncwarp at ",
        line("company"),
        "; threads 5 to 5 are in __syncthreads at ",
        line("lonely"),
        "; threads 32 to 127 have exited",
    ):
        run("deadlock", flags=flags)


def test_a_mask_without_the_calling_lane_is_a_fault() -> None:
    with fault(line("wrong mask"), "leaves out its own lane", "thread (3, 0, 0)"):
        run("leaves_out_itself")


def test_a_lane_that_has_exited_has_nothing_to_give() -> None:
    with fault(line("from the gone"), "takes no part", "thread (6, 0, 0)"):
        run("shuffles_from_the_gone")


def test_a_product_takes_all_lanes() -> None:
    with fault(line("product of a part"), "mma_m16n8k16 without all lanes of the warp"):
        run("product_of_a_part")


@both_switches
def test_a_bounds_check_tells_block_and_thread(flags: tuple[str, ...]) -> None:
    with fault(line("bounds"), "bounds check: i < arguments.count", "in block (1, 0, 0) thread (72, 0, 0)"):
        run("out_of_bounds", count=200, blocks=2, flags=flags)
    assert torch.equal(run("out_of_bounds", count=256, blocks=2, flags=flags), torch.ones(256))


def test_a_trap_is_a_fault() -> None:
    with fault(line("trap"), "__trap", "thread (9, 0, 0)"):
        run("traps", count=9)


@every_schedule
def test_shared_memory_begins_as_nan_in_every_block(schedule: Schedule) -> None:
    assert run("uninitialised", blocks=2, schedule=schedule).isnan().all()


def test_too_little_shared_memory_is_a_fault() -> None:
    with fault("uses 512 bytes of shared memory, and the launch gave 511"):
        run("rotate<true>", numbers(), shared_bytes=511)


@pytest.mark.parametrize(
    ("kernel", "what"),
    [(0, "cp_async_16"), (1, "cp_async_16 from"), (2, "ldmatrix_x4"), (3, "a null or misaligned address")],
)
def test_a_misaligned_address_is_a_fault(kernel: int, what: str) -> None:
    run(f"misaligned<{kernel}>", numbers(), count=16)
    with fault(line(f"misaligned {kernel}"), what):
        run(f"misaligned<{kernel}>", numbers(), count=8)


@pytest.mark.parametrize("bytes_given", [1024, 512])
def test_a_row_outside_of_shared_memory_is_a_fault(bytes_given: int) -> None:
    if bytes_given == 1024:
        run("beyond_shared", shared_bytes=bytes_given)
    else:
        with fault(line("beyond shared"), "ldmatrix_x4 outside of shared memory", "thread (16, 0, 0)"):
            run("beyond_shared", shared_bytes=bytes_given)


@pytest.mark.parametrize(
    ("kernel", "good", "bad", "what"),
    [
        (0, 32767, 32768, "a product that overflows"),
        (1, 3, 4, "an index beyond its array"),
        (3, 31, 32, "a shift beyond the width of its type"),
        (4, 8, 7, "a division by zero"),
    ],
)
def test_undefined_behaviour_is_a_fault(kernel: int, good: int, bad: int, what: str) -> None:
    run(f"undefined<{kernel}>", numbers(), count=good)
    with fault(line(f"undefined {kernel}"), what):
        run(f"undefined<{kernel}>", numbers(), count=bad)


def test_reading_from_null_is_a_fault() -> None:
    with fault(line("undefined 2"), "a null or misaligned address"):
        run("undefined<2>", None)


def test_a_stack_that_overflows_is_a_fault() -> None:
    with fault("the stack of a thread overflowed", "thread (0, 0, 0)"):
        run("overflows_its_stack")


@both_switches
@every_schedule
def test_barriers_and_votes_do_not_wait_for_exited_threads(
    schedule: Schedule, flags: tuple[str, ...]
) -> None:
    found = run("early_exit", numbers(), schedule=schedule, flags=flags)[:THREADS]
    threads = torch.arange(THREADS)
    votes = torch.tensor([31.0, 31.0, 32.0, 32.0]).repeat_interleave(32)
    gone = (threads == 0) | (threads == 40)
    assert torch.equal(found, torch.where(gone, -1.0, (threads ^ 1) + votes))


@every_schedule
def test_parts_of_a_warp_work_by_themselves(schedule: Schedule) -> None:
    found = run("halves", numbers(), schedule=schedule)[:THREADS].view(8, 16)
    given = numbers(THREADS).view(8, 16)
    wanted = torch.where(torch.arange(8) % 2 == 0, given.sum(1), given.amax(1))
    assert torch.equal(found, wanted[:, None].expand(8, 16))


def test_schedules_do_what_they_are_named_for() -> None:
    def came_by(schedule: Schedule) -> list[int]:
        """Threads in the order in which they came by: as themselves first, as negatives after the barrier."""
        return run("order", schedule=schedule, blocks=2, num_outputs=512).int().tolist()

    def first_time(schedule: Schedule) -> list[int]:
        return [thread for thread in came_by(schedule) if thread > 0]

    threads = list(range(1, 256))
    assert first_time(IN_ORDER) == threads
    assert first_time(REVERSED) == threads[::-1]
    assert first_time(SHUFFLED) not in (threads, threads[::-1])
    assert sorted(first_time(SHUFFLED)) == threads
    assert came_by(SHUFFLED) == came_by(SHUFFLED)
    assert came_by(SHUFFLED) != came_by(Schedule("other", SHUFFLED.order, seed=8))
    # In turn, thread 1 goes on after all others have come; greedy, its warp goes on before the next begins.
    assert came_by(IN_ORDER).index(-1) > came_by(IN_ORDER).index(127)
    assert came_by(GREEDY).index(-1) < came_by(GREEDY).index(32)


def test_blocks_on_two_os_threads_have_their_own_shared_memory() -> None:
    given = torch.randn(64 * THREADS, generator=torch.Generator().manual_seed(0))
    alone, beside = (
        run("sums", given, blocks=64, num_outputs=64, os_threads=os_threads) for os_threads in (1, 2)
    )
    assert torch.equal(alone, beside)
    torch.testing.assert_close(alone, given.view(64, THREADS).sum(1))
    with fault("bounds check"):
        run("out_of_bounds", count=200, blocks=2, os_threads=2)


def test_a_launch_after_a_fault_is_a_fresh_one() -> None:
    runtime = EmulatedRuntime(Builder(cpu_cache_dir(), SOURCES), schedule=GREEDY_EAGER)
    assert runtime.device == torch.device("cpu")
    with fault("bounds check"):
        run("out_of_bounds", count=0, schedule=GREEDY_EAGER)
    assert torch.equal(run("out_of_bounds", count=128, schedule=GREEDY_EAGER)[:128], torch.ones(128))


def test_what_cannot_be_compiled_is_told(tmp_path: Path) -> None:
    variant = Variant(SOURCE, "rotate<3, 4>", THREADS, 0, EmulatorArguments)
    with pytest.raises(KernelsUnavailable, match=r"(?s)g\+\+ failed.*emulator_probe.cu.*error"):
        EmulatedRuntime(Builder(cpu_cache_dir(), SOURCES)).load([variant])
    with pytest.raises(KernelsUnavailable, match="no such-compiler on the path"):
        EmulatedRuntime(Builder(tmp_path, SOURCES, compiler="such-compiler")).load([variant])
    with pytest.raises(KernelsUnavailable, match=r"absent\.cu"):
        Builder(tmp_path).build([Variant("absent.cu", "absent", 1, 0, EmulatorArguments)])
    (tmp_path / "file").touch()
    with pytest.raises(KernelsUnavailable, match="file"):
        Builder(tmp_path / "file").build_texts([])


def test_a_library_is_compiled_once_for_each_source(tmp_path: Path) -> None:
    shutil.copy(SOURCES / SOURCE, tmp_path)
    variant = Variant(SOURCE, "traps", THREADS, 0, EmulatorArguments)
    builder = Builder(cpu_cache_dir(), tmp_path)
    (first,) = builder.build([variant])
    compiled = first.stat().st_mtime_ns
    assert builder.build([variant]) == [first]
    assert first.stat().st_mtime_ns == compiled
    (tmp_path / "more.cuh").write_text("// a header that it might include")
    assert builder.build([variant]) != [first]


def test_arguments_have_the_size_that_the_kernel_takes() -> None:
    class Shorter(ctypes.Structure):
        _fields_ = (("output", ctypes.c_void_p),)

    runtime = EmulatedRuntime(Builder(cpu_cache_dir(), SOURCES))
    with pytest.raises(AssertionError, match="takes 32 bytes"):
        runtime.load([Variant(SOURCE, "traps", THREADS, 0, Shorter)])
