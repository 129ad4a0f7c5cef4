"""Reference counts, copy-on-write and the prefix cache.

Each test says which guard it leans on: without that guard it fails.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scenarios import Scenario, scenario

from pageturner.kernels.layout import KvLayout
from pageturner.kernels.torch_ops import TorchOps
from pageturner.policies import registry
from pageturner.service.core.outputs import BlockCopies, BlockCopy
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.errors import DeadlineExceeded
from pageturner.service.model.kv_cache import KvCache

PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)


def sequence_tables(h: Scenario, request_id: str) -> list[tuple[int, ...]]:
    return [h.scheduler.manager.table(sequence) for sequence in h.request(request_id).unfinished]


@pytest.mark.parametrize("num_prompt", [5, 6, 7, 8])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_vllm_3347_every_fork_is_a_reference_of_its_own(num_prompt: int, n: int) -> None:
    """Choices that share every block end at different times; each gives back one reference, once.

    Leans on fork taking a reference for each child and block.
    """
    h = scenario(32, 4, caching=False)
    num_alive = set()
    for seed in range(4):
        request_id = h.submit(PROMPT[:num_prompt], max_tokens=12, min_tokens=2, n=n, stop_ids=(2,), seed=seed)
        h.step()
        while not h.has_ended(request_id):
            tables = sequence_tables(h, request_id)
            num_alive.add(len(tables))
            for index, block_id in enumerate(tables[0][: num_prompt // 4]):
                assert all(table[index] == block_id for table in tables)
                assert h.scheduler.manager.device.ref_count(block_id) == len(tables)
            h.step()
        h.finish_all()
    assert len(num_alive) > 1, "they end at different times"


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("num_blocks_full", [1, 2])
def test_a_fork_at_a_full_block_copies_nothing(n: int, num_blocks_full: int) -> None:
    """The prompt ends with its block: the choices share it for good, and each grows a block of its own.

    Leans on prepare_write leaving alone what is not written.
    """
    h = scenario(16, 4)
    request_id = h.submit(PROMPT[: 4 * num_blocks_full], max_tokens=6, n=n)
    h.step()
    first = sequence_tables(h, request_id)
    assert len(set(first)) == 1
    assert len(first[0]) == num_blocks_full
    h.step()
    tables = sequence_tables(h, request_id)
    assert {table[:num_blocks_full] for table in tables} == set(first)
    assert len({table[num_blocks_full] for table in tables}) == n
    assert h.scheduler.stats().num_copied_blocks_total == 0
    assert h.scheduler.stats().num_blocks_used == num_blocks_full + n
    h.finish_all()


@pytest.mark.parametrize("eviction", registry.names("eviction"))
@pytest.mark.parametrize("caching", [True, False])
def test_vllm_4761_an_evicted_block_is_found_no_more(eviction: str, caching: bool) -> None:
    """Five prompts take turns in a pool that caches two: each return finds what is there, or computes.

    Leans on eviction removing the mapping before the block changes hands.
    """
    h = scenario(5, 4, eviction=eviction, caching=caching)
    for turn in range(15):
        letter = turn * 7 % 5
        prompt = tuple((letter + position * (1 + letter)) % 3 for position in range(9))
        h.submit(prompt, max_tokens=4, seed=letter)
        h.run_to_end()
    h.finish_all()
    assert (h.scheduler.stats().num_evictions_total > 0) == caching


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("way", ["failed", "aborted", "expired", "preempted"])
def test_text_generation_inference_2489_nothing_is_published_that_was_not_computed(
    way: str, depth: int
) -> None:
    """The batch of a long prompt is dropped before, or while, it computes; a twin then computes for itself.

    Leans on publishing at update, and only for the current epoch.
    """
    h = scenario(12, 4, depth=depth, admission="first-chunk", options={"max_num_batched_tokens": 8})
    if way == "preempted":
        h.submit((2,) * 8, max_tokens=25, priority=9)
        h.step()
    deadline = h.now + 1.5 if way == "expired" else None
    dropped = h.submit((*PROMPT, *PROMPT), max_tokens=4, deadline=deadline)
    if way == "failed":
        h.fail()
        assert h.scheduler.manager.device.num_evictable == 0
    else:
        h.step()
        if way == "aborted":
            h.abort(dropped)
    h.submit((*PROMPT, *PROMPT), max_tokens=4, seed=1)
    for seed in range(2):
        h.submit((seed, *PROMPT, *PROMPT), max_tokens=4, seed=seed, priority=1 if way == "preempted" else 0)
    h.run_to_end()
    h.check_finished()
    if way == "expired":
        assert isinstance(h.error_of(dropped), DeadlineExceeded)


def test_vllm_18957_hits_are_counted_at_the_admission_that_succeeds() -> None:
    """Tried and refused step after step, its cached blocks lost meanwhile: what is counted is what is used.

    Leans on counting at commit, anew each time.
    """
    h = scenario(8, 4, admission="full-prompt", options={"max_skips": 0, "starvation_seconds": 10_000.0})
    h.submit(PROMPT, max_tokens=1)
    h.run_to_end()
    h.submit((2,) * 14, max_tokens=17, seed=3)
    h.step()
    waiting = h.submit((*PROMPT, *(2, 1, 0, 2) * 3), max_tokens=2, seed=4)
    num_attempts = 0
    while waiting not in h.decisions[-1].started:
        h.step()
        num_attempts += 1
    assert num_attempts > 5
    h.run_to_end()
    end = h.records[waiting].end
    assert end is not None
    (first_part,) = [
        part
        for decision in h.decisions
        if waiting in decision.started
        for part in decision.output.scheduled
        if part.request_id == waiting
    ]
    assert end.usage.num_cached_prompt_tokens == first_part.start
    stats = h.scheduler.stats()
    assert stats.num_prefix_query_tokens_total == 8 + 14 + 20, "each prompt is counted once"
    assert stats.num_prefix_hit_tokens_total == first_part.start
    h.finish_all()


TAGS = [("", ""), ("x", ""), ("", "x"), ("xx", ""), ("", "xx"), ("x", "x")]


@pytest.mark.parametrize("first", TAGS)
@pytest.mark.parametrize("second", TAGS)
def test_vllm_44701_an_adapter_and_an_equal_salt_share_no_blocks(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    """KV is shared between equal adapters with equal salts, and never else.

    Leans on the root digest tagging each field with its name and length.
    """
    h = scenario(16, 4)
    for number, (adapter, salt) in enumerate((first, second)):
        params = SamplingParams(max_tokens=2)
        new = NewRequest(f"r{number}", PROMPT, params, number, h.now, adapter=adapter, cache_salt=salt)
        h.submit_new(new)
        h.run_to_end()
    end = h.records["r1"].end
    assert end is not None
    assert end.usage.num_cached_prompt_tokens == (7 if first == second else 0)
    h.finish_all()


def test_vllm_42245_a_bypass_reads_nothing_and_writes_all_the_same() -> None:
    """Every row of a prompt is computed where cached rows would not do; what that makes others may hit.

    (Logprobs of the prompt, the report's case, are not offered; those of outputs need the last row only.)
    Leans on bypass_prefix_cache in hits, and on publish not looking at it.
    """
    h = scenario(16, 4)
    h.submit(PROMPT, max_tokens=1)
    h.run_to_end()
    h.submit(PROMPT, max_tokens=1, bypass=True, seed=1)
    (part,) = h.step().scheduled
    assert (part.start, part.write_start, part.end) == (0, 0, 8)
    h.run_to_end()
    fresh = (2, 1, 0, 2, 2, 1, 0, 2)
    h.submit(fresh, max_tokens=1, bypass=True)
    h.run_to_end()
    reader = h.submit((*fresh, 1), max_tokens=1)
    h.run_to_end()
    end = h.records[reader].end
    assert end is not None
    assert end.usage.num_cached_prompt_tokens == 8
    h.finish_all()


def test_vllm_42245_a_full_hit_computes_the_row_that_is_sampled() -> None:
    """The row whose logits are wanted is computed even where its KV is cached; nothing is written.

    Leans on set_kv leaving the last token to be computed.
    """
    h = scenario(16, 4)
    for seed in range(3):
        h.submit(PROMPT, max_tokens=1, seed=seed)
        (part,) = h.step().scheduled
        assert len(part.samples) == 1
        assert part.end == 8
        assert part.token_ids == PROMPT[part.start :]
        assert (part.start, part.write_start) == ((0, 0) if seed == 0 else (7, 8))
        h.run_to_end()
    h.finish_all()


@settings(deadline=None, derandomize=True, database=None)
@given(st.data())
def test_vllm_ascend_16013_chains_and_cycles_of_copies(data: st.DataObject) -> None:
    """Every destination holds what its source held before the step, whatever path the copies form.

    Leans on copy_blocks reading every source before it writes.
    """
    num_blocks = data.draw(st.integers(2, 7))
    cache = KvCache(KvLayout(2, 1, 3, 2, torch.float32), num_blocks, 0, TorchOps(), torch.device("cpu"))
    for block in range(num_blocks):
        cache.pool[block] = float(block)
    destinations = data.draw(st.lists(st.integers(0, num_blocks - 1), unique=True))
    sources = [data.draw(st.integers(0, num_blocks - 1)) for _ in destinations]
    expected = np.arange(num_blocks, dtype=float)
    expected[destinations] = sources
    cache.apply(BlockCopies(copies=tuple(map(BlockCopy, sources, destinations))))
    assert cache.pool[:, 0, 0].reshape(num_blocks, -1)[:, 0].tolist() == expected.tolist()


@pytest.mark.parametrize("reclaim", ["tail-first", "always-swap", "always-recompute"])
@pytest.mark.parametrize("depth", [0, 1])
def test_openvino_genai_4332_model_server_4428_choices_that_are_gone(reclaim: str, depth: int) -> None:
    """Requests of three choices, of which some have ended, yield, and are aborted, at every step there is.

    Leans on every walk over a request going over its unfinished choices.
    """
    num_steps = 0
    for phase in range(60):
        h = scenario(
            10, 2, num_host_blocks=12, depth=depth, reclaim=reclaim, admission="first-chunk", caching=False,
            options={"max_num_seqs": 9},
        )  # fmt: skip
        for seed in range(3):
            h.submit((seed, 1, 2), max_tokens=5, min_tokens=3, n=3, stop_ids=(1,), seed=seed)
        for _ in range(phase):
            h.step()
        live = [request_id for request_id in h.records if not h.has_ended(request_id)]
        for request_id in live[:2]:
            h.abort(request_id)
        h.run_to_end()
        h.check_finished()
        if not live:
            num_steps = phase
            assert h.num_preemptions > 0
            break
    assert num_steps > 8


def test_each_request_computes_its_own_partial_block() -> None:
    """Two prompts that part within a full block share the blocks before it: the later computes from there.

    The last block of an ended answer is shared in part (tests/service/core/test_partial_blocks.py).
    """
    h = scenario(32, 4)
    h.submit((0, 1, 2, 0, 1, 2, 0, 1, 1, 1), max_tokens=1)
    h.run_to_end()
    later = h.submit((0, 1, 2, 0, 1, 2, 2, 2, 2, 2), max_tokens=2)
    (part,) = h.step().scheduled
    assert (part.start, part.end) == (4, 10)
    h.finish_all()
    end = h.records[later].end
    assert end is not None
    assert end.usage.num_cached_prompt_tokens == 4
