"""Edits of an identities file: the token that is meant and nothing else, whole or not at all."""

from __future__ import annotations

import datetime as dt
import stat
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.identities import FILE, SEARCH, STRANGER

from pageturner.service.auth import editing
from pageturner.service.auth.editing import add_token, edit_file, remove_token
from pageturner.service.auth.identities import parse_identities, read_identities
from pageturner.service.auth.tokens import new_token
from pageturner.service.errors import ConfigError

DIGEST = "ab" * 32
EXPIRES = dt.datetime(2027, 3, 1, 12, tzinfo=dt.UTC)
FILES = {
    "empty": "",
    "inline": FILE,
    "comments": (
        "# top\n[tenants.search] # who searches\ntokens = [\n"
        f'  # the first\n  {{ id = "a", sha256 = "{DIGEST}" }}, # old\n]\n# limits\n[tenants.search.limits]\n'
        "max_tokens = 1 # one\n"
    ),
    "tables": (
        f'[[tenants.search.tokens]] # x\nid = "a"\nsha256 = "{DIGEST}"\n[tenants.b]\nadmin = true # yes\n'
    ),
    "limits alone": "[tenants.search.limits]\nmax_tokens = 1 # one\n",
    "dotted": "tenants.search.admin = true # yes\n",
    "one line": "tenants = { search = { admin = true } } # yes\n",
    "others alone": "[tenants.b]\nadmin = true # yes\n",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_a_token_is_added_and_taken_away_again_whatever_the_form_of_the_file(text: str) -> None:
    before = parse_identities(text)
    added = add_token(text, "search", STRANGER, EXPIRES)
    after = parse_identities(added)
    entry = after.tokens["stranger"]
    assert (entry.identity.tenant, entry.digest) == ("search", STRANGER.digest)
    assert entry.expires == EXPIRES.timestamp()
    assert {name: each for name, each in after.tokens.items() if name != "stranger"} == before.tokens
    removed = parse_identities(remove_token(added, "stranger"))
    assert (removed.tokens, removed.certificates) == (before.tokens, before.certificates)
    for line in text.splitlines():
        if "#" in line:
            assert line[line.index("#") :] in added, "comments stay"
    assert STRANGER.text not in added


def test_the_new_tenant_of_a_new_file_is_easy_to_read() -> None:
    text = add_token(editing.NEW_FILE, "search", STRANGER, None)
    assert text.endswith(
        f'\n[tenants.search]\ntokens = [\n    {{id = "stranger", sha256 = "{STRANGER.digest.hex()}"}},\n]\n'
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["a", "b.c", 'd"e', "f g", "é"]), min_size=1, max_size=6))
def test_edits_of_any_tenants_leave_the_tokens_that_were_not_revoked(tenants: list[str]) -> None:
    text = ""
    held: dict[str, str] = {}
    for tenant in tenants:
        token = new_token()
        text = add_token(text, tenant, token, None)
        held[token.id] = tenant
    kept = sorted(held)[::2]
    for token_id in set(held) - set(kept):
        text = remove_token(text, token_id)
    found = {each: entry.identity.tenant for each, entry in parse_identities(text).tokens.items()}
    assert found == {each: held[each] for each in kept}


def test_what_cannot_be_done_is_named() -> None:
    with pytest.raises(ConfigError, match="no token 'nosuch'"):
        remove_token(FILE, "nosuch")
    with pytest.raises(ConfigError, match="printable"):
        add_token("", " ", SEARCH, None)
    with pytest.raises(ConfigError, match=r"tenants\.a\.x"):
        add_token("[tenants.a]\nx = 1\n", "b", SEARCH, None)
    with pytest.raises(ConfigError, match="another token, of 'search'"):
        add_token(FILE, "mail", SEARCH, None)


def test_a_new_file_is_for_its_owner_alone_and_an_old_one_keeps_its_mode_but_for_others(
    tmp_path: Path,
) -> None:
    path = tmp_path / "identities.toml"
    add = partial(add_token, tenant="a", expires=None)
    edit_file(path, partial(add, token=new_token()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    edit_file(path, partial(add, token=new_token()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert len(read_identities(path).tokens) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["identities.toml"], "nothing else is left there"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text(FILE)
    (tmp_path / "link.toml").symlink_to("real.toml")
    edit_file(tmp_path / "link.toml", partial(remove_token, token_id="old"))
    assert (tmp_path / "link.toml").is_symlink()
    assert "old" not in read_identities(tmp_path / "real.toml").tokens


def test_an_edit_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "identities.toml"
    path.write_text(FILE)
    with pytest.raises(ConfigError):
        edit_file(path, partial(remove_token, token_id="nosuch"))

    def fail(_: int) -> None:
        raise OSError(28, "No space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        edit_file(path, partial(remove_token, token_id="old"))
    assert path.read_text() == FILE
    assert [each.name for each in tmp_path.iterdir()] == ["identities.toml"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        edit_file(tmp_path / "nosuch" / "identities.toml", str)


def _add_some(path: Path) -> None:
    for _ in range(5):
        edit_file(path, partial(add_token, tenant="a", token=new_token(), expires=None))


def test_edits_at_once_lose_none(tmp_path: Path) -> None:
    """Threads do for processes: the lock is of a descriptor."""
    path = tmp_path / "identities.toml"
    threads = [threading.Thread(target=_add_some, args=(path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(read_identities(path).tokens) == 15
