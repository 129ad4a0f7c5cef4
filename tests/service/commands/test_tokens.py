"""`pageturner tokens`: what it prints, once, and what it leaves in the file."""

from __future__ import annotations

import io
import json
import stat
import time
from pathlib import Path

import pytest
from support.identities import FILE, SEARCH

from pageturner.service.auth.identities import read_identities
from pageturner.service.auth.proof import Authenticator, Presented
from pageturner.service.auth.tokens import parse_token
from pageturner.service.cli import main


def prove(path: Path, text: str) -> str:
    identities = read_identities(path)
    return Authenticator(lambda: identities, time.time).prove(Presented([f"Bearer {text}"])).tenant


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "identities.toml"


def test_a_new_token_is_printed_alone_and_lets_its_holder_in(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokens", "new", "search", "--expires=90", f"--file={path}"]) == 0
    out, err = capsys.readouterr()
    text = out.removesuffix("\n")
    assert prove(path, text) == "search"
    assert parse_token(text).id in err
    assert text not in err
    assert text not in path.read_text()
    expires = next(iter(read_identities(path).tokens.values())).expires
    assert expires is not None
    assert abs(expires - time.time() - 90 * 86_400) < 60


def test_it_is_told_as_json_too(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", "new", "search", "--json", f"--file={path}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert prove(path, told["token"]) == "search"
    assert (told["tenant"], told["expires"], told["file"]) == ("search", None, str(path))
    assert told["sha256"] == parse_token(told["token"]).digest.hex()


def test_it_is_kept_in_a_new_file_for_its_user_alone(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "token"
    assert main(["tokens", "new", "search", f"--file={path}", f"--out={out}"]) == 0
    assert prove(path, out.read_text().strip()) == "search"
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    told = capsys.readouterr()
    assert out.read_text().strip() not in told.out + told.err
    before = path.read_text()
    assert main(["tokens", "new", "search", f"--file={path}", f"--out={out}"]) == 2
    assert "File exists" in capsys.readouterr().err
    assert path.read_text() == before, "no token is made that nobody has"
    other = tmp_path / "other"
    assert main(["tokens", "new", " ", f"--file={path}", f"--out={other}"]) == 2
    assert not other.exists()


def test_the_list_shows_each_token_and_no_hash(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(FILE)
    assert main(["tokens", "list", f"--file={path}"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["search", "search"], ["old", "search"], ["mail", "mail"], ["operator", "operators"],
    ]  # fmt: skip
    assert SEARCH.digest.hex()[:8] not in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["tokens", "list", "--json", f"--file={path}"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == ["search", "old", "mail", "operator"]
    assert rows[1] == {
        "id": "old",
        "tenant": "search",
        "admin": False,
        "expires": "2026-06-01T00:00:00+00:00",
        "state": "expired",
    }
    assert (rows[2]["expires"], rows[2]["state"], rows[3]["admin"]) == (None, "valid", True)


def test_a_revoked_token_is_out_of_the_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(FILE)
    assert main(["tokens", "revoke", "mail", f"--file={path}"]) == 0
    assert "mail" not in read_identities(path).tokens
    assert main(["tokens", "revoke", "mail", f"--file={path}"]) == 2
    assert "no token 'mail'" in capsys.readouterr().err


def test_the_configuration_names_the_file(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[auth]\nidentities = "{path}"\n')
    assert main(["tokens", "new", "a", f"--config={config}"]) == 0
    monkeypatch.setenv("PAGETURNER_AUTH_IDENTITIES", str(path))
    assert main(["tokens", "new", "b"]) == 0
    assert {entry.identity.tenant for entry in read_identities(path).tokens.values()} == {"a", "b"}
    monkeypatch.delenv("PAGETURNER_AUTH_IDENTITIES")
    capsys.readouterr()
    assert main(["tokens", "list"]) == 2
    assert "auth.identities: is not set; --file FILE" in capsys.readouterr().err


def test_a_token_made_elsewhere_is_hashed_from_standard_input(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{SEARCH.text}\n"))
    assert main(["tokens", "hash"]) == 0
    line = capsys.readouterr().out
    path.write_text(f"[tenants.a]\ntokens = [{line.strip()}]\n")
    assert prove(path, SEARCH.text) == "a"
    monkeypatch.setattr("sys.stdin", io.StringIO(SEARCH.text))
    assert main(["tokens", "hash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": "search", "sha256": SEARCH.digest.hex()}


@pytest.mark.parametrize("text", ["hunter2", "pt_x_short", "\udcff"])
def test_what_is_no_token_is_refused_and_not_repeated(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["tokens", "hash"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "not of the form pt_ID_SECRET" in err
    assert text not in err


@pytest.mark.parametrize("days", ["0", "-1", "nan", "1e9"])
def test_an_expiry_that_makes_no_sense_is_refused_and_no_token_made(
    days: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokens", "new", "a", f"--expires={days}", f"--file={path}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "--expires" in err
    assert not path.exists()
