"""Traces of real traffic, in the formats in which they are published.

BurstGPT   CSV: Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log Type
Azure LLM  CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens (2023 and 2024 alike)
Mooncake   JSONL: timestamp (milliseconds), input_length, output_length, hash_ids (of blocks of 512 tokens)
recording  JSONL of `pageturner serve --record`: a header, then Mooncake's fields, tenant, priority and more

hash_ids name a block and all before it, so equal ids are equal prompts up to there, and become equal
token ids. Requests of the CSV formats share nothing.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest

MOONCAKE_BLOCK_TOKENS = 512
RECORDING_KEY = "pageturner_recording"


def read_trace(path: Path) -> SimulatedWorkload:
    """Every request of a file whose first line tells its format. Requests that generated nothing (they
    failed when the trace was taken) are left out. Raises WorkloadError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            requests = tuple(_reader(first)(file))
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise WorkloadError(f"{path}: {type(error).__name__}: {error}") from error
    if not requests:
        raise WorkloadError(f"{path} has no requests")
    start = min(request.at_seconds for request in requests)
    ordered = sorted(requests, key=lambda request: request.at_seconds)
    return SimulatedWorkload(path.name, tuple(replace(r, at_seconds=r.at_seconds - start) for r in ordered))


def window(trace: SimulatedWorkload, num_requests: int, seed: int) -> SimulatedWorkload:
    """`num_requests` consecutive requests of a trace, from a place that the seed chooses."""
    spare = len(trace.requests) - num_requests
    if spare <= 0:
        return trace
    first = random.Random(f"{seed}/window").randint(0, spare)
    chosen = trace.requests[first : first + num_requests]
    start = chosen[0].at_seconds
    return replace(trace, requests=tuple(replace(r, at_seconds=r.at_seconds - start) for r in chosen))


def _reader(first: str) -> Callable[[Any], Iterator[WorkloadRequest]]:
    columns = [name.strip() for name in first.strip().split(",")]
    if {"Timestamp", "Request tokens", "Response tokens"} <= set(columns):
        return _read_burstgpt
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(columns):
        return _read_azure
    if first.lstrip().startswith("{"):
        return _read_json_lines
    raise ValueError("the first line is none of BurstGPT, Azure LLM, Mooncake or a recording")


def _read_burstgpt(file: Any) -> Iterator[WorkloadRequest]:
    for number, row in enumerate(csv.DictReader(file)):
        yield from _plain(number, float(row["Timestamp"]), row["Request tokens"], row["Response tokens"])


def _read_azure(file: Any) -> Iterator[WorkloadRequest]:
    for number, row in enumerate(csv.DictReader(file)):
        at_seconds = _seconds_of(row["TIMESTAMP"])
        yield from _plain(number, at_seconds, row["ContextTokens"], row["GeneratedTokens"])


def _seconds_of(moment: str) -> float:
    """Of 2023-11-16 18:15:46.6805900 or 2024-05-10 00:00:00.009930+00:00; datetime takes six digits."""
    date, _, rest = moment.partition(".")
    digits = rest[: next((i for i, c in enumerate(rest) if not c.isdigit()), len(rest))]
    zone = rest[len(digits) :] or "+00:00"
    return datetime.fromisoformat(date + ("" if zone in date else zone)).timestamp() + float(
        f"0.{digits or 0}"
    )


def _plain(number: int, at_seconds: float, prompt: str, output: str) -> Iterator[WorkloadRequest]:
    num_prompt, num_output = int(prompt), int(output)
    if num_prompt and num_output:
        key = 1 + 2 * number
        yield WorkloadRequest(at_seconds, (Segment(key, num_prompt),), Segment(key + 1, num_output))


def _read_json_lines(file: Any) -> Iterator[WorkloadRequest]:
    block_tokens, keys = MOONCAKE_BLOCK_TOKENS, iter(range(1, 1 << 40))
    key_of: dict[int, int] = {}  # of a hash id; 63-bit ids leave no room for positions
    for line in file:
        entry = json.loads(line)
        if RECORDING_KEY in entry:
            block_tokens = int(entry["block_size"])
            continue
        if "step" in entry:
            continue
        num_prompt, num_output = int(entry["input_length"]), int(entry["output_length"])
        if not num_prompt or not num_output:
            continue
        prompt = []
        for position, hash_id in enumerate(entry.get("hash_ids", ())):
            num_tokens = min(block_tokens, num_prompt - position * block_tokens)
            if num_tokens < 1:
                break
            if hash_id not in key_of:
                key_of[hash_id] = next(keys)
            prompt.append(Segment(key_of[hash_id], num_tokens))
        num_rest = num_prompt - sum(segment.num_tokens for segment in prompt)
        if num_rest:
            prompt.append(Segment(next(keys), num_rest))
        yield WorkloadRequest(
            float(entry["timestamp"]) / 1e3,
            tuple(prompt),
            Segment(next(keys), num_output),
            tenant=str(entry.get("tenant", "")),
            priority=int(entry.get("priority", 0)),
            deadline_seconds=entry.get("deadline_seconds"),
            num_choices=int(entry.get("num_choices", 1)),
            max_tokens=entry.get("max_tokens"),
        )
