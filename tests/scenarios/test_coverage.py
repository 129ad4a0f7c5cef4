"""Every report in references.txt has a test, and every test that is named for one exists."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    """coverage.py beside this file, by path: the package of that name is another."""
    path = Path(__file__).with_name("coverage.py")
    spec = importlib.util.spec_from_file_location("scenario_coverage", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


table = _load()


def test_every_reference_has_a_test() -> None:
    covered = table.coverage()
    assert len(covered) == len(table.references()) >= 68, "each is listed once"
    assert [reference for reference, nodes in covered.items() if not nodes] == []


def test_every_test_that_the_table_names_exists() -> None:
    functions = {f"{path}::{name}" for path, name in table.all_tests()}
    named = {node for nodes in table.KINDS.values() for node in nodes}
    assert named - functions == set()
    assert table.KINDS.keys() <= set(table.references())


@pytest.mark.parametrize(
    ("name", "reference", "carried"),
    [
        ("test_vllm_39734_35541_prompt_larger_than_pool", "vllm#39734", True),
        ("test_vllm_39734_35541_prompt_larger_than_pool", "vllm#35541", True),
        ("test_vllm_397340_prompt", "vllm#39734", False),
        ("test_nano_vllm_274_empty", "nano-vllm#274", True),
        ("test_vllm_ascend_16315_pending", "vllm-ascend#16315", True),
        ("test_openvino_genai_4332_model_server_4428_gone", "model-server#4428", True),
        ("test_openvino_genai_4332_model_server_4428_gone", "openvino.genai#4428", False),
    ],
)
def test_a_name_carries_a_reference_whole(name: str, reference: str, carried: bool) -> None:
    assert table.carries(name, reference) is carried
