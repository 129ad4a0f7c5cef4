"""A real service records itself, and what it wrote can be fitted and replayed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.random_models import save, tiny_model

from pageturner.policies import registry
from pageturner.service.cli import main
from pageturner.service.client import Client
from pageturner.service.client.server_process import running_server
from pageturner.service.simulator.recordings import fit_machine
from pageturner.service.simulator.simulation import simulate
from pageturner.service.simulator.traces import read_trace

SECRET = (31, 41, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95)


def test_a_service_records_itself(tmp_path: Path) -> None:
    _, tiny = tiny_model("llama", seed=0)
    save(tiny, tmp_path / "model")
    recording = tmp_path / "recording.jsonl"
    flags = [
        f"--model={tmp_path / 'model'}",
        "--num-blocks=64",
        "--swap-space=0",
        "--device=cpu",
        "--num-threads=1",
    ]

    async def ask(target: str) -> None:
        async with Client(target) as client:
            for tail in ((1, 2), (3,)):
                await client.generate((*SECRET, *tail), max_tokens=5, ignore_eos=True, temperature=0.0)

    with running_server([*flags, f"--record={recording}"]) as server:
        asyncio.run(ask(server.target))
    trace = read_trace(recording).workload()
    assert [(r.num_prompt_tokens, r.output.num_tokens) for r in trace.requests] == [(18, 5), (17, 5)]
    assert trace.requests[0].prompt[0] == trace.requests[1].prompt[0]  # the block of 16 that they share
    found = fit_machine(recording)
    machine, error = found.machine, found.error
    assert machine.cache.num_blocks == 64
    assert error.num_steps == 10
    assert machine.step_time.a_swap_out > 0  # never swapped, so as the engine measured it at its start
    assert machine.step_time.a_swap_in > 0
    result = simulate(trace, machine, registry.default_policies())
    assert result.requests[1].num_cached_tokens == 16
    assert ", ".join(map(str, SECRET[:4])) not in recording.read_text()


def test_a_file_that_cannot_be_written_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    assert main(["serve", "--model=none", f"--record={tmp_path / 'no' / 'folder'}"]) == 2
