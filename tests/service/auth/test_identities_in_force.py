"""The identities file changed under a running service."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.identities import FILE, MAIL, SEARCH
from support.scripted import recording_logger

from pageturner.service.auth.identities_in_force import IdentitiesInForce
from pageturner.service.errors import ConfigError

OTHER = f'[tenants.mail]\ntokens = [{{ id = "mail", sha256 = "{MAIL.digest.hex()}" }}]\n'


class Case:
    def __init__(self, folder: Path, text: str = FILE, mode: int = 0o600) -> None:
        self.path = folder / "identities.toml"
        self.second = 0
        self.write(text, mode)
        self.logger, self.log = recording_logger()
        self.refused: list[None] = []
        self.identities = IdentitiesInForce(self.path, self.logger, lambda: self.refused.append(None))

    def write(self, text: str, mode: int = 0o600) -> None:
        """Each at a time of its own, whatever the resolution of the clock."""
        self.second += 1
        self.path.write_text(text)
        self.path.chmod(mode)
        os.utime(self.path, ns=(self.second * 10**9,) * 2)

    @property
    def events(self) -> list[str]:
        return [entry["event"] for entry in self.log]

    @property
    def tokens(self) -> set[str]:
        return set(self.identities.current().tokens)


def test_the_start_says_what_was_read_and_a_bad_file_ends_it(tmp_path: Path) -> None:
    case = Case(tmp_path)
    assert case.log == [
        {
            "event": "authentication",
            "log_level": "info",
            "origin": "start",
            "tenants": 3,
            "tokens": 4,
            "certificates": 3,
        }
    ]
    with pytest.raises(ConfigError, match=r"tenants\.a"):
        Case(tmp_path, "[tenants.a]\nx = 1\n")


async def test_a_changed_file_comes_into_force_at_the_next_look(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.identities.poll()
    assert case.events == ["authentication"], "nothing has changed"
    case.write(OTHER)
    assert "search" in case.tokens, "not before it is read"
    await case.identities.poll()
    await case.identities.poll()
    assert case.tokens == {"mail"}
    assert case.events == ["authentication", "identities_reloaded"], "read once"


async def test_a_file_that_is_replaced_by_another_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    """As a mounted Secret is: links to a new folder, whose files may have any times."""
    case = Case(tmp_path)
    other = tmp_path / "new"
    other.write_text(FILE.replace('"search"', '"crawls"'))
    os.utime(other, ns=(10**9, 10**9))
    other.replace(case.path)
    await case.identities.poll()
    assert "crawls" in case.tokens


@pytest.mark.parametrize(
    "fault", ["[tenants", "[tenants.a]\nx = 1\n", "[tenants.a.limits]\nmax_tokens = -1\n"]
)
async def test_a_file_with_a_fault_leaves_the_old_one_in_force(tmp_path: Path, fault: str) -> None:
    case = Case(tmp_path)
    before = case.identities.current()
    case.write(fault)
    await case.identities.poll()
    await case.identities.poll()
    assert case.identities.current() is before
    assert case.events == ["authentication", "identities_refused"], "said once"
    assert len(case.refused) == 1
    assert str(case.path) in case.log[1]["reason"]
    case.write(OTHER)
    await case.identities.poll()
    assert case.tokens == {"mail"}


async def test_a_file_that_is_gone_leaves_the_old_one_in_force(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.path.unlink()
    await case.identities.poll()
    await case.identities.reload("SIGHUP")
    assert "search" in case.tokens
    assert case.events == ["authentication", "identities_refused"]
    case.write(OTHER)
    await case.identities.poll()
    assert case.tokens == {"mail"}


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o604, True)])
async def test_a_file_that_everybody_may_read_is_warned_about(
    tmp_path: Path, mode: int, warned: bool
) -> None:
    case = Case(tmp_path, mode=mode)
    assert ("identities_readable" in case.events) == warned


async def test_no_line_of_the_log_has_a_hash(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.write(OTHER + "x")
    await case.identities.poll()
    assert SEARCH.digest.hex() not in str(case.log)
    assert MAIL.digest.hex() not in str(case.log)
