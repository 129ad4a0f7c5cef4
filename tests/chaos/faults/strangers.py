"""A server that asks who calls, and callers who can't say, or should not be let in."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random

import grpc
from support import http2
from support.certificates import SERVER_NAMES, TlsFiles, authority, issue, secure_channel
from support.identities import FILE, SEARCH, SEARCH_OLD, STRANGER, bearer, token

from chaos.calling import GONE, UNPROVEN, Metadata, request, stream
from chaos.faults.kind import Fault
from chaos.server import ServerProcess, running
from chaos.site import PLAIN_CHANNEL, PROMPTS, Site
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

IDENTITIES = FILE.replace("2026-06-02", "2999-06-02")
"""One token that holds on any day, one that expired."""

WRONG_CREDENTIALS: tuple[Metadata, ...] = (
    (),
    bearer(STRANGER),
    bearer(SEARCH_OLD),
    bearer(token("search", "guess")),
    (("authorization", "Basic c2VhcmNoOng="),),
    (("authorization", f"Bearer {'x' * 4000}"),),
    (("authorization", SEARCH.text),),
)
END_SECONDS = 60.0


async def strangers(site: Site, random: Random) -> None:
    """No token, an expired, a guessed one; another authority, plain text and random bytes where TLS is
    spoken; files of identities and certificates that break meanwhile. One tenant's streams go on."""
    with tempfile.TemporaryDirectory(dir=site.folder) as name:
        folder = Path(name)
        ca = authority()
        files = TlsFiles(folder).write(issue("server", *SERVER_NAMES, by=ca))
        identities = folder / "identities.toml"
        identities.write_text(IDENTITIES)
        identities.chmod(0o600)
        flags = (
            f"--tls-certificate={files.options.certificate}",
            f"--tls-key={files.options.key}",
            f"--auth-identities={identities}",
        )
        async with running(site.model, folder, flags=flags) as server:
            port = int(server.target.rpartition(":")[2])
            async with secure_channel(port, ca) as known, secure_channel(port, authority()) as misled:
                await asyncio.gather(
                    _tenant(site, known),
                    _unproven(site, known, random),
                    _refused_by_tls(site, misled),
                    _plain_text(site, server),
                    _bytes(server, random),
                    _broken_files(server, files, identities),
                )
                await _tenant(site, known)
            server.signal(signal.SIGTERM)
            if (code := await server.wait(END_SECONDS)) != 0:
                site.ledger.problem(f"a secured server ended with {code}")
            server.check_log(site.ledger, frozenset({"identities_refused", "certificate_refused"}))


async def _tenant(site: Site, channel: grpc.aio.Channel) -> None:
    """Its answers are those of any server of this model."""
    stub = GenerationServiceStub(channel)
    for turn in range(8):
        prompt = PROMPTS[turn % len(PROMPTS)]
        asked = request(site.ledger.new_id("tenant"), prompt, max_tokens=24)
        answer = await stream(stub, site.ledger, asked, metadata=bearer(SEARCH))
        if answer.code == "OK" and answer.tokens[0] != site.reference[prompt]:
            site.ledger.problem(f"{asked.request_id}: other tokens than the reference's")


async def _unproven(site: Site, channel: grpc.aio.Channel, random: Random) -> None:
    stub = GenerationServiceStub(channel)

    async def one(metadata: Metadata) -> None:
        asked = request(site.ledger.new_id("stranger"), PROMPTS[0], max_tokens=5)
        await stream(stub, site.ledger, asked, UNPROVEN, metadata=metadata)

    for _ in range(4):
        await asyncio.gather(*(one(random.choice(WRONG_CREDENTIALS)) for _ in range(25)))


async def _refused_by_tls(site: Site, channel: grpc.aio.Channel) -> None:
    asked = request(site.ledger.new_id("misled"), PROMPTS[0], max_tokens=5)
    await stream(GenerationServiceStub(channel), site.ledger, asked, GONE, metadata=bearer(SEARCH))


async def _plain_text(site: Site, server: ServerProcess) -> None:
    async with grpc.aio.insecure_channel(server.target, options=PLAIN_CHANNEL) as channel:
        asked = request(site.ledger.new_id("plain-text"), PROMPTS[0], max_tokens=5)
        await stream(GenerationServiceStub(channel), site.ledger, asked, GONE, metadata=bearer(SEARCH))


async def _bytes(server: ServerProcess, random: Random) -> None:
    for _ in range(20):
        connection = await http2.Connection.open(server.target)
        await connection.send(random.choice((b"", b"\x16\x03\x01")), random.randbytes(200))
        connection.reset()


async def _broken_files(server: ServerProcess, files: TlsFiles, identities: Path) -> None:
    """What is in force stays so."""
    certificate = files.options.certificate
    assert certificate is not None, "the server has one"
    for path in (certificate, identities):
        await asyncio.to_thread(path.write_text, "[tenants\n")
    server.signal(signal.SIGHUP)
    async with asyncio.timeout(END_SECONDS):
        await server.logged("identities_refused")
        await server.logged("certificate_refused")


FAULTS: Mapping[str, Fault] = {"strangers at a secured server": strangers}
