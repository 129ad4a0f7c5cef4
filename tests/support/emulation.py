"""Launchers whose kernels run on CPU fibers, compiled once for each source on this machine."""

from __future__ import annotations

from functools import cache

from pageturner.kernels.cuda.emulation.build import Builder
from pageturner.kernels.cuda.emulation.runtime import EmulatedRuntime
from pageturner.kernels.cuda.emulation.schedule import IN_ORDER, Schedule
from pageturner.kernels.cuda.runtime import Launcher
from support.ops import cpu_cache_dir


@cache
def emulated_launcher(schedule: Schedule = IN_ORDER) -> Launcher:
    return Launcher(EmulatedRuntime(Builder(cpu_cache_dir()), schedule=schedule))
