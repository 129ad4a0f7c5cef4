"""What the chapters show: links that lead somewhere, files that are there, commands that parse."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from pageturner.service.cli import COMMANDS
from pageturner.service.commands.parser import Parser

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("policies", "kernels", "service", "loadtest", "protos")
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *sorted(
        path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("README.md")
    ),
)
RESULTS = "loadtest/RESULTS.md"
"""Measured by commands that must be there, so that it can be done again."""
INVENTORIES = ("loadtest", "service/simulator")
"""Folders whose chapter names each of their files."""
MADE_BY_A_USER = {"machine.json", "figures.json", "kernels.json", "pyproject.toml"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands_of(page: str) -> list[str]:
    """Lines that are set off as commands, without the prompt's own words: pipes, comments, the background."""
    text = text_of(page).replace("\\\n", "")
    return re.findall(r"^    pageturner ((?!.*  +[a-zA-Z]).*)$", re.sub(r"  +#.*", "", text), re.MULTILINE)


def is_there(told: str, page: str) -> bool:
    """Whether a path, or the end of one, names a file at the root or in the chapter's folder."""
    folder = (ROOT / page).parent
    if any((base / told).exists() for base in (folder, ROOT, ROOT / "service")):
        return True
    return folder != ROOT and any(folder.rglob(told))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", text_of(page))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_file_named_is_there(page: str) -> None:
    told = set(re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|json|md|toml|txt|cu|cuh|proto))`", text_of(page)))
    files = {name for name in told if "NAME" not in name} - MADE_BY_A_USER
    files -= {"config.json", "tokenizer.json"}  # of a model
    assert {name for name in files if not is_there(name, page)} == set()


@pytest.mark.parametrize("folder", INVENTORIES)
def test_a_chapter_that_lists_its_files_lists_them_all(folder: str) -> None:
    told = set(re.findall(r"`([\w/]+\.py)`", text_of(f"{folder}/README.md")))
    own = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py", "errors.py"}
    assert own - told == set()


@pytest.mark.parametrize("line", [line for page in (*PAGES, RESULTS) for line in commands_of(page)])
def test_every_command_parses(line: str) -> None:
    words = shlex.split(re.split(r"[>&]", line)[0])
    parser = Parser(prog=words[0])
    importlib.import_module(COMMANDS[words[0]]).add_arguments(parser)
    parser.parse_args(words[1:])
