"""`pageturner policies new` and `check`, and a policy beside the configuration file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pageturner.policies import registry
from pageturner.policies.errors import PolicyLoadError
from pageturner.policies.interfaces import ALL_AXES
from pageturner.service.cli import main
from pageturner.service.config import load_config

BROKEN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class SparesOne:
    def rank(self, candidates, claimant, load):
        return sorted(view.request.request_id for view in candidates)[1:]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own to be in; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in list(sys.modules):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    return tmp_path


@pytest.mark.fault("J")
@pytest.mark.parametrize("axis", ALL_AXES)
def test_what_new_writes_keeps_the_contract_and_its_test_passes(
    axis: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policies", "new", axis, f"my-{axis}"]) == 0
    assert f"test_my_{axis}.py" in capsys.readouterr().out
    assert main(["policies", "check", f"my_{axis}:My{axis.capitalize()}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["holds"], list(told["axes"])) == (True, [axis])
    code = f"import test_my_{axis} as t; t.test_it_keeps_the_contract_of_its_axis()"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    assert main(["policies", "new", axis, f"my-{axis}"]) == 2, "nothing is overwritten"
    assert "File exists" in capsys.readouterr().err


def test_new_leaves_no_policy_where_its_test_cannot_be_written(folder: Path) -> None:
    (folder / "test_youngest.py").write_text("mine")
    assert main(["policies", "new", "victim", "Youngest"]) == 2
    assert [path.name for path in folder.iterdir()] == ["test_youngest.py"]
    assert (folder / "test_youngest.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["Lambda", "Json", "---", "1st"])
def test_new_refuses_a_name_that_no_module_can_have(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["policies", "new", "victim", "--", name]
            if name == "---"
            else ["policies", "new", "victim", name]
        )
        == 2
    )
    assert not list(folder.iterdir())


@pytest.mark.fault("J")
def test_check_says_which_clause_is_broken_and_by_what(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken_policy.py").write_text(BROKEN)
    assert main(["policies", "check", "broken_policy:SparesOne"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN each candidate is named once" in out
    assert "holds  a frozen dataclass" in out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["new", "victims", "X"], "no such axis"),
        (["new", "victim"], "say AXIS NAME"),
        (["new", "victim", "!"], "no name for a class"),
        (["new", "victim", "json"], "no name for a class"),
        (["check"], "say one MODULE:CLASS"),
        (["check", "json:JSONDecoder"], "is not a frozen dataclass"),
        (["check", "no_such_module_of_ours:X"], "PYTHONPATH"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(
    words: list[str], hint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policies", *words]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.fault("J")
def test_a_policy_beside_the_configuration_file_is_found(folder: Path) -> None:
    beside = folder / "etc"
    beside.mkdir()
    (beside / "lies_beside.py").write_text(BROKEN)
    (beside / "pageturner.toml").write_text('[policies]\nvictim = "lies_beside:SparesOne"\n')
    loaded = load_config(beside / "pageturner.toml", {})
    assert registry.name_of(loaded.config.policies.create().victim) == "lies_beside:SparesOne"


@pytest.mark.fault("J")
def test_a_module_that_is_not_found_says_where_it_was_looked_for(folder: Path) -> None:
    sys.path.append(str(folder))
    with pytest.raises(PolicyLoadError, match="PYTHONPATH") as caught:
        registry.create("victim", "no_such_module_of_ours:X")
    assert str(folder) in caught.value.reason
    assert "beside the configuration file" in caught.value.reason
