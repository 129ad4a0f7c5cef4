"""Each published format is read in every form it comes in, or refused with file, line and column."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pageturner.loadtest.traces.trace import TraceRequest
from pageturner.policies import registry
from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.machine import load_machine
from pageturner.service.simulator.simulation import simulate
from pageturner.service.simulator.traces import read_trace

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
BAILIAN = """{"chat_id": 1, "timestamp": 61.1, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]}
{"chat_id": 2, "timestamp": 121.1, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 9]}
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2366]}
{"timestamp": 30535, "input_length": 1500, "output_length": 26, "hash_ids": [46, 47, 2367]}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_bytes(text.encode())
    return path


def arrivals_and_lengths(path: Path) -> list[tuple[float, int, int]]:
    return [
        (request.at_seconds, request.num_prompt_tokens, request.output.num_tokens)
        for request in read_trace(path).workload().requests
    ]


@pytest.mark.parametrize(
    ("text", "arrivals", "lengths"),
    [
        (BURSTGPT, [0, 40], [(472, 18), (1087, 230)]),
        (AZURE_2023, [0, 4.314579], [(374, 44), (396, 109)]),
        (AZURE_2024, [0, 0.99007], [(2162, 5), (2399, 6)]),
        (MOONCAKE, [0, 3.053], [(1100, 52), (1500, 26)]),
        (BAILIAN, [0, 60], [(40, 5), (40, 5)]),
    ],
    ids=["burstgpt", "azure 2023", "azure 2024", "mooncake", "bailian"],
)
def test_arrivals_and_lengths(
    text: str, arrivals: list[float], lengths: list[tuple[int, int]], tmp_path: Path
) -> None:
    found = arrivals_and_lengths(written(tmp_path, text))
    assert [at for at, _, _ in found] == pytest.approx(arrivals, abs=1e-5)
    assert [(prompt, output) for _, prompt, output in found] == lengths


def test_equal_hash_ids_are_equal_tokens_and_hit_the_cache(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE)).workload()
    one, two = (request.to_request("x", 0.0).prompt_token_ids for request in trace.requests)
    assert one[:1024] == two[:1024]
    assert one[1024] != two[1024]
    result = simulate(trace, load_machine("h100-8b"), registry.default_policies())
    assert [record.num_cached_tokens for record in result.requests] == [0, 1024]


def test_a_window_of_a_trace_is_chosen_by_the_seed(tmp_path: Path) -> None:
    rows = [f"{second},ChatGPT,{second + 1},1,{second + 2},API log" for second in range(100)]
    trace = read_trace(written(tmp_path, "\n".join([BURSTGPT.splitlines()[0], *rows])))
    first, again, other = (trace.window(10, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert [request.at_seconds for request in first.requests] == list(range(10))
    assert trace.window(1000, 0) == trace.workload()


def test_a_window_shares_what_the_trace_shares(tmp_path: Path) -> None:
    lines = [
        f'{{"timestamp": {n}, "input_length": 1024, "output_length": 1, "hash_ids": [7, {n + 8}]}}'
        for n in range(50)
    ]
    window = read_trace(written(tmp_path, "\n".join(lines))).window(2, seed=3)
    one, two = (request.prompt for request in window.requests)
    assert one[0] == two[0]
    assert one[1] != two[1]


def test_requests_out_of_order_are_sorted_by_arrival(tmp_path: Path) -> None:
    head, one, two, _ = BURSTGPT.splitlines()
    found = arrivals_and_lengths(written(tmp_path, "\n".join([head, two, one])))
    assert found == [(0, 472, 18), (40, 1087, 230)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("a,b\n1,2\n", "none of BurstGPT"),
        (AZURE_2023.splitlines()[0], "no requests"),
        (json.dumps({"timestamp": 0}), "input_length"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_reason(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=reason):
        read_trace(written(tmp_path, text))


def test_a_missing_file_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No such file"):
        read_trace(tmp_path / "none.csv")


# --- forms of a line and of a file -------------------------------------------------------------

LINE = '{"timestamp":0,"input_length":600,"output_length":5,"hash_ids":[1,2]}'
ALL_TEXTS = {
    "burstgpt": BURSTGPT,
    "azure": AZURE_2023,
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
}


@pytest.mark.fault("11")
@pytest.mark.parametrize("text", [f"{LINE}\n\n", f"\n{LINE}", f"{LINE}\r\n \r\n", f"\ufeff{LINE}\n"])
def test_blank_lines_of_a_trace_are_skipped(text: str, tmp_path: Path) -> None:
    assert arrivals_and_lengths(written(tmp_path, text)) == [(0, 600, 5)]


@pytest.mark.fault("11")
@pytest.mark.parametrize("form", ["blank lines", "crlf", "mark", "no last end", "gzip"])
@pytest.mark.parametrize("name", ALL_TEXTS)
def test_every_trace_format_is_read_with_any_line_ending(name: str, form: str, tmp_path: Path) -> None:
    text = ALL_TEXTS[name]
    expected = arrivals_and_lengths(written(tmp_path, text))
    changed = {
        "blank lines": text.replace("\n", "\n\n  \n"),
        "crlf": text.replace("\n", "\r\n"),
        "mark": "\ufeff" + text,
        "no last end": text.rstrip(),
        "gzip": text,
    }[form]
    path = written(tmp_path, changed)
    if form == "gzip":
        path.write_bytes(gzip.compress(text.encode()))
    assert arrivals_and_lengths(path) == expected


@pytest.mark.fault("11")
@pytest.mark.parametrize("name", ALL_TEXTS)
def test_a_cut_last_line_costs_that_line_and_a_note(name: str, tmp_path: Path) -> None:
    text = ALL_TEXTS[name].rstrip()
    last = text.splitlines()[-1]
    cut = text[: -len(last) + 5]
    trace = read_trace(written(tmp_path, cut))
    whole = arrivals_and_lengths(written(tmp_path, text))
    assert trace.source.num_requests == len(whole) - (name != "burstgpt")
    assert f"line {len(text.splitlines())} was cut off and is left out" in trace.source.notes


@pytest.mark.fault("11")
def test_a_broken_line_that_is_not_the_last_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"trace, line 2, column 13: "):
        read_trace(written(tmp_path, f'{LINE}\n{{"timestamp"\n{LINE}\n'))


@pytest.mark.fault("12")
def test_a_bailian_trace_has_blocks_of_16_tokens_and_seconds(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, BAILIAN))
    assert trace.source.format == "Qwen-Bailian"
    one, two = trace.workload().requests
    assert two.at_seconds == pytest.approx(60)
    assert [segment.num_tokens for segment in one.prompt] == [16, 16, 8]
    assert one.prompt[:2] == two.prompt[:2]
    assert one.prompt[2] != two.prompt[2]


@pytest.mark.fault("12")
@pytest.mark.parametrize("number_of_ids", [3, 4, 38])
def test_a_number_of_ids_that_does_not_fit_the_block_size_is_refused(
    number_of_ids: int, tmp_path: Path
) -> None:
    other = json.dumps({**json.loads(LINE), "hash_ids": list(range(number_of_ids))})
    reason = f"line 2, hash_ids: {number_of_ids} ids for 600 tokens do not fit the blocks of Mooncake"
    with pytest.raises(WorkloadError, match=reason):
        read_trace(written(tmp_path, f"{LINE}\n{other}\n"))


@pytest.mark.fault("12")
def test_the_id_of_a_block_that_is_not_full_may_be_left_out(tmp_path: Path) -> None:
    (request,) = read_trace(written(tmp_path, LINE.replace("[1,2]", "[1]"))).workload().requests
    assert [segment.num_tokens for segment in request.prompt] == [512, 88]


@pytest.mark.fault("12")
def test_lines_of_two_formats_in_one_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="line 3: is not of the format of the first line, Mooncake"):
        read_trace(written(tmp_path, MOONCAKE + BAILIAN))


@pytest.mark.fault("12")
def test_a_second_recording_in_a_file_is_refused(tmp_path: Path) -> None:
    header = '{"pageturner_recording": 1, "block_size": 512}\n'
    with pytest.raises(WorkloadError, match="line 3: another recording begins here"):
        read_trace(written(tmp_path, f"{header}{LINE}\n{header}{LINE}\n"))


@pytest.mark.fault("13")
@pytest.mark.parametrize(
    ("moment", "seconds"),
    [
        ("2024-05-10T00:00:00Z", 0),
        ("2024-05-10 00:00", 0),
        ("2024-05-10T00:00:00.5Z", 0.5),
        ("2024-05-10 00:00:01-07:00", 25201),
        ("2024-05-10 00:00:01+0000", 1),
        ("2024-05-10 00:00:01 UTC", 1),
        ('"2024-05-10 00:00:02.0000001"', 2.0000001),
        ("2024-05-10 00:00:02,25+00", 2.25),
        ("2024-05-11t00:00:00.123456789z", 86400.123456789),
    ],
)
def test_an_azure_moment_is_read_in_every_form(moment: str, seconds: float, tmp_path: Path) -> None:
    if moment.count(",") == 1:
        moment = f'"{moment}"'
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-10 00:00:00,9,9", f"{moment},8,8"]
    (_, at) = read_trace(written(tmp_path, "\n".join(rows))).workload().requests
    assert at.at_seconds == pytest.approx(seconds, abs=1e-9)


@pytest.mark.fault("13", "L")
@pytest.mark.parametrize("moment", ["10/05/2024 00:00", "1715299200", "2024-13-10 00:00:00", ""])
def test_what_is_no_moment_is_refused_with_its_line_and_column(moment: str, tmp_path: Path) -> None:
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,9,9\n{moment},8,8\n"
    with pytest.raises(WorkloadError, match="trace, line 3, TIMESTAMP: "):
        read_trace(written(tmp_path, text))


@pytest.mark.fault("15")
def test_a_quoted_csv_is_read_as_an_unquoted_one(tmp_path: Path) -> None:
    quoted = "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in BURSTGPT.splitlines())
    assert (
        read_trace(written(tmp_path, quoted)).workload() == read_trace(written(tmp_path, BURSTGPT)).workload()
    )


@pytest.mark.fault("15")
@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_another_separator_is_refused_with_the_columns_found(separator: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        read_trace(written(tmp_path, BURSTGPT.replace(",", separator)))
    message = str(caught.value)
    assert "trace, line 1: " in message
    assert repr(BURSTGPT.splitlines()[0].replace(",", separator)) in message
    assert f"separated by commas, not by {separator!r}" in message


@pytest.mark.fault("15")
def test_unknown_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="the columns found are 'time', 'tokens'"):
        read_trace(written(tmp_path, "time,tokens\n1,2\n"))


@pytest.mark.fault("L")
@pytest.mark.parametrize(
    ("text", "place"),
    [
        (BURSTGPT.replace("1087", "many"), "line 3, Request tokens: 'many' is not a whole number"),
        (BURSTGPT.replace("230", "2.5"), "line 3, Response tokens: '2.5' is not a whole number"),
        (BURSTGPT.replace("230", "-1"), "line 3, Response tokens: -1 is not from 0"),
        (BURSTGPT.replace("45,", "soon,"), "line 3, Timestamp: 'soon' is not a number of seconds"),
        (BURSTGPT.replace("45,", "nan,"), "line 3, Timestamp: 'nan' is not a number of seconds"),
        (BURSTGPT.replace("1087", "1,087"), "line 3: has 7 columns, the header 6"),
        (BURSTGPT.replace("\n118", "\n\n\nx"), "line 6, Timestamp: "),
        (BURSTGPT.replace("45,", '"45,'), "line 3: a quotation mark is not closed"),
        (MOONCAKE.replace("1500", '"1500"'), "line 2, input_length: '1500' is not a whole number"),
        (MOONCAKE.replace("30535", "null"), "line 2, timestamp: None is not a number"),
        (
            MOONCAKE.replace("30535", "9" * 400),
            "line 2, timestamp: the number is beyond the range of a double",
        ),
        (MOONCAKE.replace('"output_length": 26', '"output": 26'), "line 2, output_length: is missing"),
        (MOONCAKE.replace("2367", '"x"'), "line 2, hash_ids: is not a list of whole numbers"),
        (MOONCAKE.replace("2367", "-5"), "line 2, hash_ids: an id is not from 0"),
        (f"{LINE}\n7\n{LINE}\n", "line 2: is not a JSON object"),
    ],
)
def test_an_error_in_a_trace_names_file_line_and_column(text: str, place: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        read_trace(written(tmp_path, text))
    assert f"{tmp_path / 'trace'}, {place}" in str(caught.value)


@pytest.mark.fault("L")
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_trace_that_is_no_utf8_is_refused(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(BURSTGPT.replace("GPT-4", "GPT\xe9").encode(encoding))
    with pytest.raises(WorkloadError, match=r"trace, line \d: is not UTF-8 text"):
        read_trace(path)


@pytest.mark.fault("L")
@pytest.mark.parametrize(
    ("text", "note"),
    [
        (BURSTGPT, "1 of 3 requests generated nothing and are left out"),
        (MOONCAKE.replace("52", "0"), "1 of 2 requests generated nothing and are left out"),
    ],
)
def test_requests_that_generated_nothing_are_counted(text: str, note: str, tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, text)).source.notes == (note,)


@pytest.mark.fault("46")
def test_a_trace_is_read_once_and_makes_objects_of_a_window_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pageturner.loadtest.traces import trace as trace_module

    made = 0

    def counted(*arguments: Any, **options: Any) -> TraceRequest:
        nonlocal made
        made += 1
        return TraceRequest(*arguments, **options)

    monkeypatch.setattr(trace_module, "TraceRequest", counted)
    rows = [f"{second},ChatGPT,9,1,10,API log" for second in range(5000)]
    path = written(tmp_path, "\n".join([BURSTGPT.splitlines()[0], *rows]))
    trace = read_trace(path)
    path.unlink()
    for seed in range(5):
        assert len(trace.window(10, seed).requests) == 10
    assert made == 50
