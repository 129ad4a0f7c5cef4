"""One real server process with TLS, tokens and an admin socket, from its start to its end, and all that it
logs."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from support.certificates import SERVER_NAMES, TlsFiles, authority, issue, shown_certificate
from support.identities import FILE, MAIL, SEARCH, SEARCH_OLD, STRANGER, token
from support.model_folders import save_chat_model

from pageturner.service.auth.editing import edit_file, remove_token
from pageturner.service.client import Client, Credentials, UnknownStatus
from pageturner.service.client.server_process import PROGRAM
from pageturner.service.errors import InvalidArgument, PageturnerError, Unauthenticated

CA = authority()
RENEWED = issue("renewed", *SERVER_NAMES, by=CA)
GUESS = token("search", "guess")
PROMPT = "the prompt that must not be told"
# On the day of these tests all the tokens would have expired.
IDENTITIES = FILE.replace("2026-06-02", "2999-06-02")


class SecuredServer:
    """A process, and its log as far as it has been read."""

    def __init__(self, folder: Path) -> None:
        self.files = TlsFiles(folder).write(issue("server", *SERVER_NAMES, by=CA))
        (folder / "ca.pem").write_bytes(CA.pem)
        self.ca = folder / "ca.pem"
        self.identities = folder / "identities.toml"
        self.identities.write_text(IDENTITIES)
        self.identities.chmod(0o600)
        self.admin = f"unix:{folder}/admin"
        self.log_path = folder / "log"
        model = save_chat_model(folder / "model")
        options = self.files.options
        flags = (
            *(f"--model={model}", "--num-blocks=512", "--swap-space=0", "--device=cpu", "--num-threads=1"),
            *("--port=0", "--log-level=debug", "--log-format=json", "--flight-recorder-steps=64"),
            *(f"--tls-certificate={options.certificate}", f"--tls-key={options.key}"),
            "--metrics-port=0",
            *(f"--auth-identities={self.identities}", f"--admin-host={self.admin}"),
        )
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*PROGRAM, "serve", *flags], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        self.target = self.process.stdout.readline().split()[-1].replace("127.0.0.1", "localhost")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def port(self) -> int:
        return int(self.target.rpartition(":")[2])

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def scrape(self) -> str:
        (port,) = re.findall(r'"port": (\d+), "event": "monitoring"', self.log)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            text: str = response.read().decode()
        return text

    def client(self, text: str) -> Client:
        return Client(self.target, credentials=Credentials(token=text, tls_ca=self.ca))

    async def logged(self, event: str) -> None:
        async with asyncio.timeout(60):
            while f'"event": "{event}"' not in self.log:  # noqa: ASYNC110 # another process writes it
                await asyncio.sleep(0.05)


async def refused(server: SecuredServer, text: str) -> None:
    async with server.client(text) as client:
        with pytest.raises(Unauthenticated):
            await client.generate(PROMPT)


async def test_a_secured_server_serves_reloads_and_tells_no_secret(tmp_path: Path) -> None:
    server = SecuredServer(tmp_path)
    answers: list[str] = []
    try:
        async with server.client(SEARCH.text) as client, Client(server.admin) as admin:
            await client.wait_until_serving(60)
            answers += [(await client.generate(PROMPT, max_tokens=24)).text]
            answers += [(await client.generate(PROMPT, max_tokens=24, seed=7, temperature=2.0)).text]
            # Every way to go wrong that has words of the caller's in it.
            for options in ({"stop": [""]}, {"tenant": "mail"}, {"model": PROMPT}, {"top_p": 3.0}):
                with pytest.raises(PageturnerError):
                    await client.generate(PROMPT, **options)
            with pytest.raises(InvalidArgument):
                await client.generate(f"{PROMPT} " * 20_000)
            for text in (STRANGER.text, SEARCH_OLD.text, GUESS.text, f"x{SEARCH.text}", ""):
                await refused(server, text)
            async with Client(server.target) as plain:
                with pytest.raises(UnknownStatus):
                    await plain.generate(PROMPT)
            assert PROMPT.encode() not in await admin.flight_record()
            assert (await admin.server_info()).config["auth.identities"] == str(server.identities)

            # A token that is revoked, a file with a fault, another certificate.
            async with server.client(MAIL.text) as mail:
                await mail.generate(PROMPT, max_tokens=1)
            edit_file(server.identities, partial(remove_token, token_id="mail"))
            server.files.write(RENEWED)
            server.process.send_signal(signal.SIGHUP)
            await server.logged("identities_reloaded")
            await server.logged("certificate_reloaded")
            await refused(server, MAIL.text)
            assert await asyncio.to_thread(shown_certificate, server.port) == RENEWED.fingerprint
            server.identities.write_text(f"{IDENTITIES}\ntoken = '{MAIL.text}'\n")
            await server.logged("identities_refused")  # by a look at the file
            answers += [(await client.generate(PROMPT, max_tokens=24)).text]
            metrics = await asyncio.to_thread(server.scrape)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    finally:
        server.end()
    log = server.log
    others = [line for line in log.splitlines() if not line.startswith("{")]
    assert [line.partition(";")[0] for line in others] == ["draining"], "gRPC tells nothing of bad handshakes"
    assert '"credential": "token search"' in log
    assert '"tenant": "search"' in log
    assert {cause: f'"cause": "{cause}"' in log for cause in ("missing", "expired", "wrong_secret")} == {
        "missing": True, "expired": True, "wrong_secret": True,
    }  # fmt: skip
    secrets = [held.text for held in (SEARCH, SEARCH_OLD, MAIL, STRANGER, GUESS)]
    secrets += [held.digest.hex() for held in (SEARCH, SEARCH_OLD, MAIL)]
    assert 'callers_refused_total{cause="expired"} 1.0' in metrics
    assert 'files_refused_total{file="identities"} 1.0' in metrics
    ends = RENEWED.certificate.not_valid_after_utc.timestamp()
    (told,) = re.findall(r"^pageturner:certificate_expiry_timestamp_seconds (.+)$", metrics, re.MULTILINE)
    assert float(told) == ends
    for secret in (*secrets, PROMPT, *answers):
        assert len(secret) > 8
        for told in (log, metrics):
            assert secret not in told
            assert json.dumps(secret)[1:-1] not in told
