"""Hand-over between servers that prove who they are, and from one that means ill: no case costs a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.certificates import NOW, SERVER_NAMES, TlsFiles, authority, issue
from support.handing_over import TinyServer, dear_tokens, tiny_server
from support.identities import FILE, MAIL, OPERATOR
from support.model_folders import save_chat_model
from support.scripted import recording_logger

from pageturner.policies.views import Rates
from pageturner.service.auth.identities import parse_identities
from pageturner.service.auth.proof import Authenticator
from pageturner.service.backoff import FIRST_REST
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.engine.block_receiver import BlockReceiver
from pageturner.service.engine.handover import HandoverOptions
from pageturner.service.errors import ConfigError
from pageturner.service.handover.remote_prefill import OwnKv, RemotePrefill, Silent, Slow
from pageturner.service.routing.peers import Peers
from pageturner.service.rpc.certificates import Certificates
from pageturner.v1 import transfer_pb2 as pb

PROMPT = tuple((7 * n + n // 9) % 97 + 3 for n in range(100))
"""Of six blocks of 16 tokens and four tokens more."""

CA, OTHER_CA = authority(), authority("another authority")
SERVER = issue("server", *SERVER_NAMES, by=CA)
DECODER, STRANGER = (issue(name, f"{name}.internal", by=CA) for name in ("decoder", "stranger"))
IDENTITIES = FILE + 'certificates = ["decoder.internal"]\n'  # of the operators, who are last


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, keys and tokens as an operator lays them out."""
    home = tmp_path_factory.mktemp("files")
    for name, issued in {"decoder": DECODER, "stranger": STRANGER}.items():
        (home / f"{name}.pem").write_bytes(issued.pem)
        (home / f"{name}.key").write_bytes(issued.key_pem())
    for name, made in {"ca": CA, "other-ca": OTHER_CA}.items():
        (home / f"{name}.pem").write_bytes(made.pem)
    for name, token in {"operator": OPERATOR, "mail": MAIL}.items():
        (home / f"{name}.token").write_text(token.text)
    return home


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    dear_tokens(monkeypatch)


def guard_of(folder: Path, *, asks_for_certificates: bool) -> dict[str, Any]:
    """Of a server with TLS and identities, of which the operators alone are admins."""
    tls = TlsFiles(folder).write(SERVER, CA if asks_for_certificates else None)
    identities = parse_identities(IDENTITIES)
    day = 1_780_300_000.0  # of support.identities
    return {
        "certificates": Certificates(tls.options, recording_logger()[0], NOW.timestamp, lambda: None),
        "authenticator": Authenticator(lambda: identities, lambda: day),
    }


def keys_of(files: Path, names: dict[str, str]) -> dict[str, Any]:
    return {f"handover__prefill_{key}": str(files / name) for key, name in names.items()}


TOKEN = {"tls_ca": "ca.pem", "token_file": "operator.token"}
CERTIFICATE = {"tls_ca": "ca.pem", "client_certificate": "decoder.pem", "client_key": "decoder.key"}


@pytest.mark.parametrize(
    ("asks_for_certificates", "names", "refusal"),
    [
        (False, TOKEN, ""),
        (True, CERTIFICATE, ""),
        (True, CERTIFICATE | {"token_file": "operator.token"}, ""),
        (False, {"tls_ca": "ca.pem"}, "wants a bearer token"),
        (False, TOKEN | {"token_file": "mail.token"}, "admin"),
        (False, TOKEN | {"token_file": "no-such.token"}, "no-such.token"),
        (False, TOKEN | {"tls_ca": "other-ca.pem"}, "UNAVAILABLE"),
        (False, {"token_file": "operator.token"}, "UNAVAILABLE"),
        (True, TOKEN, "UNAVAILABLE"),
        (True, CERTIFICATE | {"client_certificate": "stranger.pem", "client_key": "stranger.key"}, ""),
    ],
)
async def test_who_may_have_prompts_computed(
    folder: Path,
    files: Path,
    tmp_path: Path,
    asks_for_certificates: bool,
    names: dict[str, str],
    refusal: str,
) -> None:
    guard = guard_of(tmp_path, asks_for_certificates=asks_for_certificates)
    async with (
        tiny_server(folder, guard, handover__role="prefill") as prefill,
        decoding(folder, prefill.target, **keys_of(files, names)) as decode,
    ):
        completion = await decode.answer(PROMPT)
        reasons = [entry["reason"] for entry in decode.logged("handover_failed")]
        assert tokens_of(completion) == await as_computed_here(decode)
        if refusal or "stranger.pem" in names.values():
            assert completion.usage.num_cached_prompt_tokens == 0
            assert len(reasons) == 1
            assert refusal in reasons[0]
        else:
            assert completion.usage.num_cached_prompt_tokens == 96
            assert not reasons


async def test_certificates_that_change_are_read_once_the_old_ones_fail(
    folder: Path, files: Path, tmp_path: Path
) -> None:
    guard = guard_of(tmp_path, asks_for_certificates=False)
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(OTHER_CA.pem)
    keys = keys_of(files, TOKEN) | {"handover__prefill_tls_ca": str(authorities)}
    async with (
        tiny_server(folder, guard, handover__role="prefill") as prefill,
        decoding(folder, prefill.target, **keys) as decode,
    ):
        completion = await decode.answer(PROMPT)
        assert completion.usage.num_cached_prompt_tokens == 0
        assert decode.logged("handover_failed")
        authorities.write_bytes(CA.pem)
        await asyncio.sleep(FIRST_REST)
        completion = await decode.answer(PROMPT[::-1])
        assert completion.usage.num_cached_prompt_tokens == 96


def decoding(folder: Path, *targets: str, **given: Any) -> Any:
    return tiny_server(folder, handover__role="decode", handover__prefill_targets=targets, **given)


async def as_computed_here(server: TinyServer, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """The tokens of an answer that no cache and no other server had a part in."""
    return tokens_of(await server.answer(prompt, bypass_prefix_cache=True))


def tokens_of(completion: Any) -> tuple[int, ...]:
    return tuple(token.token_id for token in completion.choices[0].tokens)


@pytest.mark.parametrize(
    "given",
    [
        {"handover__prefill_client_certificate": "a.pem", "handover__prefill_tls_ca": "ca.pem"},
        {"handover__prefill_client_certificate": "a.pem", "handover__prefill_client_key": "a.key"},
    ],
)
async def test_a_certificate_needs_its_key_and_an_encrypted_connection(folder: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match="prefill_client_certificate"):
        async with decoding(folder, "a:1", **given):
            pass


BEGUN = pb.PrefillResponse(begun=pb.PrefillBegun(num_blocks=6))
BLOCK = pb.PrefillResponse(block=pb.KvBlock(index=0))


async def endless(message: pb.PrefillResponse) -> AsyncIterator[pb.PrefillResponse]:
    while True:
        await asyncio.sleep(0)
        yield message


@pytest.mark.parametrize(
    ("message", "patience", "longest", "error"),
    [(BEGUN, 0.05, 3600.0, Silent), (BLOCK, 3600.0, 0.05, Slow)],
    ids=["talks and gives nothing", "gives for ever"],
)
async def test_a_server_that_is_never_done_is_left(
    message: pb.PrefillResponse, patience: float, longest: float, error: type[Exception]
) -> None:
    nothing: Any = None
    options = HandoverOptions(role="decode", prefill_targets=("a:1",), patience_seconds=patience)
    own = OwnKv("", "", 16, 1, Rates())
    prefill = RemotePrefill(
        Peers((), MonotonicClock().now),
        nothing,
        nothing,
        own,
        options,
        MonotonicClock(),
        recording_logger()[0],
    )
    async with asyncio.timeout(30):
        with pytest.raises(error):
            async for _ in prefill._within_patience(endless(message), longest):
                pass


async def test_a_hundred_at_once_of_which_clients_leave_are_bounded_and_leave_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoding server has room for four prompts of a hundred."""
    prompts = [tuple((each * 13 + n * (1 + each % 7)) % 89 + 3 for n in range(80)) for each in range(100)]
    most = 0
    put = BlockReceiver.put

    def watched(self: BlockReceiver, block_hash: bytes, content: bytes) -> None:
        nonlocal most
        put(self, block_hash, content)
        most = max(most, self.num_blocks)

    monkeypatch.setattr(BlockReceiver, "put", watched)
    async with tiny_server(
        folder, handover__role="prefill", cache__num_blocks=40, cache__host_cache_memory="160KiB"
    ) as prefill:
        capacity = 65536 // prefill.engine.server_info().block_bytes
        async with decoding(folder, prefill.target, handover__receive_memory=65536) as decode:
            tasks = [asyncio.create_task(decode.answer(prompt)) for prompt in prompts]
            await tasks[0]
            for left in tasks[1::5]:
                left.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert 0 < most <= capacity <= 20
            for prompt, completion in list(zip(prompts, found, strict=True))[::20]:
                assert tokens_of(completion) == await as_computed_here(decode, prompt)
            assert all(isinstance(each, asyncio.CancelledError) or tokens_of(each) for each in found)
            for server in (prefill, decode):
                for _ in range(300):  # what clients left ends between two steps
                    load = await server.client.load()
                    used = load.num_running, load.num_waiting, load.num_blocks_used, load.num_host_blocks_used
                    if not any(used):
                        break
                    await asyncio.sleep(0.1)
                assert not any(used)
            sender = prefill.engine._prefills._sender
            assert sender is not None
            assert not sender._held
            assert not sender._wanted
