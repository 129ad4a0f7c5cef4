"""Arguments and standard input become text, whatever the locale made of their bytes."""

from __future__ import annotations

import pytest

from pageturner.service.commands.text import text_of


@pytest.mark.fault("25", "26")
@pytest.mark.parametrize(
    ("given", "encoding", "text"),
    [
        (b"caf\xc3\xa9", "utf-8", "café"),
        (b"caf\xc3\xa9", "ascii", "café"),
        (b"caf\xe9", "iso8859-1", "café"),
        ("你 🙂".encode(), "ascii", "你 🙂"),
    ],
)
def test_bytes_are_read_by_the_locale_or_else_as_utf8(given: bytes, encoding: str, text: str) -> None:
    assert text_of(given.decode(encoding, "surrogateescape"), encoding) == text


@pytest.mark.fault("26")
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_bytes_that_are_no_utf8_are_refused(encoding: str) -> None:
    with pytest.raises(ValueError, match=r"'caf\\xe9' is not UTF-8 text"):
        text_of(b"caf\xe9".decode(encoding, "surrogateescape"), encoding)
