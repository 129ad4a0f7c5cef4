"""Blocks of the prefix cache as files: found whole or not at all, and within their bound."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pageturner.service.engine.tier_files import (
    DamagedBlock,
    TierFiles,
    TierFolderInUse,
    TierFolderUnusable,
)

BLOCK = 4096
ONE, TWO = b"1" * 16, b"2" * 16


def opened(folder: Path, fingerprint: str = "weights=a") -> TierFiles:
    return TierFiles(folder, fingerprint, BLOCK)


def content(seed: int = 0) -> memoryview:
    return memoryview(bytes([seed]) * BLOCK)


def read(files: TierFiles, block_hash: bytes) -> bytes:
    into = bytearray(BLOCK)
    files.read(block_hash, memoryview(into))
    return bytes(into)


def test_what_was_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    files = opened(tmp_path / "cache")
    files.write(ONE, content(1))
    files.write(TWO, content(2))
    key = files.key
    files.close()
    again = opened(tmp_path / "cache")
    assert again.key == key
    assert set(again.found(1 << 30)) == {ONE, TWO}
    assert read(again, TWO) == content(2)


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    files = opened(tmp_path / "cache")
    files.write(ONE, content())
    for path in (tmp_path / "cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def flip_a_bit(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-7] ^= 1
    path.write_bytes(whole)


def cut(path: Path) -> None:
    os.truncate(path, BLOCK // 2)


def cut_its_head(path: Path) -> None:
    os.truncate(path, 5)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def take_anothers_place(path: Path) -> None:
    path.write_bytes(path.with_name(f"{TWO.hex()}.kv").read_bytes())


@pytest.mark.parametrize("damage", [flip_a_bit, cut, cut_its_head, grow, take_anothers_place])
def test_a_damaged_block_is_none(tmp_path: Path, damage: object) -> None:
    files = opened(tmp_path)
    files.write(ONE, content(1))
    files.write(TWO, content(2))
    assert callable(damage)
    damage(files.path(ONE))
    with pytest.raises(DamagedBlock):
        read(files, ONE)
    assert read(files, TWO) == content(2)


def test_a_block_sealed_under_another_key_is_none(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.write(ONE, content(1))
    files.close()
    (tmp_path / "key").write_bytes(b"k" * 32)
    with pytest.raises(DamagedBlock, match="seal"):
        read(opened(tmp_path), ONE)


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.write(ONE, content(1))
    other = opened(tmp_path, "weights=b")  # at the same time: another model
    assert other.found(1 << 30) == []
    with pytest.raises(FileNotFoundError):
        read(other, ONE)
    other.path(ONE).write_bytes(files.path(ONE).read_bytes())
    with pytest.raises(DamagedBlock, match="seal"):
        read(other, ONE)


def test_one_process_at_a_time_serves_a_model_from_it(tmp_path: Path) -> None:
    files = opened(tmp_path)
    with pytest.raises(TierFolderInUse):
        opened(tmp_path)
    files.close()
    opened(tmp_path)


def test_the_oldest_of_all_models_give_way(tmp_path: Path) -> None:
    other = opened(tmp_path, "weights=b")
    other.write(TWO, content())
    os.utime(other.path(TWO), (1, 1))
    other.close()
    files = opened(tmp_path)
    for number in range(4):
        name = bytes([number]) * 16
        files.write(name, content(number))
        os.utime(files.path(name), (10 + number, 10 + number))
    kept = files.found(3 * files.file_bytes)
    assert kept == [bytes([number]) * 16 for number in (1, 2, 3)]
    assert not other.path(TWO).exists()


def test_blocks_of_a_model_that_is_served_are_left_alone(tmp_path: Path) -> None:
    other = opened(tmp_path, "weights=b")
    other.write(TWO, content())
    os.utime(other.path(TWO), (1, 1))
    files = opened(tmp_path)
    files.write(ONE, content())
    assert files.found(files.file_bytes) == [ONE]
    assert other.path(TWO).exists()


def test_what_is_no_block_is_swept_away(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.write(ONE, content())
    folder = files.path(ONE).parent
    for name in (f"{TWO.hex()}.0a1b2c3d", "zz.kv", f"{TWO.hex()}.kv", "notes.txt"):
        (folder / name).write_bytes(b"half")
    assert files.found(1 << 30) == [ONE]
    assert {path.name for path in folder.iterdir()} == {"lock", f"{ONE.hex()}.kv", "zz.kv", "notes.txt"}


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    """The folder may be somebody's, with folders that are named by digests as well."""
    theirs = tmp_path / "cache" / ("d41d8cd98f00b204" * 2)
    theirs.mkdir(parents=True)
    names = ("photo.jpg", "notes.kv", f"{'1' * 32}.kv", f"{'1' * 32}.{'2' * 8}")
    for name in names:
        (theirs / name).write_text("precious")
    files = opened(tmp_path / "cache")
    files.write(ONE, content())
    ours = files.path(ONE).parent
    (ours / "readme.txt").write_text("precious")
    (ours / f"{'3' * 32}.kv").mkdir()
    files.close()
    assert opened(tmp_path / "cache").found(0) == []
    assert sorted(path.name for path in theirs.iterdir()) == sorted(names)
    assert (ours / "readme.txt").read_text() == "precious"
    assert (ours / f"{'3' * 32}.kv").is_dir()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = opened(tmp_path)
    num_writes = 0

    def write(file: int, content: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes > 2:
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(file, content[:100])

    real = os.write
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="no space"):
        files.write(ONE, content())
    monkeypatch.undo()
    assert files.found(1 << 30) == []
    assert [path.name for path in files.path(ONE).parent.iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierFolderUnusable):
        opened(tmp_path / "file" / "cache")


def test_a_key_that_was_cut_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    files = opened(tmp_path)
    assert len(files.key) == 32
    files.write(ONE, content(3))
    assert read(files, ONE) == content(3)


def test_a_process_killed_in_the_middle_of_writes_leaves_whole_blocks(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from pageturner.service.engine.tier_files import TierFiles
        files = TierFiles(Path(sys.argv[1]), "weights=a", 4096)
        number = 0
        while True:
            number += 1
            name = number.to_bytes(16, "big")
            files.write(name, memoryview(bytes([number % 251]) * 4096))
            print(number, flush=True)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= 50:
                break
        writer.send_signal(signal.SIGKILL)
    files = opened(tmp_path)
    found = files.found(1 << 30)
    assert len(found) >= 50
    for name in found:
        assert read(files, name) == content(int.from_bytes(name, "big") % 251)
