"""Where the server listens: on every address of its host's name, or on a socket file.

gRPC is content with one address of several, and takes a socket file from the server that listens there.
Here all of them are had, or the server does not start.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pageturner.service.errors import ConfigError
from pageturner.service.rpc.options import ListenAddress, format_address

Resolve = Callable[..., list[tuple[Any, ...]]]
"""As `socket.getaddrinfo`."""

_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""The machine has no such address, as ::1 where IPv6 is switched off."""


@dataclass(frozen=True, slots=True)
class Listener:
    """port: 0 for a socket file. socket_file: with its inode."""

    port: int
    socket_file: tuple[Path, int] | None = None

    def remove_socket_file(self) -> None:
        """To be called when the server has stopped. Leaves a file alone that another server put there."""
        if self.socket_file is None:
            return
        path, inode = self.socket_file
        try:
            if path.lstat().st_ino == inode:
                path.unlink()
        except FileNotFoundError:
            pass  # gRPC has removed it


@dataclass(frozen=True, slots=True)
class Transport:
    """How what is listened on is protected. new_credentials: makes those of one address; None for plain text.

    is_private: a socket file may be opened by the server's own user alone.
    """

    new_credentials: Callable[[], grpc.ServerCredentials] | None = None
    is_private: bool = False


def listen(
    server: grpc.aio.Server,
    address: ListenAddress,
    transport: Transport = Transport(),
    resolve: Resolve = socket.getaddrinfo,
) -> Listener:
    """Bind a server to an address. Raises ConfigError, with the system's reason, where it cannot be had."""
    path = address.socket_path
    if path is not None:
        _free_socket_file(path, address)
        with _masked(0o177 if transport.is_private else 0):
            _bind(server, address.text, address, None)
        return Listener(0, (path, path.lstat().st_ino))
    hosts = _available(address, resolve)
    if len(hosts) == 1:
        return Listener(_bind(server, address.text, address, transport.new_credentials))
    port = address.port
    for host in hosts:
        port = _bind(server, format_address(host, port), address, transport.new_credentials)
    return Listener(port)


@contextmanager
def _masked(bits: int) -> Iterator[None]:
    """Have a file begin without these permissions: taking them away later would be too late."""
    before = os.umask(bits)
    try:
        os.umask(before | bits)
        yield
    finally:
        os.umask(before)


def _bind(
    server: grpc.aio.Server,
    text: str,
    address: ListenAddress,
    new_credentials: Callable[[], grpc.ServerCredentials] | None,
) -> int:
    try:
        if new_credentials is None:
            return server.add_insecure_port(text)
        return server.add_secure_port(text, new_credentials())
    except RuntimeError as error:  # gRPC gives no reason; the address was free before
        raise ConfigError(address.port_key, f"cannot listen on {text}: another server was faster") from error


def _available(address: ListenAddress, resolve: Resolve) -> list[str]:
    """The numeric addresses of the host that this machine has; all of them are free."""
    hosts: list[str] = []
    absent: OSError | None = None
    try:
        found = resolve(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in dict.fromkeys(found):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    # As gRPC does: connections of an earlier server that linger do not hold the port.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(place)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
            else:
                hosts.append(place[0])
        if absent is not None and not hosts:
            raise absent
    except OSError as error:
        reason = f"cannot listen on {address.text}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            reason = f"{address.text} is in use: another server listens there"
        raise ConfigError(address.port_key, reason) from error
    return hosts


def _free_socket_file(path: Path, address: ListenAddress) -> None:
    """Remove the socket file of a server that is gone. Raises ConfigError where one listens, or none can."""
    key, reason = address.host_key, f"cannot listen on unix:{path}"
    try:
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(key, f"{reason}: the file is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
                raise ConfigError(key, f"unix:{path} is in use: another server listens there")
            except ConnectionRefusedError:
                path.unlink()
            except FileNotFoundError:
                pass
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.bind(str(path))
            path.unlink()
    except OSError as error:
        raise ConfigError(key, f"{reason}: {error.strerror or error}") from error
