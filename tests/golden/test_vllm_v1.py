"""Under the presets for vLLM v1 the real scheduler decides as vLLM's own did, step for step.

The traces were recorded by record_vllm_v1.py from vLLM's scheduler, which no test needs: in each step who is
scheduled, in which order and for how many tokens, and who is preempted. They are compared whole.

Where the core departs from vLLM by design there is no trace to compare, and the workloads keep clear of it:
- a waiting request that could claim blocks or slots from a lower priority (there it just waits);
- a victim whose blocks a later, larger victim makes needless (here it is spared);
- a chunk of a prompt that lacks blocks (here it is shortened to those there are, there its request yields);
- a prompt block that another request computes in this very step (here it is waited for, there it is shared);
- a prompt that is cached to its last block (here one token is computed again, there a block);
- a request that waits past the bound after which it is champion: steps last 10 ms, so that none does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.core_harness import NoText

from pageturner.policies.presets import Preset, find_preset
from pageturner.policies.views import Rates
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import SampledSequence, SampledToken, SchedulerOutput
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler

STEP_SECONDS = 0.01
TRACES = {path.stem: path for path in sorted((Path(__file__).parent / "vllm_v1").glob("*.json"))}
PRESET_OF = {"fcfs": "vllm-v1", "priority": "vllm-v1-priority"}


class Replay:
    """One recorded workload under our scheduler; outputs and prompts by the rule of the recorder."""

    def __init__(self, trace: dict[str, Any], preset: Preset) -> None:
        chosen = trace["settings"]
        options = SchedulerOptions(
            max_model_len=chosen["max_model_len"],
            max_num_seqs=chosen["max_num_seqs"],
            max_num_batched_tokens=chosen["max_num_batched_tokens"],
            **preset.core_options,  # type: ignore[arg-type]  # by name; test_presets checks them
        )
        cache = CacheOptions(
            chosen["num_blocks"], chosen["block_size"], 0, bool(chosen["enable_prefix_caching"])
        )
        self.scheduler = Scheduler(options, cache, preset.policies, NoText(), Rates(), hash_key=b"golden")
        self.requests = trace["requests"]
        self.num_outputs = [0] * len(self.requests)

    def add(self, number: int, now: float) -> None:
        made = self.requests[number]
        prompt = [1000 * name + index for name, length in made["prompt"] for index in range(length)]
        params = SamplingParams(max_tokens=made["max_tokens"], ignore_eos=True)
        priority = -made["priority"]  # in vLLM smaller is more urgent
        self.scheduler.add_request(NewRequest(str(number), tuple(prompt), params, 0, now, priority=priority))

    def step(self, now: int) -> dict[str, Any]:
        """What the step decided, as the recorder writes it."""
        for number, made in enumerate(self.requests):
            if made["arrival"] == now:
                self.add(number, STEP_SECONDS * now + 1e-6 * number)
        running = [request.request_id for request in self.scheduler.state.running.values()]
        output = self.scheduler.schedule(STEP_SECONDS * now)
        kept = {request.request_id for request in self.scheduler.state.running.values()}
        if output:
            self.scheduler.update(output, tuple(self.sampled(output)), STEP_SECONDS * now)
        return {
            "scheduled": [[int(part.request_id), part.end - part.start] for part in output.scheduled],
            "preempted": [int(name) for name in reversed(running) if name not in kept],
        }

    def sampled(self, output: SchedulerOutput) -> list[SampledSequence]:
        made = []
        for part in output.scheduled:
            for row in part.samples:
                number = int(part.request_id)
                token = 500_000 + 1000 * number + self.num_outputs[number]
                self.num_outputs[number] += 1
                made.append(SampledSequence(row.seq_id, row.epoch, (SampledToken(token),)))
        return made


@pytest.mark.parametrize("name", TRACES)
def test_every_step_is_decided_as_in_vllm(name: str) -> None:
    trace = json.loads(TRACES[name].read_text())
    replay = Replay(trace, find_preset(PRESET_OF[trace["settings"]["policy"]]))
    for now, expected in enumerate(trace["steps"]):
        assert replay.step(now) == expected, f"step {now} of {name}"
    assert not replay.scheduler.has_work()


@pytest.mark.parametrize("name", ["tiny_pool", "crowd_of_short", "crowd_of_long", "prefixes_preempted"])
def test_other_policies_decide_otherwise(name: str) -> None:
    trace = json.loads(TRACES[name].read_text())
    replay = Replay(trace, find_preset("pageturner"))
    assert any(replay.step(now) != expected for now, expected in enumerate(trace["steps"]))


def test_the_traces_show_what_they_are_for() -> None:
    """Chunks, preemptions of both kinds of order, and prefix hits: else agreement would say little."""
    steps = {name: json.loads(path.read_text())["steps"] for name, path in TRACES.items()}
    num_preempted = {name: sum(len(step["preempted"]) for step in steps[name]) for name in steps}
    assert {name for name, number in num_preempted.items() if number} == {
        "tiny_pool",
        "tiny_pool_arrivals",
        "prefixes_preempted",
        "crowd_of_short",
        "crowd_of_long",
        "crowd_in_few_slots",
        "priorities",
    }
    chunks = [number for step in steps["chunked"] for who, number in step["scheduled"] if who == 1]
    assert sum(number > 1 for number in chunks) > 3
    assert dict(steps["prefixes"][3]["scheduled"])[1] == 61 - 48
