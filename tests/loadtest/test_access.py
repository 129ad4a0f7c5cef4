"""A load test of a server that wants TLS and a token."""

from __future__ import annotations

import argparse
import asyncio
import time
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from support.certificates import SERVER_NAMES, TlsFiles, authority, issue
from support.fake_engine import FakeEngine
from support.identities import OPERATOR, SEARCH, STRANGER, authenticator
from support.serving import capturing_logger, serving

from pageturner.loadtest.channel import TOKEN_FILE_VARIABLE, Access
from pageturner.loadtest.cli import add_arguments
from pageturner.loadtest.errors import OptionError, ServerError
from pageturner.loadtest.monitor import Monitor
from pageturner.loadtest.options import make_run
from pageturner.loadtest.server import Target, discover
from pageturner.service.client.server_process import PROGRAM
from pageturner.service.rpc.certificates import Certificates

CA = authority()


def certificates(folder: Path) -> Certificates:
    files = TlsFiles(folder).write(issue("server", *SERVER_NAMES, by=CA))
    return Certificates(files.options, capturing_logger()[0], time.time)


async def test_a_tenant_loads_the_server_and_its_token_is_in_no_output(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SEARCH.text)
    (tmp_path / "ca.pem").write_bytes(CA.pem)
    engine = FakeEngine()
    words = ("--requests=4", "--prompt-tokens=4", "--output-tokens=2", "--warmup=1", "--concurrency=2")
    async with serving(engine, certificates=certificates(tmp_path), authenticator=authenticator()) as served:
        arguments = [
            *("loadtest", f"--target=localhost:{served.port}", *words, "--json"),
            *(f"--token-file={tmp_path}/token", f"--tls-ca={tmp_path}/ca.pem"),
        ]
        process = await asyncio.create_subprocess_exec(*PROGRAM, *arguments, stdout=PIPE, stderr=PIPE)
        out, err = await process.communicate()
        assert process.returncode == 0, err
    assert len(engine.requests) == 5
    assert {each.identity.tenant for each in engine.requests} == {"search"}
    assert SEARCH.text.encode() not in out + err


async def test_what_admins_are_told_is_left_out_for_others_and_found_on_its_own_listener(
    tmp_path: Path,
) -> None:
    async with serving(
        FakeEngine(), certificates=certificates(tmp_path), authenticator=authenticator(), admin_port=0
    ) as served:
        public, admin = f"localhost:{served.port}", f"localhost:{served.admin_port}"
        tenant, operator = (Access(each.text, ca=CA.pem) for each in (SEARCH, OPERATOR))
        assert (await discover(Target(public, access=tenant), 0)).version == ""
        assert (await discover(Target(public, access=tenant, admin_address=admin), 0)).version == ""
        assert (await discover(Target(public, access=operator, admin_address=admin), 0)).version == "0.1.0"
        with pytest.raises(ServerError, match="UNAUTHENTICATED"):
            await discover(Target(public, access=Access(STRANGER.text, ca=CA.pem)), 0)
        monitor = Monitor(admin, lambda _: None, access=operator)

        def watch() -> None:
            with monitor.watching():
                pass

        await asyncio.to_thread(watch)
        assert monitor.failure == ""
        assert monitor.samples


async def test_a_socket_file_of_admins_is_read_in_plain_text_beside_an_encrypted_port(tmp_path: Path) -> None:
    admin = f"unix:{tmp_path}/admin"
    async with serving(
        FakeEngine(), certificates=certificates(tmp_path), authenticator=authenticator(), admin_host=admin
    ) as served:
        tenant = Access(SEARCH.text, ca=CA.pem)
        target = Target(f"localhost:{served.port}", access=tenant, admin_address=admin)
        assert (await discover(target, 0)).version == "0.1.0"


def arguments_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_flags_become_the_access(tmp_path: Path) -> None:
    for name, content in (("token", f"{SEARCH.text}\n"), ("ca", "C"), ("cert", "D"), ("key", "K")):
        (tmp_path / name).write_text(content)
    run = make_run(
        arguments_of(
            f"--token-file={tmp_path}/token",
            f"--tls-ca={tmp_path}/ca",
            f"--client-certificate={tmp_path}/cert",
            f"--client-key={tmp_path}/key",
            "--admin-target=localhost:7",
        )
    )
    assert run.target.access == Access(SEARCH.text, False, b"C", b"D", b"K")
    assert run.target.admin_address == "localhost:7"
    assert SEARCH.text not in repr(run)
    assert "b'K'" not in repr(run)


def test_the_environment_names_a_token_where_no_flag_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(SEARCH.text)
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    assert make_run(arguments_of()).target.access == Access(SEARCH.text)
    (tmp_path / "other").write_text("pt_other")
    assert make_run(arguments_of(f"--token-file={tmp_path}/other")).target.access == Access("pt_other")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--token-file=/nosuch"], "token-file"),
        (["--tls-ca=/nosuch"], "tls-ca"),
        (["--client-key=/nosuch"], "client-certificate"),
        (["--admin-target=:x"], "admin-target"),
    ],
)
def test_flags_that_make_no_sense_are_named(words: list[str], option: str) -> None:
    with pytest.raises(OptionError) as caught:
        make_run(arguments_of(*words))
    assert caught.value.option == option
