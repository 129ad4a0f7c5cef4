"""A model is converted once, whole or not at all, by any process and however that ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pageturner.service.errors import ModelError
from pageturner.service.model.conversion_cache import MANIFEST, converted_folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def copy(source: Path, folder: Path) -> None:
    (folder / "a").write_bytes(source.read_bytes())


def never(source: Path, folder: Path) -> None:
    raise AssertionError("converted again")


def test_the_second_time_nothing_is_read(source: Path, tmp_path: Path) -> None:
    first = converted_folder(source, "float32", tmp_path / "cache", copy)
    assert (first / "a").read_bytes() == b"weights"
    assert converted_folder(source, "float32", tmp_path / "cache", never) == first


def test_another_variant_or_a_changed_source_is_another_folder(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folders = {converted_folder(source, variant, cache, copy) for variant in ("float32", "bfloat16")}
    source.write_bytes(b"other")
    folders.add(converted_folder(source, "float32", cache, copy))
    assert len(folders) == 3


@pytest.mark.fault("20")
def test_sources_of_one_name_size_and_time_but_other_content_have_folders_of_their_own(
    tmp_path: Path,
) -> None:
    found = []
    for place, content in (("a", b"weights"), ("b", b"WEIGHTS")):
        (tmp_path / place).mkdir()
        source = tmp_path / place / "model.gguf"
        source.write_bytes(content)
        os.utime(source, ns=(1, 1))
        folder = converted_folder(source, "float32", tmp_path / "cache", copy)
        found.append((folder / "a").read_bytes())
    assert found == [b"weights", b"WEIGHTS"]


@pytest.mark.fault("20")
def test_a_source_of_other_time_and_equal_content_is_not_converted_again(
    source: Path, tmp_path: Path
) -> None:
    first = converted_folder(source, "float32", tmp_path / "cache", copy)
    os.utime(source, ns=(1, 1))
    assert converted_folder(source, "float32", tmp_path / "cache", never) == first


@pytest.mark.parametrize("name", ["a", MANIFEST])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed", "nested"])
@pytest.mark.fault("P")
def test_a_folder_that_was_damaged_is_converted_anew(
    source: Path, tmp_path: Path, name: str, damage: str
) -> None:
    folder = converted_folder(source, "float32", tmp_path / "cache", copy)
    if damage == "cut":
        os.truncate(folder / name, 3)
    elif damage == "nested":
        (folder / name).write_text("[" * 100_000)
    elif damage == "changed":
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        (folder / name).unlink()
    assert converted_folder(source, "float32", tmp_path / "cache", copy) == folder
    assert (folder / "a").read_bytes() == b"weights"
    assert converted_folder(source, "float32", tmp_path / "cache", never) == folder


@pytest.mark.fault("P")
@pytest.mark.parametrize("suffix", ["", ".partial"])
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_in_the_place_of_a_folder_is_replaced(
    source: Path, tmp_path: Path, suffix: str, is_link: bool
) -> None:
    folder = converted_folder(source, "float32", tmp_path / "cache", copy)
    shutil.rmtree(folder)
    place = folder.with_name(f"{folder.name}{suffix}")
    if is_link:
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.write_text("x")
    assert converted_folder(source, "float32", tmp_path / "cache", copy) == folder
    assert (folder / "a").read_bytes() == b"weights"


@pytest.mark.fault("P")
def test_a_disk_that_fills_during_conversion_is_named_in_one_line(source: Path, tmp_path: Path) -> None:
    def fill(source: Path, folder: Path) -> None:
        copy(source, folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match=r"No space left on device.*XDG_CACHE_HOME") as caught:
        converted_folder(source, "float32", tmp_path / "cache", fill)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_conversion_that_fails_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def fail(source: Path, folder: Path) -> None:
        copy(source, folder)
        raise ModelError("not understood")

    with pytest.raises(ModelError, match="not understood"):
        converted_folder(source, "float32", tmp_path / "cache", fail)
    assert [path.suffix for path in (tmp_path / "cache" / "converted").iterdir()] == [".lock"]
    converted_folder(source, "float32", tmp_path / "cache", copy)


_KILLED = """
import os, signal, sys
from pathlib import Path
from pageturner.service.model.conversion_cache import converted_folder

def convert(source, folder):
    (folder / "a").write_bytes(b"half")
    (folder / "stray").write_bytes(b"")
    os.kill(os.getpid(), signal.SIGKILL)

converted_folder(Path(sys.argv[1]), "float32", Path(sys.argv[2]), convert)
"""


def test_a_killed_writer_leaves_no_half_and_no_lock(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(source), str(cache)], check=False)
    assert killed.returncode == -9
    assert any(path.suffix == ".partial" for path in (cache / "converted").iterdir())
    folder = converted_folder(source, "float32", cache, copy)
    assert {path.name for path in folder.iterdir()} == {"a", MANIFEST}
    assert (folder / "a").read_bytes() == b"weights"
    assert not any(path.suffix == ".partial" for path in (cache / "converted").iterdir())


def test_two_writers_convert_once(source: Path, tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()
    calls: list[str] = []
    folders: list[Path] = []

    def slow(source: Path, folder: Path) -> None:
        calls.append("slow")
        started.set()
        assert go_on.wait(60)
        copy(source, folder)

    def late(source: Path, folder: Path) -> None:
        calls.append("late")
        copy(source, folder)

    def run(convert: object) -> None:
        folders.append(converted_folder(source, "float32", tmp_path / "cache", convert))  # type: ignore[arg-type]

    first = threading.Thread(target=run, args=(slow,))
    first.start()
    assert started.wait(60)
    second = threading.Thread(target=run, args=(late,))
    second.start()
    go_on.set()
    first.join(60)
    second.join(60)
    assert calls == ["slow"]
    assert folders[0] == folders[1]


def test_a_cache_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match=r"cannot convert model\.gguf"):
        converted_folder(source, "float32", tmp_path / "cache", copy)
