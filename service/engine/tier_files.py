"""Blocks of the prefix cache as files: how they are written, found again, and told from damaged ones.

    FOLDER/key                         the secret under which blocks are named and sealed, 0600
    FOLDER/FINGERPRINT/lock            held by the one process that uses the folder for this model
    FOLDER/FINGERPRINT/HASH.kv         a block: a head, then its bytes as they lie in the pool

A block's name is its hash, which stands for all tokens up to its end and for whatever else of the request
changes KV (tenant, salt, adapter). The fingerprint stands for whatever of the server does: weights, dtype,
layout, kernels, machine. So what is found is right, or it is damaged; and then its seal, a hash under the key
over name, fingerprint and content, does not fit.

A file is written under another name and renamed when it is whole, so that a process that is killed leaves
none that is half written. It is not forced to the medium: what a machine that loses power had not written is
found damaged, and computed again.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import struct
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

MAGIC = b"ptkv-001"
_HEAD = struct.Struct("<8s16s16sQ")
"""Magic, hash, seal, bytes of content."""

_SUFFIX = ".kv"
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
_BLOCK_NAME = re.compile(r"[0-9a-f]{32,128}\.kv")
_UNFINISHED_NAME = re.compile(r"[0-9a-f]{32,128}\.[0-9a-f]{8}")
_KEY_BYTES = 32


class TierFolderUnusable(Exception):
    """The folder can't be made, read or written."""


class TierFolderInUse(TierFolderUnusable):
    """Another process serves the same model from it."""


class DamagedBlock(Exception):
    """A file is not what was written under its name."""


class TierFiles:
    """The files of one model in `folder`, which is made if it is not there. Safe to use from several threads.

    fingerprint: of the server, as text. block_bytes: of each block. key: see above. Raises
    TierFolderUnusable, TierFolderInUse.
    """

    def __init__(self, folder: Path, fingerprint: str, block_bytes: int) -> None:
        self.folder = folder
        self.block_bytes = block_bytes
        self._fingerprint = fingerprint.encode()
        name = blake2b(self._fingerprint, digest_size=16).hexdigest()
        self._own = folder / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.key = _read_key(folder / "key")
            self._own.mkdir(mode=0o700, exist_ok=True)
            self._lock = _lock(self._own)
        except OSError as error:
            raise TierFolderUnusable(f"{folder}: {error.strerror or error}") from error

    @property
    def file_bytes(self) -> int:
        """Of one block's file."""
        return _HEAD.size + self.block_bytes

    def close(self) -> None:
        """Let another process have it. Closing twice is no error."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- blocks ----------------------------------------------------------------------------

    def write(self, block_hash: bytes, content: memoryview) -> None:
        """Raises OSError; nothing is left then."""
        path = self._path(block_hash)
        unfinished = path.with_suffix(f".{secrets.token_hex(4)}")
        head = _HEAD.pack(MAGIC, block_hash, self._seal(block_hash, content), len(content))
        try:
            file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _write_all(file, head)
                _write_all(file, content)
            finally:
                os.close(file)
            os.rename(unfinished, path)
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished)
            raise

    def read(self, block_hash: bytes, into: memoryview) -> None:
        """Raises DamagedBlock, or OSError; `into` holds anything then."""
        with open(self._path(block_hash), "rb", buffering=0) as file:
            self._read(block_hash, into, file.fileno())

    def _read(self, block_hash: bytes, into: memoryview, file: int) -> None:
        head = os.pread(file, _HEAD.size, 0)
        if len(head) < _HEAD.size or os.fstat(file).st_size != self.file_bytes:
            raise DamagedBlock("it is cut, or of another size")
        magic, name, seal, size = _HEAD.unpack(head)
        if (magic, name, size) != (MAGIC, block_hash, self.block_bytes):
            raise DamagedBlock("its head is not that of this block")
        offset = 0
        while offset < size:
            count = os.preadv(file, [into[offset:size]], _HEAD.size + offset)
            if count <= 0:
                raise DamagedBlock("it is cut")
            offset += count
        if self._seal(block_hash, into[:size]) != seal:
            raise DamagedBlock("its seal is broken")

    def remove(self, block_hash: bytes) -> None:
        """Forget a block. One that is not there is no error."""
        with suppress(OSError):
            os.unlink(self._path(block_hash))

    def touch(self, block_hash: bytes) -> None:
        """Note that it was used, for the order in which the next process finds them."""
        with suppress(OSError):
            os.utime(self._path(block_hash))

    def path(self, block_hash: bytes) -> Path:
        """Where the block lies."""
        return self._path(block_hash)

    def _path(self, block_hash: bytes) -> Path:
        return self._own / (block_hash.hex() + _SUFFIX)

    def _seal(self, block_hash: bytes, content: memoryview) -> bytes:
        digest = blake2b(self._fingerprint, key=self.key, digest_size=16)
        digest.update(block_hash)
        digest.update(content)
        return digest.digest()

    # --- what is there ---------------------------------------------------------------------

    def found(self, max_bytes: int) -> list[bytes]:
        """The blocks of this model, the one used last at the end; what is unfinished is removed.

        So are the oldest blocks of all models together, until no more than max_bytes are left. Blocks of a
        model that another process serves are its own.
        """
        own: list[tuple[float, int, Path]] = []
        others: list[tuple[float, int, Path]] = []
        for folder in _folders(self.folder):
            if folder == self._own:
                own = list(_blocks(folder))
            elif not _is_locked(folder):
                others += _blocks(folder)
        left = sum(size for _, size, _ in own + others) - max_bytes
        removed = set()
        for _, size, path in sorted(own + others):
            if left <= 0:
                break
            with suppress(OSError):
                path.unlink()
            removed.add(path)
            left -= size
        hashes = []
        for _, size, path in sorted(own):
            if path in removed:
                continue
            try:
                block_hash = bytes.fromhex(path.stem)
            except ValueError:
                block_hash = b""
            if size == self.file_bytes and self._path(block_hash) == path:
                hashes.append(block_hash)
            else:
                with suppress(OSError):
                    path.unlink()
        return hashes


def _read_key(path: Path) -> bytes:
    """The folder's secret, made by the first process that comes."""
    for _ in range(2):
        with suppress(FileNotFoundError):
            key = path.read_bytes()
            if len(key) == _KEY_BYTES:
                return key
            path.unlink()  # cut when it was written: all that it sealed is lost
        unfinished = path.with_suffix(f".{secrets.token_hex(4)}")
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write_all(file, secrets.token_bytes(_KEY_BYTES))
        finally:
            os.close(file)
        with suppress(FileExistsError):
            os.link(unfinished, path)  # unlike a rename, it leaves the key of a process that was faster
        os.unlink(unfinished)
    return path.read_bytes()


def _lock(folder: Path) -> int:
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise TierFolderInUse(f"{folder.parent}: another process uses it for this model") from None
    return file


def _is_locked(folder: Path) -> bool:
    try:
        file = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _folders(folder: Path) -> Iterator[Path]:
    """Those of models: each has its lock. What else lies there belongs to others."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False) and _FOLDER_NAME.fullmatch(entry.name):
            path = Path(entry.path)
            if (path / "lock").is_file():
                yield path


def _blocks(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """(when it was used last, bytes, path) of each; unfinished blocks are removed, and nothing else."""
    for entry in os.scandir(folder):
        if not entry.is_file(follow_symlinks=False):
            continue
        with suppress(OSError):
            if _UNFINISHED_NAME.fullmatch(entry.name):
                os.unlink(entry.path)
            elif _BLOCK_NAME.fullmatch(entry.name):
                status = entry.stat(follow_symlinks=False)
                yield status.st_mtime, status.st_size, Path(entry.path)


def _write_all(file: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
