"""Serving on the CPU imports neither CuPy nor the modules that would."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import pageturner.service.cli
import pageturner.service.commands.serve
import pageturner.service.startup.wiring
import pageturner.kernels.cpu.ops
import pageturner.kernels.selection
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"cupy", "cupy_backends"}))
print(*sorted(name for name in sys.modules if name.startswith("pageturner.kernels.cuda")))
"""


def test_the_cpu_path_imports_no_cupy_and_no_cuda_kernels() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_the_modules_that_use_cupy_import_it_when_it_is_needed() -> None:
    program = """
import sys
import pageturner.kernels.cuda.compiler, pageturner.kernels.cuda.cupy_runtime, pageturner.kernels.cuda.report
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"cupy", "cupy_backends"}))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
