"""A pytest plugin (`-p support.sanitized`): every emulated kernel is compiled with AddressSanitizer.

The library of the sanitizer must be loaded before Python; see `sanitizer_environment`.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import MISSING, fields

from pageturner.kernels.cuda.emulation.build import ADDRESS, Builder

REPORTED = 77
"""The exit status of a process that ends with a report."""


def sanitizer_environment() -> dict[str, str]:
    """For a Python process whose C++ libraries are compiled with ADDRESS. A report ends the process."""
    command = ["g++", "-print-file-name=libasan.so"]
    library = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    # Python itself frees little at exit.
    return {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": f"detect_leaks=0:exitcode={REPORTED}"}


def pytest_configure() -> None:
    """Builders that tests make without flags of their own get these."""
    names = [field.name for field in fields(Builder) if field.default is not MISSING]
    defaults = dict(zip(names, Builder.__init__.__defaults__ or (), strict=True))
    Builder.__init__.__defaults__ = tuple({**defaults, "races": False, "flags": ADDRESS}.values())
