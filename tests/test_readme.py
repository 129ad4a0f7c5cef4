"""What the README shows works: its configuration, its policy, its commands, its table, its files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.fake_server import serve

from pageturner.policies import registry
from pageturner.policies.interfaces import AXES
from pageturner.service.cli import COMMANDS
from pageturner.service.config import load_config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def _example_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's my_policies.py, importable."""
    (source,) = [block for block in blocks("python") if block.startswith("# my_policies.py")]
    (tmp_path / "my_policies.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)


@pytest.mark.usefixtures("_example_policy")
@pytest.mark.parametrize("toml", blocks("toml"))
def test_each_configuration_loads(toml: str, tmp_path: Path) -> None:
    path = tmp_path / "readme.toml"
    path.write_text(toml)
    assert load_config(path, {}).origins


@pytest.mark.usefixtures("_example_policy")
def test_the_policy_of_ones_own_takes_its_option() -> None:
    policy = registry.create("victim", "my_policies:Youngest", {"min_output_tokens": 4})
    assert registry.options_of(policy) == {"min_output_tokens": 4}


@pytest.mark.fault("M")
@pytest.mark.parametrize("path", ["README.md", "service/client/README.md"])
def test_the_programs_shown_run_as_scripts_when_pasted(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a fake server. The policy shown is a module to import, and is tried above."""
    sources = re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(encoding="utf-8"), re.DOTALL)
    programs = [source for source in sources if "localhost:50051" in source]
    assert programs
    with serve() as server:
        for program in programs:
            exec(compile(program.replace("localhost:50051", server.address), path, "exec"), {"__name__": "x"})
    assert len(server.requests) == len(programs)


def test_every_command_is_listed() -> None:
    assert re.findall(r"^    pageturner ([a-z]+)  +[a-zA-Z]", README, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("axis", AXES)
def test_the_table_names_every_policy(axis: str) -> None:
    (row,) = re.findall(rf"^\| {axis} \| .*? \| (.*) \|$", README, re.MULTILINE)
    assert tuple(re.findall(r"`([^`]+)`", row)) == tuple(cls.name for cls in registry.BUILT_IN[axis])


def test_every_file_of_the_walk_is_there() -> None:
    """A path is told from the root, from service/, or by the bare name of a file of this project."""
    names = {
        path.name for folder in ("service", "kernels", "policies") for path in (ROOT / folder).rglob("*.py")
    }
    for told in set(re.findall(r"`([\w/]+\.py)`", README)) - {"my_policies.py"}:
        known = told in names or any((ROOT / base / told).is_file() for base in ("", "service"))
        assert known, told
