"""The form of a token, and what it shows of itself."""

from __future__ import annotations

import hashlib

import pytest

from pageturner.service.auth.tokens import MAX_CHARACTERS, MalformedToken, new_token, parse_token

SECRET = "x" * 32


def test_a_new_token_reads_back_and_is_hashed_as_sha256sum_does() -> None:
    token = new_token()
    assert parse_token(token.text) == token
    assert token.text.startswith(f"pt_{token.id}_")
    assert token.digest == hashlib.sha256(token.text.encode()).digest()


def test_no_two_tokens_are_alike_and_each_secret_has_256_bits() -> None:
    made = {new_token() for _ in range(100)}
    assert len({token.id for token in made}) == len({token.text.split("_", 2)[2] for token in made}) == 100
    assert {len(token.text.split("_", 2)[2]) for token in made} == {43}


def test_the_secret_is_not_in_the_representation() -> None:
    token = new_token()
    assert token.text not in repr(token)
    assert token.text.split("_", 2)[2] not in f"{token} {token!r}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        SECRET,
        f"pt_{SECRET}",
        f"sk_a_{SECRET}",
        f"PT_a_{SECRET}",
        f"pt__{SECRET}",
        f"pt_a_{SECRET[1:]}",
        f"pt_a_{SECRET}é",
        f"pt_a_{SECRET} ",
        f"pt_a_{SECRET}\n",
        f"pt_{'a' * 65}_{SECRET}",
        f"pt_a_{'x' * MAX_CHARACTERS}",
    ],
)
def test_what_is_no_token_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(MalformedToken) as caught:
        parse_token(text)
    assert not text or text not in str(caught.value)


def test_a_secret_may_hold_the_characters_of_url_safe_base64() -> None:
    assert parse_token(f"pt_a-1_{SECRET}_-_").id == "a-1"
