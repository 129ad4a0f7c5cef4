"""AdminService on a listener of its own, the switches of what is served, and who is trusted where."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2
from support.certificates import SERVER_NAMES, TlsFiles, authority, issue, secure_channel
from support.fake_engine import FakeEngine
from support.identities import OPERATOR, SEARCH, authenticator, bearer
from support.serving import capturing_logger, new_server, serving

from pageturner.service.client import Client, UnknownStatus
from pageturner.service.errors import ConfigError
from pageturner.service.rpc.certificates import Certificates
from pageturner.service.rpc.options import ServerOptions
from pageturner.v1 import admin_pb2
from pageturner.v1.admin_pb2_grpc import AdminServiceStub

ADMIN = "/pageturner.v1.AdminService/GetLoad"
PUBLIC = "/pageturner.v1.ModelService/ListModels"
CHANNELZ = "/grpc.channelz.v1.Channelz/GetServers"
NO_SOCKET = "/grpc.channelz.v1.Channelz/GetSocket"
"""Without an id: NOT_FOUND where it is served, whatever the other servers of this process do meanwhile."""

REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/Check"
OK, UNIMPLEMENTED = grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


async def code_of(
    channel: grpc.aio.Channel, method: str, metadata: tuple[tuple[str, str], ...] = ()
) -> grpc.StatusCode:
    """What a call ends with that sends a message of no bytes."""
    open_call: Any = channel.unary_stream(method)
    try:
        async for _ in open_call(b"", metadata=metadata, timeout=30):
            pass
    except grpc.aio.AioRpcError as error:
        print(method, error.code(), error.details())  # pytest shows it of a test that fails
        return error.code()
    return OK


async def codes_at(target: str, metadata: tuple[tuple[str, str], ...] = ()) -> dict[str, grpc.StatusCode]:
    async with grpc.aio.insecure_channel(target) as channel:
        methods = {
            "admin": ADMIN,
            "public": PUBLIC,
            "channelz": NO_SOCKET,
            "reflection": REFLECTION,
            "health": HEALTH,
        }
        codes = {name: await code_of(channel, path, metadata) for name, path in methods.items()}
    if codes["channelz"] is grpc.StatusCode.NOT_FOUND:
        codes["channelz"] = OK
    return codes


def test_the_admin_listener_is_off_until_its_host_or_port_is_given() -> None:
    assert ServerOptions().admin_address is None
    by_port = ServerOptions(admin_port=7).admin_address
    by_host = ServerOptions(admin_host="0.0.0.0").admin_address
    assert by_port is not None
    assert by_host is not None
    assert (by_port.text, by_host.text) == ("127.0.0.1:7", "0.0.0.0:50052")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"admin_port": 65536}, "server.admin_port"),
        ({"admin_host": ""}, "server.admin_host"),
        ({"admin_host": "unix:"}, "server.admin_host"),
        ({"port": 7, "admin_port": 7}, "server.admin_host"),
        ({"host": "unix:a", "admin_host": "unix:a"}, "server.admin_host"),
    ],
)
def test_an_admin_address_that_cannot_be_is_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerOptions(**options)
    assert caught.value.key == key


async def test_all_is_on_one_port_by_default_but_channelz() -> None:
    async with serving(FakeEngine()) as served:
        assert await codes_at(f"127.0.0.1:{served.port}") == {
            "admin": OK, "public": OK, "channelz": UNIMPLEMENTED, "reflection": OK, "health": OK,
        }  # fmt: skip


async def test_with_a_listener_of_its_own_admin_is_served_there_alone() -> None:
    async with serving(FakeEngine(), admin_port=0, enable_channelz=True) as served:
        assert await codes_at(f"127.0.0.1:{served.port}") == {
            "admin": UNIMPLEMENTED, "public": OK, "channelz": UNIMPLEMENTED, "reflection": UNIMPLEMENTED,
            "health": OK,
        }  # fmt: skip
        assert await codes_at(f"127.0.0.1:{served.admin_port}") == {
            "admin": OK, "public": UNIMPLEMENTED, "channelz": OK, "reflection": OK, "health": OK,
        }  # fmt: skip
        listening = [entry["port"] for entry in served.log.entries if entry["event"] == "listening"]
        assert listening == [served.port, served.admin_port]


async def test_a_client_of_the_public_port_is_told_of_the_other_listener() -> None:
    async with serving(FakeEngine(), admin_port=0) as served:
        with pytest.raises(UnknownStatus, match=r"UNIMPLEMENTED.*listener of its own \(server\.admin_host\)"):
            await served.client.load()
        with pytest.raises(UnknownStatus, match=r"listener of its own"):
            _ = [load async for load in served.client.watch_load(1.0)]
        async with Client(f"127.0.0.1:{served.admin_port}") as admin:
            assert (await admin.load()).num_running == 0
            with pytest.raises(UnknownStatus) as caught:
                await admin.models()
            assert "listener" not in str(caught.value)


@pytest.mark.parametrize("switch", ["admin", "reflection", "channelz"])
@pytest.mark.parametrize("is_apart", [False, True], ids=["one port", "two ports"])
async def test_each_switch_takes_one_service_away(switch: str, is_apart: bool) -> None:
    options: dict[str, Any] = {"enable_channelz": switch != "channelz", f"enable_{switch}": False}
    options |= {"admin_port": 0} if is_apart else {}
    async with serving(FakeEngine(), **options) as served:
        codes = await codes_at(f"127.0.0.1:{served.admin_port or served.port}")
        for name in ("admin", "reflection", "channelz"):
            assert codes[name] is (UNIMPLEMENTED if name == switch else OK)


async def test_with_authentication_admin_wants_an_admin_wherever_it_is() -> None:
    for options in ({}, {"admin_port": 0}):
        all_options: dict[str, Any] = {"enable_channelz": True, **options}
        async with serving(FakeEngine(), authenticator=authenticator(), **all_options) as served:
            target = f"127.0.0.1:{served.admin_port or served.port}"
            for metadata, expected in (
                ((), {"admin": UNAUTHENTICATED, "channelz": UNAUTHENTICATED, "reflection": UNAUTHENTICATED}),
                (bearer(SEARCH), {"admin": DENIED, "channelz": DENIED, "reflection": OK}),
                (bearer(OPERATOR), {"admin": OK, "channelz": OK, "reflection": OK}),
            ):
                codes = await codes_at(target, metadata)
                assert {name: codes[name] for name in expected} == expected
                assert codes["health"] is OK


@contextmanager
def other_umask(bits: int) -> Iterator[None]:
    before = os.umask(bits)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_a_private_socket_file_is_the_credential_of_an_admin(tmp_path: Path, umask: int) -> None:
    """From its first moment nobody else may open it, whatever the umask, which is as before then."""
    path, engine = tmp_path / "admin", FakeEngine()
    with other_umask(umask):
        async with serving(engine, authenticator=authenticator(), admin_host=f"unix:{path}") as served:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            (tmp_path / "later").touch()
            assert stat.S_IMODE((tmp_path / "later").stat().st_mode) == 0o666 & ~umask
            assert (await codes_at(f"unix:{path}"))["admin"] is OK
            assert (await codes_at(f"127.0.0.1:{served.port}"))["public"] is UNAUTHENTICATED
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                request = admin_pb2.SetPoliciesRequest(
                    policies={"queue": admin_pb2.PolicyChoice(name="priority")}
                )
                await AdminServiceStub(channel).SetPolicies(request)
    assert engine.policy_changes[0].origin.endswith(", socket file")
    assert not path.exists(), "removed at the end"


async def test_a_public_socket_file_asks_for_credentials_and_keeps_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "public"
    with other_umask(0o022):
        server = new_server(ServerOptions(host=f"unix:{path}"), FakeEngine(), authenticator=authenticator())
        await server.start()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
        codes = await codes_at(f"unix:{path}")
        assert (codes["public"], codes["admin"]) == (UNAUTHENTICATED, UNAUTHENTICATED)
    finally:
        await server.stop()


async def test_an_admin_address_that_is_taken_ends_the_start_and_frees_the_other() -> None:
    async with serving(FakeEngine()) as served:
        for options, key in (
            (ServerOptions(port=0, admin_port=served.port), "server.admin_port"),
            (ServerOptions(port=served.port, admin_port=0), "server.port"),
        ):
            server = new_server(options)
            with pytest.raises(ConfigError) as caught:
                await server.start()
            assert caught.value.key == key
            await server.stop()


@pytest.mark.parametrize(
    ("options", "with_tokens", "tls", "warned"),
    [
        ({}, False, "", None),
        ({"admin_port": 0}, False, "", None),
        ({"host": "localhost"}, False, "", None),
        ({"host": "0.0.0.0"}, False, "", "no_authentication"),
        ({"admin_host": "0.0.0.0", "admin_port": 0}, False, "", "no_authentication"),
        ({"host": "0.0.0.0"}, False, "on", "no_authentication"),
        ({"host": "0.0.0.0"}, False, "of clients too", None),
        ({"host": "0.0.0.0"}, True, "", "no_encryption"),
        ({"host": "0.0.0.0"}, True, "on", None),
    ],
)
async def test_an_open_door_to_other_machines_is_warned_of_at_the_start(
    options: dict[str, Any], with_tokens: bool, tls: str, warned: str | None, tmp_path: Path
) -> None:
    logger, capture = capturing_logger()
    ca = authority()
    client_ca = ca if tls == "of clients too" else None
    files = TlsFiles(tmp_path).write(issue("server", *SERVER_NAMES, by=ca), client_ca)
    server = new_server(
        ServerOptions(**{"port": 0, **options}),
        logger=logger,
        authenticator=authenticator() if with_tokens else None,
        certificates=Certificates(files.options, capturing_logger()[0], time.time) if tls else None,
    )
    await server.start()
    await server.stop()
    warnings = [entry for entry in capture.entries if entry["log_level"] == "warning"]
    assert [entry["event"] for entry in warnings] == ([] if warned is None else [warned])


async def test_the_admin_listener_is_encrypted_as_the_public_one_is(tmp_path: Path) -> None:
    ca = authority()
    files = TlsFiles(tmp_path).write(issue("server", *SERVER_NAMES, by=ca))
    certificates = Certificates(files.options, capturing_logger()[0], time.time)
    async with serving(FakeEngine(), certificates=certificates, admin_port=0) as served:
        async with secure_channel(served.admin_port, ca) as channel:
            assert await code_of(channel, ADMIN) is OK
        async with grpc.aio.insecure_channel(f"127.0.0.1:{served.admin_port}") as plain:
            assert await code_of(plain, ADMIN) is grpc.StatusCode.UNAVAILABLE


async def test_channelz_tells_of_servers_and_refuses_what_it_does_not_know() -> None:
    async with serving(FakeEngine(), enable_channelz=True) as served:
        ask: Any = served.channel.unary_unary(
            CHANNELZ, response_deserializer=channelz_pb2.GetServersResponse.FromString
        )
        response = await ask(b"")
        assert len(response.server) >= 1
        socket: Any = served.channel.unary_unary("/grpc.channelz.v1.Channelz/GetSocket")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await socket(channelz_pb2.GetSocketRequest(socket_id=1 << 40).SerializeToString())
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_both_listeners_end_with_the_server() -> None:
    engine = FakeEngine()
    server = new_server(ServerOptions(port=0, admin_port=0), engine)
    port = await server.start()
    admin_port = server.admin_port
    await server.stop()
    await server.wait_for_termination()
    for each in (port, admin_port):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{each}") as channel:
            assert await code_of(channel, HEALTH) is grpc.StatusCode.UNAVAILABLE
