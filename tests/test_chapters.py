"""What the chapters of the load test and the laboratory show: files that are there, commands that parse."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from pageturner.service.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = ("loadtest", "service/simulator")


def text_of(folder: str) -> str:
    return (ROOT / folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", CHAPTERS)
def test_every_file_of_a_chapter_is_in_its_folder(folder: str) -> None:
    told = set(re.findall(r"`([\w/]+\.(?:py|json))`", text_of(folder)))
    made_by_a_user = {"machine.json", "figures.json"}
    assert {name for name in told - made_by_a_user if not (ROOT / folder / name).is_file()} == set()
    own = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py", "errors.py"}
    assert own - told == set()


@pytest.mark.parametrize(
    "line",
    [
        line
        for folder in CHAPTERS
        for line in re.findall(r"^    pageturner (.*)$", text_of(folder), re.MULTILINE)
    ],
)
def test_every_command_of_a_chapter_parses(line: str) -> None:
    words = shlex.split(re.split(r"[#>&]", line)[0])
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[words[0]]).add_arguments(parser)
    parser.parse_args(words[1:])
