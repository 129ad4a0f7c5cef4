"""In a container: a root that cannot be written, no HOME, a folder to start in that is not one's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.model_folders import save_chat_model

from pageturner.service.client import SyncClient
from pageturner.service.client.server_process import PROGRAM, READY
from pageturner.service.config import cache_directory
from pageturner.service.errors import ModelError
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions

NOWHERE = "/proc/nowhere"
"""Root may write to any folder but of this file system, which has no room for one."""

BARE = {name: value for name, value in os.environ.items() if name not in ("HOME", "TMPDIR")}


def _serve(words: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, "serve", "--port=0", "--device=cpu", "--num-threads=1", "--swap-space=0", *words],
        cwd="/proc",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_server_without_home_or_cache_serves(tmp_path: Path) -> None:
    """Slower, since nothing compiled or measured is kept; the log says what it did without."""
    model = save_chat_model(tmp_path / "model")
    environment = {**BARE, "XDG_CACHE_HOME": NOWHERE}
    with _serve([f"--model={model}", "--num-blocks=64"], environment) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith(READY), process.communicate()[1][-2000:]
            with SyncClient(ready.split()[-1]) as client:
                assert client.generate("hello", max_tokens=3).usage.num_output_tokens > 0
                assert client.flight_record()
        finally:
            process.terminate()
            _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert NOWHERE in log, "it says which folder it could not write to"


def test_a_model_that_must_be_converted_names_the_folder_that_it_needs() -> None:
    options = ModelOptions(source="embedded")
    with pytest.raises(ModelError, match=rf"{NOWHERE}.*XDG_CACHE_HOME names another folder"):
        load_artifacts(options, cache_directory({"XDG_CACHE_HOME": NOWHERE}))
