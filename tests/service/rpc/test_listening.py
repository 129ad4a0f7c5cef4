"""The server listens on all addresses of its host's name, or on a socket file."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.fake_engine import FakeEngine
from support.serving import new_server

from pageturner.service.client import Client
from pageturner.service.errors import ConfigError
from pageturner.service.rpc.listening import Transport, listen
from pageturner.service.rpc.options import ListenAddress, ServerOptions, socket_path

BOTH = ("127.0.0.1", "::1")


def resolve_both(host: str, port: int, **_flags: Any) -> list[tuple[Any, ...]]:
    """`localhost` as most machines have it."""
    assert host == "localhost"
    stream = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    return [
        (socket.AF_INET, *stream, ("127.0.0.1", port)),
        (socket.AF_INET6, *stream, ("::1", port, 0, 0)),
        (socket.AF_INET, *stream, ("127.0.0.1", port)),
    ]


def address(host: str, port: int) -> ListenAddress:
    return ServerOptions(host=host, port=port).public_address


@asynccontextmanager
async def bare_server() -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server(options=ServerOptions().channel_arguments())
    try:
        yield server
    finally:
        await server.stop(0)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="the machine has no ::1")


@needs_ipv6
@pytest.mark.fault("37")
@pytest.mark.parametrize("taken", BOTH)
async def test_a_name_with_one_address_taken_is_refused(taken: str) -> None:
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    with socket.create_server((taken, 0), family=family) as other:
        port = other.getsockname()[1]
        async with bare_server() as server:
            with pytest.raises(ConfigError, match=f"localhost:{port} is in use"):
                listen(server, address("localhost", port), Transport(), resolve_both)


@needs_ipv6
@pytest.mark.fault("37")
async def test_every_address_of_a_name_is_listened_on() -> None:
    async with bare_server() as server:
        listener = listen(server, address("localhost", 0), Transport(), resolve_both)
        await server.start()
        for host in BOTH:
            socket.create_connection((host, listener.port), timeout=30).close()


@pytest.mark.fault("37")
async def test_an_address_that_the_machine_lacks_is_left_out_of_several() -> None:
    """As ::1 in /etc/hosts of a container without IPv6."""

    def resolve(host: str, port: int, **_flags: Any) -> list[tuple[Any, ...]]:
        stream = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*stream, ("192.0.2.1", port)), (*stream, ("127.0.0.1", port))]

    async with bare_server() as server:
        listener = listen(server, address("127.0.0.1", 0), Transport(), resolve)
        await server.start()
        socket.create_connection(("127.0.0.1", listener.port), timeout=30).close()


@asynccontextmanager
async def served_on(host: str) -> AsyncIterator[Client]:
    """A client of a server on the socket file that `host` names."""
    server = new_server(ServerOptions(host=host), FakeEngine())
    assert await server.start() == 0
    try:
        async with Client(f"unix:{socket_path(host)}") as client:
            yield client
    finally:
        await server.stop()


@pytest.mark.fault("36")
@pytest.mark.parametrize("form", ["unix:{}", "unix://{}"])
async def test_a_socket_file_is_listened_on_and_removed(form: str, tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "pt.sock"
    path.parent.mkdir()
    async with served_on(form.format(path)) as client:
        assert (await client.generate("ok", max_tokens=2)).text == "ok"
    assert not path.exists()


@pytest.mark.fault("36")
async def test_a_socket_file_left_by_a_server_that_is_gone_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pt.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.is_socket()
    async with served_on(f"unix:{path}") as client:
        assert (await client.generate("ok", max_tokens=2)).text == "ok"


@pytest.mark.fault("36")
async def test_a_socket_file_of_a_running_server_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pt.sock"
    async with served_on(f"unix:{path}") as client:
        with pytest.raises(ConfigError, match="in use: another server listens there"):
            await new_server(ServerOptions(host=f"unix:{path}")).start()
        assert (await client.generate("ok", max_tokens=2)).text == "ok", "the first is unharmed"


@pytest.mark.fault("36")
@pytest.mark.parametrize(
    ("name", "reason"),
    [("text", "the file is no socket"), ("gone/pt.sock", "No such file"), ("x" * 120, "too long")],
)
async def test_a_path_that_cannot_be_a_socket_says_why(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("kept")
    with pytest.raises(ConfigError, match=reason) as caught:
        await new_server(ServerOptions(host=f"unix:{tmp_path / name}")).start()
    assert caught.value.key == "server.host"
    assert (tmp_path / "text").read_text() == "kept"


@pytest.mark.fault("36")
async def test_a_socket_file_that_another_server_put_there_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "pt.sock"
    async with bare_server() as server:
        listener = listen(server, address(f"unix:{path}", 0))
        os.rename(path, tmp_path / "old")
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            listener.remove_socket_file()
            assert path.exists()


def test_a_socket_file_is_its_own_address() -> None:
    assert ServerOptions(host="unix:pt.sock", port=5).public_address.text == "unix:pt.sock"
    with pytest.raises(ConfigError, match=r"server\.host"):
        ServerOptions(host="unix:")
