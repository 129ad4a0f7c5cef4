"""Prompts computed by one server, answers by another: the same tokens, whatever becomes of the hand-over."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.handing_over import TinyServer, dear_tokens, tiny_server
from support.model_folders import save_chat_model
from support.serving import serving

from pageturner.service import backoff
from pageturner.service.config import load_config
from pageturner.service.engine.handover import HandedBlock, PrefillOrder
from pageturner.service.errors import ConfigError, EngineDead, HandoverRefused
from pageturner.service.handover.remote_prefill import RemotePrefill
from pageturner.service.rpc import transfer

PROMPT = tuple((7 * n + n // 9) % 97 + 3 for n in range(100))
"""Of six blocks of 16 tokens and four tokens more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    dear_tokens(monkeypatch)


def decoding(folder: Path, *targets: str, **given: Any) -> Any:
    return tiny_server(folder, handover__role="decode", handover__prefill_targets=targets, **given)


async def as_computed_here(server: TinyServer) -> tuple[int, ...]:
    """The tokens of an answer that no cache and no other server had a part in."""
    completion = await server.answer(PROMPT, bypass_prefix_cache=True)
    assert completion.usage.num_cached_prompt_tokens == 0
    return tokens_of(completion)


def tokens_of(completion: Any) -> tuple[int, ...]:
    return tuple(token.token_id for token in completion.choices[0].tokens)


async def test_a_prompt_that_another_server_computed_leads_to_the_same_tokens(folder: Path) -> None:
    async with (
        tiny_server(folder, handover__role="prefill") as prefill,
        decoding(folder, prefill.target) as decode,
    ):
        completion = await decode.answer(PROMPT)
        assert completion.usage.num_cached_prompt_tokens == 96, "all full blocks came"
        assert tokens_of(completion) == await as_computed_here(decode)
        load = await decode.client.load()
        assert load.num_disk_hit_tokens_total == 96
        assert load.num_disk_reads_failed_total == 0
        computed = (await prefill.client.load()).num_scheduled_tokens_total
        assert computed == 96, "of the whole blocks, which were all that was asked for"

        await asyncio.sleep(0.3)  # a look at the cache is good for as long
        again = await decode.answer((*PROMPT, 5, 6, 7))
        assert again.usage.num_cached_prompt_tokens == 96
        assert (await prefill.client.load()).num_scheduled_tokens_total == 96, "the rest is few tokens"
        assert not decode.logged("handover_failed")


async def test_blocks_that_are_here_already_are_not_sent_again(folder: Path) -> None:
    async with (
        tiny_server(folder, handover__role="prefill") as prefill,
        decoding(folder, prefill.target) as decode,
    ):
        await decode.answer(PROMPT[:48])
        orders: list[Any] = []
        original = prefill.engine.prefill
        prefill.engine.prefill = lambda order: orders.append(order) or original(order)  # type: ignore[method-assign,func-returns-value] # looked at on its way
        await asyncio.sleep(0.3)  # a look at the cache is good for as long
        completion = await decode.answer(PROMPT)
        assert [order.first_block for order in orders] == [3]
        assert completion.usage.num_cached_prompt_tokens == 96


async def test_several_at_once_and_several_of_one_prompt(folder: Path) -> None:
    prompts = [tuple((each * 13 + n) % 89 + 3 for n in range(80)) for each in range(3)]
    async with (
        tiny_server(folder, handover__role="prefill") as prefill,
        decoding(folder, prefill.target) as decode,
    ):
        asked = [prompt for prompt in prompts for _ in range(2)]
        together = await asyncio.gather(*(decode.answer(prompt) for prompt in asked))
        for prompt, completion in zip(asked, together, strict=True):
            alone = await decode.answer(prompt, bypass_prefix_cache=True)
            assert tokens_of(completion) == tokens_of(alone)
        assert (await decode.client.load()).num_disk_hit_tokens_total >= 3 * 64
        for server in (prefill, decode):
            load = await server.client.load()
            assert (load.num_running, load.num_waiting, load.num_blocks_used, load.num_host_blocks_used) == (
                0,
            ) * 4


async def test_other_weights_are_refused_by_name_and_the_prompt_computed_here(
    folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (other / "model.safetensors").write_bytes(content)
    async with (
        tiny_server(other, handover__role="prefill") as prefill,
        decoding(folder, prefill.target) as decode,
    ):
        completion = await decode.answer(PROMPT)
        assert completion.usage.num_cached_prompt_tokens == 0
        assert tokens_of(completion) == await as_computed_here(decode)
        (entry,) = decode.logged("handover_failed")
        assert "weights (" in entry["reason"]


async def test_another_layout_and_another_role_are_refused_by_name(folder: Path) -> None:
    async with (
        tiny_server(folder, handover__role="prefill", cache__block_size=8) as small,
        tiny_server(folder) as whole,
        decoding(folder, small.target, whole.target) as decode,
    ):
        assert tokens_of(await decode.answer(PROMPT)) == await as_computed_here(decode)
        reasons = {entry["reason"].partition(":")[0] for entry in decode.logged("handover_failed")}
        assert reasons == {
            "the servers lay blocks out otherwise",
            "this server computes no prompts for others",
        }


def damaged(block: HandedBlock) -> HandedBlock:
    return replace(block, content=bytes([block.content[0] ^ 1]) + block.content[1:])


@pytest.mark.parametrize(
    ("spoil", "num_cached", "reason"),
    [
        (lambda blocks: blocks, 96, ""),
        (lambda blocks: blocks[:2], 32, ""),
        (lambda blocks: [*blocks[:3], EngineDead("planted")], 48, "stopped"),
        (lambda blocks: [blocks[0], blocks[2]], 16, "block 2 came where block 1"),
        (lambda blocks: [replace(blocks[0], content=blocks[0].content[:-1])], 0, "bytes, not"),
        (lambda blocks: [*blocks, replace(blocks[5], index=6)], 96, "block 6 came where block 6 of 6"),
        (lambda blocks: [HandoverRefused("planted: other things", "planted")], 0, "other things"),
    ],
)
async def test_whatever_comes_the_tokens_are_right(
    folder: Path, spoil: Callable[[list[Any]], list[Any]], num_cached: int, reason: str
) -> None:
    engine = FakeEngine()
    async with (
        tiny_server(folder, handover__role="prefill") as source,
        serving(engine) as between,
        decoding(folder, f"127.0.0.1:{between.port}") as decode,
    ):
        blocks = [block async for block in source.engine.prefill(_order_of(source))]
        assert len(blocks) == 6
        engine.handed_over = spoil(blocks)
        completion = await decode.answer(PROMPT)
        assert completion.usage.num_cached_prompt_tokens == num_cached
        assert tokens_of(completion) == await as_computed_here(decode)
        told = [entry["reason"] for entry in decode.logged("handover_failed")]
        assert [reason in each for each in told] == ([True] if reason else [])


def _order_of(source: TinyServer) -> PrefillOrder:
    """As a server of the same kind would ask."""
    layout = source.engine._prefills._layout
    return PrefillOrder(PROMPT[:96], source.engine.server_info().fingerprint, layout)


async def test_a_fault_of_our_own_costs_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(self: object, block: object, index: int, last: int) -> None:
        raise ZeroDivisionError

    async with (
        tiny_server(folder, handover__role="prefill") as prefill,
        decoding(folder, prefill.target) as decode,
    ):
        monkeypatch.setattr(RemotePrefill, "_check", planted)
        assert tokens_of(await decode.answer(PROMPT)) == await as_computed_here(decode)
        assert decode.logged("handover_fault")


async def test_damage_on_the_way_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        tiny_server(folder, handover__role="prefill") as prefill,
        decoding(folder, prefill.target) as decode,
    ):
        monkeypatch.setattr(transfer, "zlib", SimpleNamespace(crc32=lambda content: 12345))
        completion = await decode.answer(PROMPT)
        assert completion.usage.num_cached_prompt_tokens == 0
        assert "damaged" in decode.logged("handover_failed")[0]["reason"]
        assert tokens_of(completion) == await as_computed_here(decode)


async def test_servers_that_are_away_silent_or_busy_with_refusing_hold_up_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rest in ("FIRST_REST", "LONGEST_REST"):
        monkeypatch.setattr(backoff, rest, 3600.0)  # none ends before the second prompt, on any machine
    silent = socket.create_server(("127.0.0.1", 0))  # it takes connections, and no call
    targets = "127.0.0.1:9", f"127.0.0.1:{silent.getsockname()[1]}"
    with silent:
        async with decoding(folder, *targets, handover__patience_seconds=0.2) as decode:
            await _with_two_servers_away(decode)


async def _with_two_servers_away(decode: TinyServer) -> None:
    completion = await decode.answer(PROMPT)
    assert tokens_of(completion) == await as_computed_here(decode)
    assert len(decode.logged("handover_failed")) == 2
    await decode.answer(PROMPT[1:])
    assert len(decode.logged("handover_failed")) == 2, "both are left alone for a while"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"handover__role": "decode"}, "handover.prefill_targets"),
        ({"handover__prefill_targets": ["a:1"]}, "handover.prefill_targets"),
        ({"handover__role": "decode", "handover__prefill_targets": ["a b"]}, "handover.prefill_targets"),
        ({"handover__role": "both"}, "handover.role"),
        ({"handover__role": "prefill", "cache__host_cache_memory": 0}, "handover.role"),
        ({"handover__role": "prefill", "cache__disk_cache_folder": "x"}, "handover.role"),
        ({"handover__min_tokens": 0}, "handover.min_tokens"),
        ({"handover__patience_seconds": float("nan")}, "handover.patience_seconds"),
    ],
)
async def test_what_can_not_be_is_refused_at_start(
    folder: Path, given: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        async with tiny_server(folder, **given):
            pass
    assert raised.value.key == key
    ours = [each.name for each in threading.enumerate() if each.name.startswith("pageturner-")]
    assert not ours, "what a refused start had opened by then is closed"


def test_targets_are_listed_with_commas_where_they_are_text() -> None:
    environ = {"PAGETURNER_HANDOVER_ROLE": "decode", "PAGETURNER_HANDOVER_PREFILL_TARGETS": "a:1, b:2"}
    config = load_config(None, environ=environ).config
    assert config.handover.prefill_targets == ("a:1", "b:2")
    assert "a:1" in config.flat()["handover.prefill_targets"]
