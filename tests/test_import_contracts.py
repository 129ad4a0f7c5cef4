"""The import contracts of pyproject.toml hold, and each of them is seen to fail when it is broken."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LINT = """
import sys
from pathlib import Path
tree = sys.argv[1]
# Only the copy may be found: an installed pageturner would be a second portion of the namespace.
sys.path[:] = [tree] + [entry for entry in sys.path if not (Path(entry) / "pageturner").exists()]
from importlinter.cli import lint_imports
sys.exit(lint_imports(config_filename=sys.argv[2], no_cache=True, no_logo=True))
"""

BLOCK_POOL = "import pageturner.service.core.memory.block_pool"
# Contract -> a module, or a folder for a new one, and what is planted in it.
PLANTED = {
    "no circles": ("kernels/layout.py", "import pageturner.kernels.torch_ops"),
    "the service is built in layers": ("service/engine", "import pageturner.service.startup.sizing"),
    "the core is built in layers": ("service/core/request.py", "import pageturner.service.core.outputs"),
    "llguidance is met in one place": ("service/grammars/grammars.py", "import llguidance"),
    "grammars know outputs and forms only": ("service/grammars", BLOCK_POOL),
    "policies use the standard library only": ("policies", "import numpy"),
    "the router uses policies and the standard library only": ("service/routing", "import threading"),
    "kernels know nothing of requests": ("kernels", "import pageturner.policies.views"),
    "CuPy is met in one place": ("kernels/cuda/attention_plan.py", "import cupy.cuda"),
    "Ray is met in one place": ("service/scale/answers.py", "import ray.serve"),
    "the core is pure": ("service/core", "import torch"),
    "the model knows outputs and sampling parameters only": ("service/model", BLOCK_POOL),
    "the engine knows no wire": ("service/engine", "import pageturner.v1.generation_pb2"),
    "rpc sees the engine, never the scheduler or the model": ("service/rpc", BLOCK_POOL),
    "monitoring sees the engine as its clients do": ("service/monitoring", BLOCK_POOL),
    "the simulator is core and policies on a virtual clock": (
        "service/simulator",
        "import pageturner.kernels.layout",
    ),
    "traces use the standard library only": ("loadtest/traces", "import pageturner.v1.model_pb2"),
    "the load test is a client": ("loadtest", "import pageturner.service.errors"),
    "ranks carry out steps, and decide nothing": ("service/ranks", BLOCK_POOL),
    "the client has no torch behind it": (
        "service/client/async_client.py",
        "import pageturner.service.model.runner",
    ),
    "only commands and start-up read the configuration": ("service/core", "import pageturner.service.config"),
}


def copy_tree(target: Path) -> None:
    for folder in ("policies", "kernels", "service", "loadtest", "protos/pageturner/v1"):
        shutil.copytree(
            ROOT / folder,
            target / "pageturner" / Path(folder).name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, str(tree), str(ROOT / "pyproject.toml")]
    return subprocess.run(command, capture_output=True, text=True, cwd=tree)


def verdicts(output: str) -> dict[str, str]:
    """Contract name -> KEPT or BROKEN."""
    return dict(re.findall(r"^(.+) (KEPT|BROKEN)\b", output, re.MULTILINE))


def test_the_contracts_hold(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    result = lint(tmp_path)
    assert result.returncode == 0, result.stdout
    assert set(verdicts(result.stdout).values()) == {"KEPT"}


def test_each_contract_sees_a_forbidden_import(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    for number, (place, statement) in enumerate(PLANTED.values()):
        path = tmp_path / "pageturner" / place
        with (path if path.is_file() else path / f"planted{number}.py").open("a") as file:
            file.write(f"{statement}\n")
    result = lint(tmp_path)
    assert result.returncode != 0
    assert verdicts(result.stdout) == dict.fromkeys(PLANTED, "BROKEN"), result.stdout


@pytest.mark.parametrize("bare", ["kernels", "policies", "service", "loadtest"])
def test_bare_names_are_refused(bare: str, tmp_path: Path) -> None:
    """PyPI has a `kernels` that transformers imports; ours must never be found by that name."""
    planted = tmp_path / "planted.py"
    planted.write_text(f"import {bare}\n")
    command = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(planted)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "TID251" in result.stdout
