"""Which credentials prove whom, and that a refusal tells nothing of the reason."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from contextlib import suppress

import pytest
from support.identities import MAIL, OPERATOR, SEARCH, SEARCH_OLD, STRANGER, authenticator, token

from pageturner.service.auth import proof
from pageturner.service.auth.proof import Authenticator, Presented
from pageturner.service.auth.tokens import BearerToken
from pageturner.service.errors import RefusalCause, Unauthenticated
from pageturner.service.identity import Identity

GUESS = token("search", "guess")


def bearing(text: str, *names: str) -> Presented:
    return Presented([text], names)


@pytest.mark.parametrize(
    ("presented", "tenant", "credential"),
    [
        (bearing(f"Bearer {SEARCH.text}"), "search", "token search"),
        (bearing(f"bearer {MAIL.text}"), "mail", "token mail"),
        (Presented((), ["search.internal"]), "search", "certificate search.internal"),
        (Presented((), ["other", "mail.internal", "x"]), "mail", "certificate mail.internal"),
        (Presented((), ["mail.internal", "spiffe://cluster/mail"]), "mail", "certificate mail.internal"),
        (bearing(f"Bearer {SEARCH.text}", "search.internal"), "search", "token search"),
        (bearing(f"Bearer {SEARCH.text}", "gateway.internal"), "search", "token search"),
    ],
)
def test_credentials_prove_a_tenant(presented: Presented, tenant: str, credential: str) -> None:
    identity = authenticator().prove(presented)
    assert (identity.tenant, identity.credential) == (tenant, credential)
    assert not identity.is_admin
    assert not identity.is_anonymous


def test_an_admin_and_its_limits_come_from_the_file() -> None:
    assert authenticator().prove(bearing(f"Bearer {OPERATOR.text}")).is_admin
    assert authenticator().prove(bearing(f"Bearer {SEARCH.text}")).limits.max_concurrent_requests == 4


REFUSED: Sequence[tuple[Presented, RefusalCause, str]] = (
    (Presented(), RefusalCause.MISSING, ""),
    (Presented((), ["nobody.internal"]), RefusalCause.UNKNOWN_CERTIFICATE, ""),
    (bearing(f"Bearer {STRANGER.text}"), RefusalCause.UNKNOWN_TOKEN, ""),
    (bearing(f"Bearer {GUESS.text}"), RefusalCause.WRONG_SECRET, "token search"),
    (bearing(f"Bearer {SEARCH_OLD.text}"), RefusalCause.EXPIRED, "token old"),
    (bearing(SEARCH.text), RefusalCause.MALFORMED, ""),
    (bearing(f"Basic {SEARCH.text}"), RefusalCause.MALFORMED, ""),
    (bearing(f"Bearer  {SEARCH.text}"), RefusalCause.MALFORMED, ""),
    (bearing("Bearer é"), RefusalCause.MALFORMED, ""),
    (bearing(""), RefusalCause.MALFORMED, ""),
    (Presented([f"Bearer {SEARCH.text}"] * 2), RefusalCause.MALFORMED, ""),
    # A token that fails is not made good by a certificate.
    (bearing(f"Bearer {GUESS.text}", "search.internal"), RefusalCause.WRONG_SECRET, "token search"),
    (bearing(f"Bearer {SEARCH.text}", "mail.internal"), RefusalCause.TWO_TENANTS, "token search"),
    (Presented((), ["search.internal", "mail.internal"]), RefusalCause.TWO_TENANTS, ""),
)


@pytest.mark.parametrize(("presented", "cause", "credential"), REFUSED)
def test_what_proves_nobody_is_refused_with_its_cause(
    presented: Presented, cause: RefusalCause, credential: str
) -> None:
    with pytest.raises(Unauthenticated) as caught:
        authenticator().prove(presented)
    assert (caught.value.cause, caught.value.credential) == (cause, credential)


class _TakesAll:
    """In the place of `hmac`."""

    compare_digest = staticmethod(lambda left, right: True)


class _ByTheBeginning:
    compare_digest = staticmethod(lambda left, right: left[:0] == right[:0])


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (proof, "hmac", _TakesAll),
        (proof, "hmac", _ByTheBeginning),
        (Authenticator, "_is_over", lambda self, entry: False),
        (proof, "_by_certificate", lambda identities, names: None),
        (
            proof,
            "_by_certificate",
            lambda identities, names: next(
                (identities.certificates[name] for name in names if name in identities.certificates), None
            ),
        ),
    ],
    ids=["any secret", "no byte compared", "no expiry", "no certificate", "the first of two tenants"],
)
def test_a_check_that_is_left_out_is_noticed(
    module: object, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    noticed = 0
    for case in REFUSED:
        try:
            test_what_proves_nobody_is_refused_with_its_cause(*case)
        except (AssertionError, pytest.fail.Exception):
            noticed += 1
    assert noticed


def test_every_refusal_reads_alike() -> None:
    texts = set()
    for presented, _, _ in REFUSED:
        with pytest.raises(Unauthenticated) as caught:
            authenticator().prove(presented)
        texts.add(str(caught.value))
        assert caught.value.__cause__ is None
    (text,) = texts
    assert not any(word in text for word in ("expired", "unknown", "wrong", "search"))


@pytest.mark.parametrize("held", [SEARCH, GUESS, STRANGER, SEARCH_OLD])
def test_one_constant_time_comparison_is_made_whether_the_id_is_known_or_not(
    held: BearerToken, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    class Counting:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(proof, "hmac", Counting)
    with suppress(Unauthenticated):
        authenticator().prove(bearing(f"Bearer {held.text}"))
    assert len(compared) == 1
    assert [len(each) for each in compared[0]] == [32, 32]


def test_a_presented_credential_is_not_in_the_representation() -> None:
    assert SEARCH.text not in repr(bearing(f"Bearer {SEARCH.text}"))
    assert isinstance(authenticator().prove(bearing(f"Bearer {SEARCH.text}")), Identity)
