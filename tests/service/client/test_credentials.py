"""Both clients with a token and certificates, over real encrypted connections, and the flags that say so."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.certificates import SERVER_NAMES, TlsFiles, authority, issue
from support.fake_engine import FakeEngine
from support.identities import MAIL, OPERATOR, SEARCH, SEARCH_OLD, STRANGER, authenticator, bearer
from support.serving import capturing_logger, serving

from pageturner.service.cli import CALLS, COMMANDS, main
from pageturner.service.client import NEVER, Client, Credentials, SyncClient, TokenEvent, UnknownStatus
from pageturner.service.client.credentials import DEADLINE_KEY, CredentialOptions, call_metadata
from pageturner.service.client.server_process import PROGRAM
from pageturner.service.commands import signals
from pageturner.service.commands.credentials import add_credential_flags, credentials_of
from pageturner.service.commands.parser import Parser
from pageturner.service.errors import (
    DeadlineExceeded,
    InvalidArgument,
    PageturnerError,
    PermissionDenied,
    Unauthenticated,
)
from pageturner.service.rpc.certificates import Certificates

CA = authority()
CLIENT = issue("client", "search.internal", by=CA)


@dataclass(frozen=True, slots=True)
class Secured:
    target: str
    ca: Path
    certificate: Path
    key: Path
    engine: FakeEngine


@asynccontextmanager
async def secured(folder: Path, *, mutual: bool = False) -> AsyncIterator[Secured]:
    """A server that wants TLS and an identity, and the files of a client."""
    files = TlsFiles(folder).write(issue("server", *SERVER_NAMES, by=CA), CA if mutual else None)
    certificates = Certificates(files.options, capturing_logger()[0], time.time)
    ca, certificate, key = (folder / name for name in ("ca.pem", "client.pem", "client.key"))
    ca.write_bytes(CA.pem)
    certificate.write_bytes(CLIENT.pem)
    key.write_bytes(CLIENT.key_pem())
    engine = FakeEngine()
    async with serving(engine, certificates=certificates, authenticator=authenticator()) as served:
        yield Secured(f"localhost:{served.port}", ca, certificate, key, engine)


async def test_a_client_with_a_token_is_served_by_every_kind_of_call(tmp_path: Path) -> None:
    async with secured(tmp_path) as server:
        async with Client(server.target, token=SEARCH.text, tls_ca=server.ca) as client:
            await client.wait_until_serving(30)
            assert (await client.generate("ok", max_tokens=2)).text == "ok"
            events = [event async for event in client.stream("ok", max_tokens=2)]
            assert "".join(event.text for event in events if isinstance(event, TokenEvent)) == "ok"
            with pytest.raises(PermissionDenied, match="is for admin identities"):
                await client.load()
            with pytest.raises(PermissionDenied, match="tenant"):
                await client.generate("x", tenant="mail")
        credentials = Credentials(token=OPERATOR.text, tls_ca=str(server.ca))
        async with Client(server.target, credentials=credentials) as admin:
            assert (await admin.load()).num_running == 0
    assert {each.identity.credential for each in server.engine.requests} == {"token search"}


async def test_the_client_for_threads_does_the_same(tmp_path: Path) -> None:
    async with secured(tmp_path) as server:

        def ask() -> None:
            with SyncClient(server.target, token=SEARCH.text, tls_ca=server.ca) as client:
                client.wait_until_serving(30)
                assert client.generate("ok", max_tokens=2).text == "ok"
                assert len(list(client.stream("ok", max_tokens=2))) == 5
                with pytest.raises(PermissionDenied):
                    client.load()
            with SyncClient(server.target, tls_ca=server.ca) as stranger, pytest.raises(Unauthenticated):
                stranger.generate("x")

        await asyncio.to_thread(ask)


async def test_a_token_file_is_read_for_each_call(tmp_path: Path) -> None:
    """So a token that is about to expire is replaced under a client that lives on."""
    path = tmp_path / "token"
    path.write_text(SEARCH_OLD.text)
    async with (
        secured(tmp_path) as server,
        Client(server.target, token_file=path, tls_ca=server.ca) as client,
    ):
        with pytest.raises(Unauthenticated):
            await client.generate("x")
        path.write_text(f"{SEARCH.text}\n")
        await client.generate("x")
        assert [event async for event in client.stream("x", max_tokens=1)]
        path.unlink()
        with pytest.raises(InvalidArgument, match=r"token_file: .*token cannot be read"):
            await client.generate("x")

        def ask() -> None:
            path.write_text(MAIL.text)
            with SyncClient(server.target, token_file=str(path), tls_ca=server.ca) as blocking:
                blocking.generate("x")

        await asyncio.to_thread(ask)
    assert [each.identity.tenant for each in server.engine.requests] == ["search", "search", "mail"]


async def test_a_certificate_takes_the_place_of_a_token(tmp_path: Path) -> None:
    async with secured(tmp_path, mutual=True) as server:
        options: CredentialOptions = {
            "tls_ca": server.ca,
            "client_certificate": server.certificate,
            "client_key": server.key,
        }
        async with Client(server.target, **options) as client:
            await client.generate("x")
        with_token: CredentialOptions = {**options, "token": MAIL.text}
        async with Client(server.target, **with_token) as client:
            with pytest.raises(Unauthenticated):
                await client.generate("x")
    assert [each.identity.tenant for each in server.engine.requests] == ["search"]


async def test_what_is_wrong_with_a_connection_or_a_token_is_an_error_of_the_client(tmp_path: Path) -> None:
    async with secured(tmp_path) as server:
        for options, kind in (
            ({"tls_ca": server.ca}, Unauthenticated),
            ({"tls_ca": server.ca, "token": STRANGER.text}, Unauthenticated),
            ({"token": SEARCH.text}, UnknownStatus),  # in plain text, to an encrypted port
            ({"token": SEARCH.text, "tls": True}, UnknownStatus),  # no public authority has signed it
        ):
            all_options: Any = options
            async with Client(server.target, retry=NEVER, **all_options) as client:
                with pytest.raises(PageturnerError) as caught:
                    await client.generate("x")
            assert type(caught.value) is kind
            assert SEARCH.text not in str(caught.value)


async def test_a_wait_for_a_server_that_ends_in_vain_says_why(tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(authority("another").pem)
    async with secured(tmp_path) as server:
        cases: tuple[tuple[CredentialOptions, str], ...] = (
            ({}, r"UNAVAILABLE: .*[Cc]losed \(it may want an encrypted connection"),
            ({"tls_ca": other}, "UNAVAILABLE: .*CERTIFICATE_VERIFY_FAILED"),
        )
        target = server.target.replace("localhost", "127.0.0.1")  # of two addresses, gRPC tells of the last
        for options, reason in cases:
            ended = f"was ready within 0.3 s: {reason}"
            async with Client(target, **options) as client:
                with pytest.raises(DeadlineExceeded, match=ended):
                    await client.wait_until_serving(0.3)
            with SyncClient(target, **options) as blocking, pytest.raises(DeadlineExceeded, match=ended):
                await asyncio.to_thread(blocking.wait_until_serving, 0.3)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"token": "a b"}, "token"),
        ({"token": "é"}, "token"),
        ({"token": "a\n"}, "token"),
        ({"token": b"bytes"}, "token"),
        ({"token": "a", "token_file": "f"}, "token_file"),
        ({"client_certificate": "c.pem"}, "client_certificate"),
        ({"client_key": "c.key"}, "client_key"),
    ],
)
@pytest.mark.parametrize("client", [Client, SyncClient])
def test_credentials_that_make_no_sense_are_refused_by_their_name(
    client: Any, options: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client("localhost:1", **options)
    assert caught.value.field == field
    assert "a b" not in str(caught.value)
    with pytest.raises(InvalidArgument, match="beside credentials"):
        client("localhost:1", credentials=Credentials(), token="x")


async def test_an_encrypted_call_to_a_server_in_plain_text_says_so(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(authority().pem)
    async with (
        serving(FakeEngine()) as served,
        Client(f"127.0.0.1:{served.port}", tls_ca=tmp_path / "ca.pem", retry=NEVER) as client,
    ):
        with pytest.raises(UnknownStatus, match="it is not encrypted"):
            await client.generate("x")


async def test_a_file_of_another_kind_is_named_at_the_first_call(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text("-----BEGIN PRIVATE KEY-----\n", encoding="ascii")
    async with Client("localhost:1", tls_ca=key) as client:
        with pytest.raises(InvalidArgument, match=r"tls_ca: .*key\.pem holds no certificate in PEM form"):
            await client.generate("x")
    with (
        SyncClient("localhost:1", client_certificate=key, client_key=key) as blocking,
        pytest.raises(InvalidArgument, match=r"client_certificate: .* holds no certificate"),
    ):
        blocking.generate("x")


async def test_a_file_that_is_not_there_is_named_at_the_first_call(tmp_path: Path) -> None:
    async with Client("localhost:1", tls_ca=tmp_path / "nosuch.pem") as client:
        with pytest.raises(InvalidArgument, match=r"tls_ca: .*nosuch.pem cannot be read: No such file"):
            await client.load()


def test_the_token_is_not_in_the_representation() -> None:
    assert SEARCH.text not in repr(Credentials(token=SEARCH.text))


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_credential_flags(parser)
    return parser.parse_args(words)


def test_flags_become_credentials_and_the_environment_names_a_token_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGETURNER_TOKEN_FILE", raising=False)
    (tmp_path / "token").write_text(f"{SEARCH.text}\n")
    (tmp_path / "other").write_text(MAIL.text)
    assert credentials_of(flags()) == Credentials()
    by_flag = credentials_of(flags(f"--token-file={tmp_path}/token"))
    assert by_flag.metadata() == bearer(SEARCH)
    monkeypatch.setenv("PAGETURNER_TOKEN_FILE", f"{tmp_path}/other")
    by_environment = credentials_of(flags("--tls"))
    assert by_environment.metadata() == bearer(MAIL)
    assert by_environment.is_encrypted
    assert credentials_of(flags(f"--token-file={tmp_path}/token")) == by_flag, "a flag goes over it"
    monkeypatch.setenv("PAGETURNER_TOKEN_FILE", f"{tmp_path}/nosuch")
    with pytest.raises(InvalidArgument, match=r"token_file: .*nosuch cannot be read"):
        credentials_of(flags())
    (tmp_path / "other").write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="holds no token"):
        credentials_of(flags(f"--token-file={tmp_path}/other"))


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"demo", "peers", "bench"}))
def test_every_command_that_takes_a_target_takes_credentials(command: str) -> None:
    """Whatever command is added."""
    parser = Parser(prog=command)
    importlib.import_module(COMMANDS[command]).add_arguments(parser)
    flags = set(parser._option_string_actions)
    assert ("--target" in flags) == ({"--token-file", "--tls-ca", "--client-key"} <= flags)
    assert "--target" not in flags or command in CALLS


async def test_a_command_that_meets_a_wrong_certificate_says_so_in_one_line(tmp_path: Path) -> None:
    """gRPC's own lines about it are kept away."""
    (tmp_path / "other.pem").write_bytes(authority("another").pem)
    async with secured(tmp_path) as server:
        target = server.target.replace("localhost", "127.0.0.1")
        words = ("probe", f"--target={target}", f"--tls-ca={tmp_path}/other.pem")
        environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        process = await asyncio.create_subprocess_exec(*PROGRAM, *words, stderr=PIPE, env=environ)
        _, told = await process.communicate()
    assert process.returncode == 2
    (line,) = told.decode().splitlines()
    assert line.startswith("pageturner probe: UNAVAILABLE: ")
    assert "CERTIFICATE_VERIFY_FAILED" in line


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["generate", "ok", "--raw", "--max-tokens=2"], "search"),
        (["policies", "show"], "operator"),
        (["flight", "dump", "--out=/dev/null"], "operator"),
        (["explain", "r"], "operator"),
        (["drain", "--grace-seconds=0"], "operator"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else each,
)
async def test_each_command_that_calls_a_server_takes_the_flags(
    words: list[str],
    allowed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The commands run in a thread here, where no signal can be handled.
    monkeypatch.setattr(signals, "ending_signals", lambda: ())
    token = {"search": SEARCH, "operator": OPERATOR}[allowed]
    (tmp_path / "token").write_text(token.text)
    async with secured(tmp_path) as server:
        encrypted = (f"--target={server.target}", f"--tls-ca={server.ca}")
        unknown = await asyncio.to_thread(main, [*words, *encrypted])
        refused = capsys.readouterr()
        known = await asyncio.to_thread(main, [*words, *encrypted, f"--token-file={tmp_path}/token"])
        told = capsys.readouterr()
    assert unknown == 2
    assert "no valid credentials" in refused.err
    assert "no valid credentials" not in told.err
    # This engine records nothing, which an admin is told.
    assert known == 0 or "nothing is recorded" in told.err


def test_a_call_says_who_makes_it_and_how_long_it_may_take() -> None:
    credentials = Credentials(token="a.b")
    assert call_metadata(credentials, None) == (("authorization", "Bearer a.b"),)
    assert call_metadata(credentials, 2.5)[1:] == ((DEADLINE_KEY, "2.500"),)
    assert call_metadata(Credentials(), None) == ()
