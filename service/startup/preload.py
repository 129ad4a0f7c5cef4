"""Loads torch's libraries beside the imports that need none of it."""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LIBRARY = "lib/libtorch_python.so"
"""What `import torch` loads first; all its other libraries come with it."""


def preload_torch(load: Callable[[str], object] = ctypes.CDLL) -> threading.Thread | None:
    """Load them in a thread, by `load`. None where torch is not installed.

    That takes 0.2 s in the system's loader, which `import torch` spends under the interpreter's lock and this
    does not. A library that cannot be loaded like this is left to the import, which finds out why.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = str(Path(spec.origin).parent / _LIBRARY)

    def run() -> None:
        with suppress(OSError):
            load(path)

    thread = threading.Thread(target=run, name="pageturner-preload", daemon=True)
    thread.start()
    return thread
