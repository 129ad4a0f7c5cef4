"""The way of a decode step through the core stays as short as its README says."""

from __future__ import annotations

from support.decode_path import PLAIN, decode_path

MAX_FILES = 7
MAX_LINES = 1400


def test_a_plain_decode_goes_through_few_files_of_the_core() -> None:
    path = decode_path(PLAIN)
    assert len(path) <= MAX_FILES, path
    assert sum(path.values()) <= MAX_LINES, path
