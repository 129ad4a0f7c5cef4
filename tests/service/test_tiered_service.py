"""Tiers on the real engine: answers are the same from wherever blocks come, through restarts and damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.model_folders import save_chat_model

from pageturner.policies.views import Rates
from pageturner.service.core.memory.prefix_cache import PrefixHasher, prefix_key
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.errors import ConfigError
from pageturner.service.llm import LLM
from pageturner.service.startup import loading, tiers

HISTORIES = tuple(tuple((5 * number + index) % 97 + 3 for index in range(80)) for number in range(8))
"""Of 5 blocks each; the pool has 12, so that no two turns of one find its blocks there."""

SMALL = "96KiB"
"""Of the host, for less than half of them."""

Answers = tuple[tuple[int, ...], ...]
Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Rates are of a model whose tokens are dear: this one's are computed as fast as they are copied."""
    monkeypatch.setattr(loading, "measure_rates", lambda target: replace(Rates(), block_bytes=1))
    monkeypatch.setattr(tiers, "measure_reads", lambda files, timer: 1e12)

    def make(model: Path = folder, **cache: Any) -> LLM:
        cache = {"num_blocks": 12, "swap_space": 0} | cache
        return LLM({"source": str(model), "device": "cpu", "num_threads": 1}, cache=cache)

    return make


def ask(llm: LLM, rounds: int = 2) -> tuple[Answers, SchedulerStats]:
    """Each history in its turn, several times: answers and figures."""
    answers = []
    for _ in range(rounds):
        for history in HISTORIES:
            (completion,) = llm.generate([history], max_tokens=4, temperature=0.0, ignore_eos=True)
            answers.append(tuple(token.token_id for token in completion.choices[0].tokens))
    return tuple(answers), llm.load()


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """With a pool that holds all, and no cache."""
    with LLM(
        {"source": str(folder), "device": "cpu", "num_threads": 1},
        cache={"num_blocks": 512, "swap_space": 0, "enable_prefix_caching": False},
    ) as llm:
        return ask(llm)[0]


def test_answers_are_the_same_from_the_host_tier(make: Make, expected: Answers) -> None:
    with make(host_cache_memory="4MiB") as llm:
        answers, load = ask(llm)
    assert answers == expected
    assert load.num_spilled_blocks_total > 0
    assert load.num_host_hit_tokens_total >= 16 * len(HISTORIES)


def test_answers_are_the_same_from_disk_and_through_a_restart(
    make: Make, expected: Answers, tmp_path: Path
) -> None:
    cache = {"host_cache_memory": SMALL, "disk_cache_folder": str(tmp_path / "cache")}
    with make(**cache) as llm:
        answers, load = ask(llm)
    assert answers == expected
    assert load.num_disk_hit_tokens_total > 0
    assert load.num_host_blocks < 5 * len(HISTORIES), "the host does not hold all"
    with make(**cache) as llm:
        assert llm.load().num_disk_blocks_cached >= 5 * len(HISTORIES), "all of them were kept"
        answers, load = ask(llm, rounds=1)
    assert answers == expected[: len(HISTORIES)]
    assert load.num_disk_hit_tokens_total >= 16 * len(HISTORIES)
    assert load.num_disk_reads_failed_total == 0


def test_damaged_files_cost_time_and_no_token(make: Make, expected: Answers, tmp_path: Path) -> None:
    cache = {"host_cache_memory": SMALL, "disk_cache_folder": str(tmp_path)}
    with make(**cache) as llm:
        ask(llm, rounds=1)
    for number, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
        content = bytearray(path.read_bytes())
        content[-1 - number] ^= 0xFF
        path.write_bytes(content)
    with make(**cache) as llm:
        answers, load = ask(llm)
    assert answers == expected
    assert load.num_disk_reads_failed_total >= len(HISTORIES)


def test_other_weights_find_none_of_it(make: Make, folder: Path, tmp_path: Path) -> None:
    cache = {"host_cache_memory": SMALL, "disk_cache_folder": str(tmp_path / "cache")}
    with make(**cache) as llm:
        ask(llm, rounds=1)
    other = shutil.copytree(folder, tmp_path / "other")
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with make(other, **cache) as llm:
        assert llm.load().num_disk_blocks_cached == 0
        assert ask(llm, rounds=1)[1].num_disk_hit_tokens_total == 0


def test_a_second_process_serves_without_the_folder(make: Make, expected: Answers, tmp_path: Path) -> None:
    cache = {"host_cache_memory": SMALL, "disk_cache_folder": str(tmp_path)}
    with make(**cache), capture_logs(), make(**cache) as second:
        answers, load = ask(second)
    assert answers == expected
    assert load.num_host_hit_tokens_total == 0, "the histories exceed the host"
    assert load.num_disk_blocks_cached == 0


@pytest.mark.parametrize(
    ("cache", "key"),
    [
        ({"disk_cache_folder": "/tmp/x"}, "cache.disk_cache_folder"),
        ({"host_cache_memory": "1MiB", "enable_prefix_caching": False}, "cache.host_cache_memory"),
        ({"host_cache_memory": "1MiB", "disk_cache_folder": "/dev/null/x"}, "cache.disk_cache_folder"),
        ({"host_cache_memory": "900TiB"}, "cache.host_cache_memory"),
        ({"prefix_key_file": "/nowhere/key"}, "cache.prefix_key_file"),
        ({"prefix_key_file": "/dev/null"}, "cache.prefix_key_file"),
        ({"host_cache_memory": 1}, "cache.host_cache_memory"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(make: Make, cache: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**cache)
    assert caught.value.key == key


def test_a_router_that_shares_the_key_finds_what_is_cached_wherever_it_lies(
    make: Make, tmp_path: Path
) -> None:
    secret = tmp_path / "key"
    secret.write_bytes(b"a secret of many bytes")
    with make(host_cache_memory="4MiB", prefix_key_file=str(secret)) as llm:
        ask(llm, rounds=1)
        summary = llm.prefix_summary()
    hasher = PrefixHasher(prefix_key(secret.read_bytes()))
    assert summary.key_id == hasher.key_id
    for history in HISTORIES:  # of which the device holds two at most
        assert summary.num_leading(hasher.chain(history, 16, adapter="", salt="")) >= 4
    elsewhere = PrefixHasher(b"other").chain(HISTORIES[0], 16, adapter="", salt="")
    assert summary.num_leading(elsewhere) == 0
