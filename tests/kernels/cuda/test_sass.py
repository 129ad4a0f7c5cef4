"""Reading machine code: small texts as nvdisasm prints them, then real ones."""

from __future__ import annotations

import tempfile
from importlib import metadata
from pathlib import Path

import pytest

from pageturner.kernels.cuda.compiler import Compiler
from pageturner.kernels.cuda.ptxas import Resources, read_resources
from pageturner.kernels.cuda.sass import KernelCode, Loop, disassemble, find_nvdisasm, read_sass
from pageturner.kernels.errors import KernelsUnavailable


def section(*lines: str, name: str = "kernel") -> str:
    """Lines that end in a colon are labels, the rest instructions."""
    text = [f'\t.section\t.text.{name},"ax",@progbits', "\t.align\t128", f"{name}:", f".text.{name}:"]
    offset = 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{offset:04x}*/                   {line} ;")
            offset += 16
    return "\n".join(text) + "\n"


def code(*lines: str) -> KernelCode:
    return read_sass(section(*lines))["kernel"]


HMMA = "HMMA.16816.F32.BF16 R12, R16.reuse, R64, R12"
END = ("EXIT", ".L_x_99:", "BRA `(.L_x_99)", "NOP", "NOP")


def test_opcodes_without_predicates_operands_and_padding() -> None:
    found = code(
        "LDC R1, c[0x0][0x37c]",
        "@!P0 STG.E.128 desc[UR4][R2.64+0x10], R8",
        "@P1 LDGSTS.E.BYPASS.LTC128B.128.ZFILL [R7+0xc000], desc[UR16][R10.64], P0",
        "LDSM.16.MT88.4 R4, [R2]",
        *END,
    )
    assert found.opcodes == (
        "LDC",
        "STG.E.128",
        "LDGSTS.E.BYPASS.LTC128B.128.ZFILL",
        "LDSM.16.MT88.4",
        "EXIT",
    )
    assert found.count(r"LDGSTS\.E(\.\w+)*\.128") == 1
    assert found.count("LD") == 3
    assert found.loops == ()


def test_a_loop_is_counted_from_its_label_to_its_branch() -> None:
    found = code("MOV R1, R2", ".L_x_1:", HMMA, "FADD R1, R2, R3", HMMA, "@!P0 BRA `(.L_x_1)", *END)
    assert found.loops == (Loop(instructions=4, products=2, shortest=4),)


def test_uniform_branches_have_a_condition_before_the_target() -> None:
    """sm_100: without it, what comes after would seem out of reach."""
    found = code(
        "MOV R1, R2", "BRA.U UP0, `(.L_x_2)", ".L_x_1:", HMMA, "BRA.U !UP1, `(.L_x_1)", ".L_x_2:", *END
    )
    assert found.loops == (Loop(instructions=2, products=1, shortest=2),)


def test_loops_without_products_are_part_of_the_one_around_them() -> None:
    found = code(
        ".L_x_1:",
        ".L_x_2:",
        "LDG.E R1, desc[UR4][R2.64]",
        "@P1 BRA `(.L_x_2)",
        HMMA,
        "@!P0 BRA `(.L_x_1)",
        ".L_x_3:",
        "FADD R1, R2, R3",
        "@!P0 BRA `(.L_x_3)",
        *END,
    )
    assert found.loops == (Loop(instructions=4, products=1, shortest=4),)


def test_only_the_inner_of_two_loops_with_products() -> None:
    found = code(".L_x_1:", HMMA, ".L_x_2:", HMMA, "@P1 BRA `(.L_x_2)", "@!P0 BRA `(.L_x_1)", *END)
    assert found.loops == (Loop(instructions=2, products=1, shortest=2),)


def test_a_rare_path_behind_the_end_belongs_to_its_loop() -> None:
    """sm_80: a diverged warp leaves by BRA.DIV and comes back from behind EXIT. That jump back is no loop,
    and what lies between is not in one."""
    found = code(
        ".L_x_1:",
        HMMA,
        "BRA.DIV ~URZ, `(.L_x_7)",
        ".L_x_2:",
        "SHFL.BFLY PT, R2, R75, 0x1, 0x1f",
        "@P0 CALL.REL.NOINC `(.L_x_3)",
        "BRA `(.L_x_1)",
        ".L_x_3:",
        "FADD R1, R2, R3",
        HMMA,
        "EXIT",
        ".L_x_7:",
        "MOV R12, 0x6590",
        "CALL.REL.NOINC `($__internal_3_$__cuda_sm70_shflsync_bfly_p)",
        "BRA `(.L_x_2)",
        "$__internal_3_$__cuda_sm70_shflsync_bfly_p:",
        "WARPSYNC R83",
        "RET.REL.NODEC R12 `(kernel)",
        ".L_x_99:",
        "BRA `(.L_x_99)",
    )
    assert found.loops == (Loop(instructions=8, products=1, shortest=5),)


def test_the_shortest_way_round_branches_around_what_is_rare() -> None:
    found = code(
        ".L_x_1:",
        HMMA,
        "@P1 BRA `(.L_x_2)",
        "FSEL R1, R2, R3, P2",
        "FSEL R1, R2, R3, P3",
        ".L_x_2:",
        HMMA,
        "@P3 BRA `(.L_x_4)",
        "@!P0 BRA `(.L_x_1)",
        ".L_x_4:",
        *END,
    )
    assert found.loops == (Loop(instructions=7, products=2, shortest=5),)


def test_of_products_on_alternative_paths_a_turn_passes_some() -> None:
    """Two whole tiles stand in this loop, of which a turn computes one."""
    found = code(
        ".L_x_1:",
        "@P1 BRA `(.L_x_2)",
        HMMA,
        "BRA `(.L_x_3)",
        ".L_x_2:",
        HMMA,
        "FSEL R1, R2, R3, P3",
        ".L_x_3:",
        "@!P0 BRA `(.L_x_1)",
        *END,
    )
    assert found.loops == (Loop(instructions=6, products=2, shortest=8),)


def test_several_kernels_and_sections_between_them() -> None:
    text = (
        "\t.target\tsm_90\n"
        + section(HMMA, *END, name="_Z1aILi64EEvv")
        + '\t.section\t.nv.shared._Z1aILi64EEvv,"aw",@nobits\n        .zero 1024\n'
        + section("EXIT", name="_Z1bv")
    )
    assert {name: len(found.opcodes) for name, found in read_sass(text).items()} == {
        "_Z1aILi64EEvv": 2,
        "_Z1bv": 1,
    }


def test_text_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no code section"):
        read_sass("nvdisasm fatal: unknown option")


def test_registers_and_spills_are_read_from_the_log_of_ptxas() -> None:
    log = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1av' for 'sm_90'
ptxas info    : Function properties for _Z1av
ptxas         .     24 bytes stack frame, 44 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 16 bytes smem
ptxas info    : Compiling entry function '_Z1bv' for 'sm_100a'
ptxas info    : Function properties for _Z1bv
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
"""
    assert read_resources(log) == {"_Z1av": Resources(255, 92, 24, 16), "_Z1bv": Resources(10, 0, 0, 0)}
    with pytest.raises(ValueError, match="not what ptxas is known to say"):
        read_resources("Compiling entry function '_Z1av' for 'sm_90'\nUsed none")


SOURCE = """
// As in a main loop: products fed through shared memory by asynchronous copies, a rare path with a division.
extern "C" __global__ void probe(const uint4* from, float4* to, unsigned* table, int count) {
  __shared__ uint4 tile[32];
  float d[4] = {};
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    unsigned address = __cvta_generic_to_shared(tile + threadIdx.x), a[4];
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address), "l"(from + i * 32) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
    if (table[i] > 7) table[i] = table[i + 1] / table[i];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
    for (int k = 0; k < 3; k++)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                   "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                   : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[k]), "r"(a[3 - k]));
  }
  to[threadIdx.x] = {d[0], d[1], d[2], d[3]};
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_machine_code_of_each_architecture(arch: str, tmp_path: Path) -> None:
    (tmp_path / "probe.cu").write_text(SOURCE)
    compiled = Compiler(tmp_path / "cache", sources=tmp_path).compile("probe.cu", ("probe",), arch)
    (found,) = read_sass(disassemble(compiled.cubin, find_nvdisasm())).values()
    assert found.count(r"LDGSTS\.E(\.\w+)*\.128") == 1
    assert found.count(r"LDSM\.16\.M88\.4") == 1
    assert found.count(r"STG\.E\.128") == 1
    assert found.count("LDL|STL") == 0
    (loop,) = found.loops
    assert loop.products == 3
    assert 20 < loop.instructions < len(found.opcodes)


def test_no_room_for_the_file_that_nvdisasm_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(KernelsUnavailable, match=r"nvdisasm failed: .*No such file"):
        disassemble(b"", find_nvdisasm())


def test_bytes_that_are_no_cubin_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match="nvdisasm failed"):
        disassemble(b"\x7fELF, or so it says", find_nvdisasm())
    with pytest.raises(KernelsUnavailable, match="nvdisasm failed"):
        disassemble(b"", tmp_path / "no such program")


def test_without_nvdisasm_kernels_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(KernelsUnavailable, match=r"nvidia-cuda-nvdisasm is not installed; .*kernel-tools"):
        find_nvdisasm()
    monkeypatch.setattr(metadata, "files", lambda name: [])
    with pytest.raises(KernelsUnavailable, match="without its program"):
        find_nvdisasm()
