"""A checksum sees each byte, its place and the length; a fingerprint sees what its samples see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.service.model import checksums

MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checksums") / "file"


@pytest.mark.fault("P")
@settings(max_examples=30, deadline=None)
@given(
    size=st.sampled_from([1, 9, MIB - 1, MIB, MIB + 7, 3 * MIB]),
    place=st.integers(0, 3 * MIB),
    bit=st.integers(0, 7),
)
def test_a_changed_bit_changes_the_checksum(path: Path, size: int, place: int, bit: int) -> None:
    path.write_bytes(bytes(size))
    before = checksums.checksum(path)
    changed = bytearray(size)
    changed[place % size] ^= 1 << bit
    path.write_bytes(changed)
    assert checksums.checksum(path) != before


def test_blocks_in_another_order_and_another_length_change_the_checksum(path: Path) -> None:
    contents = [b"a" * MIB + b"b" * MIB, b"b" * MIB + b"a" * MIB, b"a" * MIB, b"", b"\0", b"\0\0"]
    found = set()
    for content in contents:
        path.write_bytes(content)
        found.add(checksums.checksum(path))
    assert len(found) == len(contents)


@pytest.mark.fault("20")
def test_a_large_file_is_known_by_its_header_samples_size_and_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_WHOLE_BYTES", 1)
    found = set()
    for content, time in ((b"a" * 99, 1), (b"a" * 98 + b"b", 1), (b"b" + b"a" * 98, 1), (b"a" * 99, 2)):
        path.write_bytes(content)
        os.utime(path, ns=(time, time))
        found.add(checksums.fingerprint(path))
    assert len(found) == 4
