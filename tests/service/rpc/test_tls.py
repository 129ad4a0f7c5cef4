"""Encrypted connections to a real server: whom it shows itself to, whom it trusts, and files that change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from support.certificates import (
    NOW,
    SERVER_NAMES,
    Issued,
    Key,
    TlsFiles,
    authority,
    issue,
    secure_channel,
    shown_certificate,
)
from support.fake_engine import PAUSE, FakeEngine, accepted, finished
from support.identities import FILE, MAIL, SEARCH, authenticator, bearer
from support.scripted import recording_logger
from support.serving import new_server, serving

from pageturner.service.auth.identities import parse_identities
from pageturner.service.auth.proof import Authenticator
from pageturner.service.errors import ConfigError
from pageturner.service.rpc.certificates import WARN_DAYS, Certificate, Certificates
from pageturner.service.rpc.options import ServerOptions, TlsOptions
from pageturner.v1 import admin_pb2
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.admin_pb2_grpc import AdminServiceStub
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

CA, OTHER_CA = authority(), authority("another authority")
SERVER, RENEWED = (issue(name, *SERVER_NAMES, by=CA) for name in ("server", "renewed"))
CLIENT = issue("client", "search.internal", "10.0.0.7", by=CA)
REQUEST = pb.GenerateRequest(prompt=pb.Prompt(text="hi"), sampling=pb.SamplingParams(max_tokens=2))


class Case:
    def __init__(self, folder: Path, client_ca: Issued | None = None, days: float = 0.0) -> None:
        self.files = TlsFiles(folder).write(SERVER, client_ca)
        self.logger, self.log = recording_logger()
        self.days = days
        self.refused: list[None] = []
        self.certificates = Certificates(
            self.files.options,
            self.logger,
            lambda: NOW.timestamp() + self.days * 86_400,
            lambda: self.refused.append(None),
        )

    @property
    def events(self) -> list[str]:
        return [entry["event"] for entry in self.log]

    def last(self, event: str) -> MutableMapping[str, Any]:
        return [entry for entry in self.log if entry["event"] == event][-1]


async def generate(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> str:
    async with channel:
        response = await GenerationServiceStub(channel).Generate(REQUEST, metadata=metadata, timeout=30)
    return response.choices[0].text


async def refusal(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(channel, metadata)
    return caught.value.code()


async def test_a_client_that_knows_the_authority_is_served_and_others_go_away(tmp_path: Path) -> None:
    """In plain text, or trusting another authority: refused, and the server goes on for the next."""
    case = Case(tmp_path)
    async with serving(FakeEngine(), certificates=case.certificates) as served:
        assert await generate(secure_channel(served.port, CA)) == "hi"
        assert await refusal(secure_channel(served.port, OTHER_CA)) is grpc.StatusCode.UNAVAILABLE
        plain = grpc.aio.insecure_channel(f"127.0.0.1:{served.port}")
        assert await refusal(plain) is grpc.StatusCode.UNAVAILABLE
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(30):
            assert b"200" not in await reader.read()
        writer.close()
        assert await generate(secure_channel(served.port, CA)) == "hi"
        assert [entry["code"] for entry in served.log.entries if entry["event"] == "rpc"] == ["OK", "OK"]


async def test_the_server_takes_clients_of_its_authority_alone(tmp_path: Path) -> None:
    case = Case(tmp_path, client_ca=CA)
    strangers = (
        None,
        issue("client", "search.internal", by=OTHER_CA),
        issue("client", "search.internal"),
        issue("client", "search.internal", by=CA, ends=-0.5),
        issue("client", "search.internal", by=CA, begins=1.0),
    )
    async with serving(FakeEngine(), certificates=case.certificates) as served:
        assert await generate(secure_channel(served.port, CA, CLIENT)) == "hi"
        for stranger in strangers:
            channel = secure_channel(served.port, CA, stranger)
            assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_is_an_identity_by_any_of_its_names(tmp_path: Path) -> None:
    case, engine = Case(tmp_path, client_ca=CA), FakeEngine()
    async with serving(engine, certificates=case.certificates, authenticator=authenticator()) as served:
        for client in (
            CLIENT,
            issue("search.internal", by=CA),
            issue("anything", "spiffe://cluster/mail", by=CA),
            issue("mail.internal", "spiffe://cluster/mail", by=CA),
        ):
            await generate(secure_channel(served.port, CA, client))
    assert [each.identity.tenant for each in engine.requests] == ["search", "search", "mail", "mail"]
    assert engine.requests[0].identity.credential == "certificate search.internal"
    assert engine.requests[0].tenant == "search"


async def test_a_trusted_certificate_of_no_tenant_needs_a_token(tmp_path: Path) -> None:
    case, engine = Case(tmp_path, client_ca=CA), FakeEngine()
    gateway = issue("gateway", by=CA)
    async with serving(engine, certificates=case.certificates, authenticator=authenticator()) as served:
        for client, metadata in (
            (gateway, ()),
            (CLIENT, bearer(MAIL)),  # of another tenant than the certificate
            (issue("search.internal", "mail.internal", by=CA), ()),
        ):
            channel = secure_channel(served.port, CA, client)
            assert await refusal(channel, metadata) is grpc.StatusCode.UNAUTHENTICATED
        await generate(secure_channel(served.port, CA, gateway), bearer(MAIL))
        await generate(secure_channel(served.port, CA, CLIENT), bearer(SEARCH))
        assert served.metrics.snapshot().callers_refused_total == {
            "unknown_certificate": 1, "two_tenants": 2,
        }  # fmt: skip
    assert [each.identity.credential for each in engine.requests] == ["token mail", "token search"]


async def test_an_admin_by_certificate_is_one_until_its_name_is_taken_out(tmp_path: Path) -> None:
    """Also in the middle of a stream that has no end by itself."""
    case, operator = Case(tmp_path, client_ca=CA), issue("operator", "ops.internal", by=CA)
    by_name = '[tenants.operators]\nadmin = true\ncertificates = ["ops.internal"]\n'
    in_force = [parse_identities(FILE.replace("[tenants.operators]\nadmin = true\n", by_name))]
    proving = Authenticator(lambda: in_force[0], NOW.timestamp)
    async with serving(
        FakeEngine(), certificates=case.certificates, authenticator=proving, min_watch_seconds=0.001
    ) as served:
        request = admin_pb2.WatchLoadRequest(interval_seconds=0.001)
        async with secure_channel(served.port, CA, CLIENT) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(AdminServiceStub(channel).WatchLoad(request).__aiter__())
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        async with secure_channel(served.port, CA, operator) as channel:
            watch = AdminServiceStub(channel).WatchLoad(request).__aiter__()
            await anext(watch)
            in_force[0] = parse_identities(FILE)

            async def follow() -> None:
                async for _ in watch:
                    pass

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(follow(), 30)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_new_connections_see_a_new_certificate_and_standing_ones_go_on(tmp_path: Path) -> None:
    """At every address: gRPC asks for each apart whether there is another."""
    case = Case(tmp_path)
    engine = FakeEngine(lambda request, ids: [accepted(request, ids), PAUSE, finished(request, 1, 0)])
    async with serving(engine, certificates=case.certificates, admin_port=0) as served:
        ports = (served.port, served.admin_port)
        shown = [await asyncio.to_thread(shown_certificate, port) for port in ports]
        assert shown == [SERVER.fingerprint] * 2
        async with secure_channel(served.port, CA) as channel:
            request = pb.GenerateStreamRequest(prompt=pb.Prompt(text="x"), request_id="r")
            stream: AsyncIterator[pb.GenerateStreamResponse] = (
                GenerationServiceStub(channel).GenerateStream(request).__aiter__()
            )
            await anext(stream)
            case.files.write(RENEWED)
            await case.certificates.poll()
            for _ in range(2):
                shown = [await asyncio.to_thread(shown_certificate, port) for port in ports]
                assert shown == [RENEWED.fingerprint] * 2
            await engine.reached("paused r")
            engine.resume("r")
            assert [message.WhichOneof("event") async for message in stream] == ["finished"]
    assert case.last("certificate_reloaded")["sha256"] == RENEWED.fingerprint


async def test_a_connection_of_some_age_is_made_anew_and_its_stream_goes_on(tmp_path: Path) -> None:
    """So a client that the new authority does not know is out within that time, without losing an answer."""
    case = Case(tmp_path, client_ca=CA)
    engine = FakeEngine(lambda request, ids: [accepted(request, ids), PAUSE, finished(request, 1, 0)])
    async with (
        serving(engine, certificates=case.certificates, max_connection_age_seconds=0.2) as served,
        secure_channel(served.port, CA, CLIENT) as channel,
    ):
        stub = GenerationServiceStub(channel)
        request = pb.GenerateStreamRequest(prompt=pb.Prompt(text="x"), request_id="r")
        stream = stub.GenerateStream(request).__aiter__()
        await anext(stream)
        case.files.write(SERVER, client_ca=OTHER_CA)
        await case.certificates.poll()

        async def ask_until_refused() -> grpc.StatusCode:
            while True:
                try:
                    await stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="x")), timeout=30)
                except grpc.aio.AioRpcError as error:
                    return error.code()

        assert await asyncio.wait_for(ask_until_refused(), 30) is grpc.StatusCode.UNAVAILABLE
        await engine.reached("paused r")
        engine.resume("r")
        assert [message.WhichOneof("event") async for message in stream] == ["finished"]


async def test_another_authority_of_clients_comes_into_force(tmp_path: Path) -> None:
    case = Case(tmp_path, client_ca=CA)
    newcomer = issue("newcomer", by=OTHER_CA)
    async with serving(FakeEngine(), certificates=case.certificates) as served:
        assert await refusal(secure_channel(served.port, CA, newcomer)) is grpc.StatusCode.UNAVAILABLE
        case.files.write(SERVER, client_ca=OTHER_CA)
        await case.certificates.poll()
        assert await generate(secure_channel(served.port, CA, newcomer)) == "hi"
        assert await refusal(secure_channel(served.port, CA, CLIENT)) is grpc.StatusCode.UNAVAILABLE


async def test_a_socket_file_is_not_encrypted(tmp_path: Path) -> None:
    """Who may open it is the file system's to say, and nobody listens in on it."""
    certificates, target = Case(tmp_path).certificates, f"unix:{tmp_path}/s"
    server = new_server(ServerOptions(host=target), FakeEngine(), certificates=certificates)
    await server.start()
    try:
        assert await generate(grpc.aio.insecure_channel(target)) == "hi"
    finally:
        await server.stop()


async def test_a_server_that_shares_one_fetcher_among_addresses_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: the first address that asks takes the news away from the others."""
    given: list[Certificate] = []

    def shared(certificates: Certificates) -> grpc.ServerCredentials:
        def fetch() -> grpc.ServerCertificateConfiguration | None:
            if certificates.current in given:
                return None
            given.append(certificates.current)
            return certificates.current.configuration

        given.append(certificates.current)
        configuration = certificates.current.configuration
        return grpc.dynamic_ssl_server_credentials(configuration, fetch)  # type: ignore[arg-type] # as the real one

    monkeypatch.setattr(Certificates, "server_credentials", shared)
    with pytest.raises(AssertionError):
        await test_new_connections_see_a_new_certificate_and_standing_ones_go_on(tmp_path)


FAULTS = {
    "no certificate": ("server.pem", b"no PEM", "tls.certificate", "holds no certificates"),
    "an empty file": ("server.pem", b"", "tls.certificate", "holds no certificates"),
    "no key": ("server.key", SERVER.pem, "tls.key", "holds no private key"),
    "another's key": ("server.key", RENEWED.key_pem(), "tls.key", "is not the key of the first certificate"),
    "an encrypted key": ("server.key", SERVER.key_pem(b"secret"), "tls.key", "is encrypted"),
    "no authority": ("client-ca.pem", b"x", "tls.client_ca", "holds no certificates"),
    "an expired one": (
        "server.pem",
        issue("old", by=CA, ends=-0.5).pem,
        "tls.certificate",
        "CN=old has expired, on ",
    ),
    "one of tomorrow": (
        "server.pem",
        issue("new", by=CA, begins=1.0).pem,
        "tls.certificate",
        "CN=new is not valid before",
    ),
    "an expired chain": (
        "server.pem",
        SERVER.pem + issue("between", by=CA, ends=-0.5).pem,
        "tls.certificate",
        "CN=between has expired",
    ),
}


@pytest.mark.parametrize(("name", "content", "option", "reason"), FAULTS.values(), ids=FAULTS)
async def test_files_with_a_fault_end_a_start_and_are_kept_out_of_a_running_server(
    tmp_path: Path, name: str, content: bytes, option: str, reason: str
) -> None:
    case = Case(tmp_path, client_ca=CA)
    before = case.certificates.current
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Certificates(case.files.options, case.logger, NOW.timestamp)
    assert caught.value.key == option
    assert reason in caught.value.reason
    assert name in caught.value.reason
    await case.certificates.poll()
    await case.certificates.poll()
    assert case.certificates.current is before
    assert case.events == ["certificate", "certificate_refused"], "said once"
    assert len(case.refused) == 1
    assert reason in case.last("certificate_refused")["reason"]
    case.files.write(RENEWED, client_ca=CA)
    await case.certificates.poll()
    assert case.certificates.current.fingerprint == RENEWED.fingerprint


async def test_a_certificate_and_a_key_that_come_one_after_the_other_come_into_force(tmp_path: Path) -> None:
    case = Case(tmp_path)
    (tmp_path / "server.pem").write_bytes(RENEWED.pem)
    await case.certificates.poll()
    assert case.events == ["certificate", "certificate_refused"]
    (tmp_path / "server.key").write_bytes(RENEWED.key_pem())
    await case.certificates.poll()
    assert case.events[2:] == ["certificate_reloaded"]


async def test_an_end_that_is_near_is_warned_of_once_a_day(tmp_path: Path) -> None:
    case = Case(tmp_path)
    assert case.last("certificate")["ends"] == SERVER.certificate.not_valid_after_utc.isoformat()
    await case.certificates.poll()
    assert case.events == ["certificate"]
    case.days = 365.5 - WARN_DAYS
    for _ in range(3):
        await case.certificates.poll()
    assert case.events == ["certificate", "certificate_ends"]
    assert 20 < case.last("certificate_ends")["days"] < 21
    case.days += 1
    await case.certificates.poll()
    assert case.events.count("certificate_ends") == 2
    assert Case(tmp_path, days=364.0).events == ["certificate", "certificate_ends"], "at a start, too"


def test_a_key_that_everybody_may_read_is_warned_about(tmp_path: Path) -> None:
    case = Case(tmp_path)
    (tmp_path / "server.key").chmod(0o644)
    Certificates(case.files.options, case.logger, NOW.timestamp)
    assert case.events == ["certificate", "certificate", "key_readable"]


KEYS: tuple[tuple[Key, str, bool], ...] = (
    (ec.generate_private_key(ec.SECP256R1()), "secp256r1", True),
    (ec.generate_private_key(ec.SECP384R1()), "secp384r1", True),
    (rsa.generate_private_key(65537, 2048), "RSA", True),
    (ec.generate_private_key(ec.SECP521R1()), "secp521r1", False),
    (ed25519.Ed25519PrivateKey.generate(), "Ed25519", False),
)


@pytest.mark.parametrize(("key", "kind", "is_common"), KEYS, ids=[kind for _, kind, _ in KEYS])
async def test_a_key_that_some_clients_cannot_verify_is_warned_about(
    key: Key, kind: str, is_common: bool, tmp_path: Path
) -> None:
    """What is told of gRPC's own client is seen to be so."""
    case = Case(tmp_path)
    case.files.write(issue("server", *SERVER_NAMES, by=CA, key=key))
    await case.certificates.poll()
    assert ("certificate_uncommon" in case.events) == (not is_common)
    assert case.certificates.current.kind == kind
    async with serving(FakeEngine(), certificates=case.certificates) as served:
        channel = secure_channel(served.port, CA)
        if is_common:
            assert await generate(channel) == "hi"
        else:
            assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE


def test_a_missing_file_is_named_with_its_option(tmp_path: Path) -> None:
    case = Case(tmp_path)
    (tmp_path / "server.key").unlink()
    with pytest.raises(ConfigError, match=r"tls\.key: .*server\.key cannot be read: No such file"):
        Certificates(case.files.options, case.logger, NOW.timestamp)


@pytest.mark.parametrize(
    ("options", "key", "reason"),
    [
        ({"certificate": Path("c")}, "tls.certificate", "needs tls.key too"),
        ({"key": Path("k")}, "tls.key", "needs tls.certificate too"),
        ({"client_ca": Path("a")}, "tls.client_ca", "needs tls.certificate too"),
        (
            {"certificate": Path("c"), "key": Path("k"), "require_client_certificate": True},
            "tls.require_client_certificate",
            "needs tls.client_ca",
        ),
        (
            {
                "certificate": Path("c"),
                "key": Path("k"),
                "client_ca": Path("a"),
                "require_client_certificate": False,
            },
            "tls.require_client_certificate",
            "gRPC cannot ask for a certificate and do without",
        ),
    ],
)
def test_options_that_make_no_sense_together_are_refused(
    options: dict[str, Any], key: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        TlsOptions(**options)
    assert caught.value.key == key
