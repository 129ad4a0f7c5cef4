"""What policies/README.md shows works: a policy of one's own for each axis, its test, its configuration."""

from __future__ import annotations

import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

from pageturner.policies import registry
from pageturner.policies.interfaces import ALL_AXES
from pageturner.policies.spec import spec_from_table
from pageturner.policies.testing import check_policy

TEXT = (Path(__file__).parents[2] / "policies" / "README.md").read_text()
EXAMPLES, TEST = re.findall(r"```python\n(.*?)```", TEXT, re.S)
CLASSES = re.findall(r"class (\w+):\n    \"\"\"An? (\w+) policy", EXAMPLES)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The examples, as the module that the page calls `my_policies`."""
    made = types.ModuleType("my_policies")
    monkeypatch.setitem(sys.modules, "my_policies", made)
    exec(compile(EXAMPLES, "policies/README.md", "exec"), made.__dict__)
    return made


@pytest.mark.fault("J")
def test_the_page_shows_one_policy_of_each_axis_that_keeps_the_contract(module: Any) -> None:
    assert [axis for _, axis in CLASSES] == list(ALL_AXES)
    for name, axis in CLASSES:
        check_policy(axis, registry.create(axis, f"my_policies:{name}"))


@pytest.mark.fault("J")
def test_the_test_of_the_page_passes(module: Any) -> None:
    exec(compile(TEST, "policies/README.md", "exec"), module.__dict__)
    module.test_it_keeps_the_contract_of_its_axis()


def test_the_configuration_of_the_page_is_read(module: Any) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", TEXT, re.S)
    chosen = tomllib.loads(text)["policies"]
    assert registry.create("victim", chosen["victim"]) == module.SpokenLeast()
    spec = spec_from_table(chosen["reclaim"])
    assert registry.create("reclaim", spec.name, spec.options) == module.SwapLong(512)
