"""Each published format is read, and what prompts share in it is shared in the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pageturner.policies import registry
from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.machine import load_machine
from pageturner.service.simulator.simulation import simulate
from pageturner.service.simulator.traces import read_trace, window

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""
AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2366]}
{"timestamp": 30535, "input_length": 1500, "output_length": 26, "hash_ids": [46, 47, 2367]}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "arrivals", "lengths"),
    [
        (BURSTGPT, [0, 40], [(472, 18), (1087, 230)]),
        (AZURE_2023, [0, 4.314579], [(374, 44), (396, 109)]),
        (AZURE_2024, [0, 0.99007], [(2162, 5), (2399, 6)]),
        (MOONCAKE, [0, 3.053], [(1100, 52), (1500, 26)]),
    ],
    ids=["burstgpt", "azure 2023", "azure 2024", "mooncake"],
)
def test_arrivals_and_lengths(
    text: str, arrivals: list[float], lengths: list[tuple[int, int]], tmp_path: Path
) -> None:
    """One that generated nothing failed when the trace was taken, and is left out."""
    requests = read_trace(written(tmp_path, text)).requests
    assert [request.at_seconds for request in requests] == pytest.approx(arrivals, abs=1e-5)
    assert [(request.num_prompt_tokens, request.output.num_tokens) for request in requests] == lengths


def test_equal_hash_ids_are_equal_tokens_and_hit_the_cache(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE))
    one, two = (request.to_request("x", 0.0).prompt_token_ids for request in trace.requests)
    assert one[:1024] == two[:1024]
    assert one[1024] != two[1024]
    result = simulate(trace, load_machine("h100-8b"), registry.default_policies())
    assert [record.num_cached_tokens for record in result.requests] == [0, 1024]


def test_a_window_of_a_trace_is_chosen_by_the_seed(tmp_path: Path) -> None:
    rows = [f"{second},ChatGPT,{second + 1},1,{second + 2},API log" for second in range(100)]
    trace = read_trace(written(tmp_path, "\n".join([BURSTGPT.splitlines()[0], *rows])))
    first, again, other = (window(trace, 10, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert [request.at_seconds for request in first.requests] == list(range(10))
    assert window(trace, 1000, 0) == trace


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "none of BurstGPT"),
        ("a,b\n1,2\n", "none of BurstGPT"),
        (AZURE_2023.splitlines()[0], "no requests"),
        (BURSTGPT.replace("472", "many"), "many"),
        (MOONCAKE.replace('"input_length"', '"length"'), "input_length"),
        (json.dumps({"timestamp": 0}), "input_length"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_reason(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=reason):
        read_trace(written(tmp_path, text))


def test_a_missing_file_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No such file"):
        read_trace(tmp_path / "none.csv")
