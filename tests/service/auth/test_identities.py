"""The identities file: what it means, and faults named by their place."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.identities import FILE, MAIL, SEARCH

from pageturner.service.auth.identities import parse_identities, read_identities
from pageturner.service.errors import ConfigError
from pageturner.service.identity import Identity, TenantLimits

DIGEST = "ab" * 32
TOKEN = f'{{ id = "x", sha256 = "{DIGEST}" }}'


def test_a_file_becomes_tenants_with_tokens_certificates_and_limits() -> None:
    identities = parse_identities(FILE)
    limits = TenantLimits(max_concurrent_requests=4, min_priority=-5, max_priority=5, adapters=("a", "b"))
    assert identities.tokens["search"].identity == Identity("search", "token search", False, limits)
    assert identities.tokens["search"].digest == SEARCH.digest
    assert identities.tokens["mail"].digest == MAIL.digest, "digits in capitals are the same digits"
    assert identities.tokens["mail"].expires is None
    assert identities.certificates["spiffe://cluster/mail"] == Identity(
        "mail", "certificate spiffe://cluster/mail"
    )
    assert identities.tokens["operator"].identity.is_admin
    assert identities.num_tenants == 3


def test_a_date_ends_a_token_at_its_midnight_utc_and_a_time_at_that_moment() -> None:
    tokens = parse_identities(FILE).tokens
    assert tokens["search"].expires == datetime(2026, 6, 2, tzinfo=UTC).timestamp()
    assert tokens["operator"].expires == datetime(2026, 12, 31, 22, tzinfo=UTC).timestamp()


def test_tables_of_tables_are_read_as_inline_ones_are() -> None:
    text = f'[[tenants.a.tokens]]\nid = "x"\nsha256 = "{DIGEST}"\n[tenants.a.limits]\nmax_tokens = 0\n'
    entry = parse_identities(text).tokens["x"]
    assert entry.identity.limits == TenantLimits(max_tokens=0)


def test_an_empty_file_lets_nobody_in() -> None:
    assert parse_identities("").tokens == {}


def test_no_hash_is_in_the_representation() -> None:
    assert SEARCH.digest.hex() not in repr(parse_identities(FILE))
    assert repr(SEARCH.digest) not in repr(parse_identities(FILE))


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("[tenants\n", "auth.identities", "is not TOML"),
        (f"x = {'[' * 5000}", "auth.identities", "is not TOML"),
        ("[tenant.a]\n", "tenant", "unknown key; did you mean tenants?"),
        ("tenants = 3\n", "tenants", "3 is not a table"),
        ("tenants.a = 3\n", "tenants.a", "3 is not a table"),
        ("[tenants.a]\ntoken = []\n", "tenants.a.token", "did you mean tokens?"),
        ("[tenants.a]\nx = []\n", "tenants.a.x", "there are tokens, certificates, admin, limits"),
        ('[tenants." "]\n', "tenants. ", "printable"),
        ("[tenants.a]\nadmin = 1\n", "tenants.a.admin", "1 is not true or false"),
        ("[tenants.a]\ntokens = 3\n", "tenants.a.tokens", "3 is not a list"),
        ("[tenants.a]\ntokens = [3]\n", "tenants.a.tokens[0]", "3 is not a table"),
        (f"[tenants.a]\ntokens = [{TOKEN}, {{}}]\n", "tenants.a.tokens[1].id", "is missing"),
        ('[tenants.a]\ntokens = [{ id = "x" }]\n', "tenants.a.tokens[0].sha256", "is missing"),
        (
            f'[tenants.a]\ntokens = [{{ id = "a_b", sha256 = "{DIGEST}" }}]\n',
            "tenants.a.tokens[0].id",
            "letters, digits and hyphens",
        ),
        (
            f'[tenants.a]\ntokens = [{{ id = "x", sha256 = "{DIGEST}", expire = 1 }}]\n',
            "tenants.a.tokens[0].expire",
            "did you mean expires?",
        ),
        (
            f'[tenants.a]\ntokens = [{{ id = "x", sha256 = "{DIGEST}", expires = "2026-01-01" }}]\n',
            "tenants.a.tokens[0].expires",
            "without quotation marks",
        ),
        (
            f'[tenants.a]\ntokens = [{{ id = "x", sha256 = "{DIGEST}", expires = 2026-01-01T00:00:00 }}]\n',
            "tenants.a.tokens[0].expires",
            "has no offset",
        ),
        (
            f"[tenants.a]\ntokens = [{TOKEN}]\n[tenants.b]\ntokens = [{TOKEN}]\n",
            "tenants.b.tokens[0].id",
            "'x' is the id of another token, of 'a'",
        ),
        (f"[tenants.a]\ntokens = [{TOKEN}, {TOKEN}]\n", "tenants.a.tokens[1].id", "another token"),
        ("[tenants.a]\ncertificates = [1]\n", "tenants.a.certificates[0]", "1 is not a string"),
        ('[tenants.a]\ncertificates = ["x", ""]\n', "tenants.a.certificates[1]", "is empty"),
        (
            '[tenants.a]\ncertificates = ["x"]\n[tenants.b]\ncertificates = ["x"]\n',
            "tenants.b.certificates[0]",
            "of 'a' already",
        ),
        ("[tenants.a.limits]\nmax_token = 1\n", "tenants.a.limits.max_token", "did you mean max_tokens?"),
        ("[tenants.a.limits]\nmax_tokens = -1\n", "tenants.a.limits.max_tokens", "-1 is negative"),
        ("[tenants.a.limits]\nmax_tokens = true\n", "tenants.a.limits.max_tokens", "not a whole number"),
        ("[tenants.a.limits]\nmax_tokens = 1.5\n", "tenants.a.limits.max_tokens", "not a whole number"),
        ('[tenants.a.limits]\nadapters = "x"\n', "tenants.a.limits.adapters", "is not a list"),
        (
            "[tenants.a.limits]\nmin_priority = 2\nmax_priority = 1\n",
            "tenants.a.limits.min_priority",
            "2 is above max_priority, which is 1",
        ),
    ],
)
def test_a_fault_is_named_by_its_place(text: str, place: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_identities(text)
    assert caught.value.key == place
    assert reason in caught.value.reason


@pytest.mark.parametrize("sha256", ["'pt_x_AVERYSECRETSECRET'", f"'{DIGEST}0'", f"'{DIGEST[2:]}zz'", "1"])
def test_what_stands_in_the_place_of_a_hash_is_not_repeated(sha256: str) -> None:
    """It may be the token itself."""
    with pytest.raises(ConfigError) as caught:
        parse_identities(f'[tenants.a]\ntokens = [{{ id = "x", sha256 = {sha256} }}]\n')
    assert caught.value.key == "tenants.a.tokens[0].sha256"
    assert sha256.strip("'") not in caught.value.reason


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auth.identities: .*nosuch.toml cannot be read: No such file"):
        read_identities(tmp_path / "nosuch.toml")
    path = tmp_path / "identities.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_identities(path)
    path.write_text("[tenants.a]\nadmin = 1\n")
    with pytest.raises(ConfigError, match=rf"tenants.a.admin: .* \(from {path}\)"):
        read_identities(path)
