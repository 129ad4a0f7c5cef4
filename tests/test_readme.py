"""What the README shows works: its configuration, its policy, its commands, its table, its files."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("toml", blocks("toml"))
def test_each_configuration_loads(toml: str, tmp_path: Path) -> None:
    path = tmp_path / "readme.toml"
    path.write_text(toml)
    assert load_config(path, {}).origins


@pytest.mark.fault("M")
@pytest.mark.parametrize("path", ["README.md", "service/client/README.md"])
def test_the_programs_shown_run_as_scripts_when_pasted(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a fake server."""
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


def test_the_walk_is_short() -> None:
    """A request is followed in ten minutes: few files, all there, and few lines."""
    walk = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", README, re.MULTILINE)
    assert 0 < len(walk) <= 16
    lines = sum(len((ROOT / "service" / name).read_text().splitlines()) for name in walk)
    assert lines <= 3000, lines


def test_the_walk_tells_of_what_is_in_its_files() -> None:
    """A name in a row is a word of the row's file, so that it can be searched for there."""
    rows = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| (.*) \|$", README, re.MULTILINE)
    told = [(file, name) for file, row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(told) >= 6
    missing = [
        (file, name)
        for file, name in told
        if not re.search(rf"\b{name}\b", (ROOT / "service" / file).read_text(encoding="utf-8"))
    ]
    assert missing == []


def test_every_file_named_is_there() -> None:
    """A path is told from the root or from service/, which is what the walk's table is about."""
    for told in re.findall(r"[`(]((?:[\w.]+/)*[\w.]+\.(?:py|md|toml|txt))[`)]", README):
        assert any((ROOT / base / told).is_file() for base in ("", "service")), told


def test_each_chapter_is_linked() -> None:
    packages = ("policies", "kernels", "service", "loadtest", "protos")
    chapters = [path for package in packages for path in (ROOT / package).rglob("README.md")]
    assert [path for path in chapters if path.relative_to(ROOT).as_posix() not in README] == []


def test_what_a_user_reads_first_is_short() -> None:
    assert len(README.splitlines()) <= 250


def test_the_glossary_is_short() -> None:
    _, _, glossary = (ROOT / "service/core/README.md").read_text(encoding="utf-8").partition("## Glossary\n")
    assert 10 <= len(re.findall(r"^\| [a-z]", glossary, re.MULTILINE)) <= 25 + 1
