"""SetPolicies over a real channel: with the real scheduler behind it, and with the scripted engine."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from support.fake_engine import FakeEngine
from support.fake_model import Stop, expected_tokens
from support.policy_bench import PolicyBench, policy_bench
from support.serving import serving

from pageturner.policies import registry
from pageturner.policies.interfaces import AXES, KeyChange
from pageturner.policies.spec import PolicySpec
from pageturner.service.client import Completion, FinishedEvent, TokenEvent
from pageturner.service.engine.api import EngineHealth, PolicyChange
from pageturner.service.engine.thread_messages import ChangePolicies
from pageturner.service.errors import Draining, InvalidArgument, StaleRevision
from pageturner.service.rpc.from_wire import to_policy_change
from pageturner.v1 import admin_pb2, admin_pb2_grpc

NAMES = {axis: registry.names(axis) for axis in AXES}


@dataclass(frozen=True)
class Fails:
    """Raises whenever it is asked."""

    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    def key(self, *_: object) -> Any:
        raise ValueError("planted")


@dataclass(frozen=True)
class Takes:
    """Takes `seconds` of the clock each time it is asked, and leaves by SystemExit if it is told to."""

    clock: Any
    seconds: float = 0.0
    leaves: bool = False
    gate: threading.Event | None = None
    is_asked: threading.Event = field(default_factory=threading.Event)
    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    def key(self, *_: object) -> Any:
        self.clock.advance(self.seconds)
        self.is_asked.set()
        if self.gate is not None:
            self.gate.wait(60)
        if self.leaves:
            raise SystemExit(1)
        return (0,)


async def put_in_force(bench: PolicyBench, **policies: object) -> None:
    """As `set_policies`, with the objects themselves."""
    bench.engine._send(ChangePolicies(-1, policies, {}))


FAILS = f"{Fails.__module__}:Fails"


def names_of(info: Any) -> dict[str, str]:
    return {policy.axis: policy.name for policy in info.axes}


async def test_policies_are_set_shown_and_logged() -> None:
    async with policy_bench() as bench, serving(bench.engine) as served:
        client = served.client
        before = await client.policies()
        assert before.revision == 1
        assert names_of(before) == {axis: registry.DEFAULTS[axis] for axis in AXES}
        info = await client.set_policies(
            {"victim": PolicySpec("last-arrived"), "reclaim": PolicySpec("cost-model", {"swap_weight": 2})},
            shadows={"queue": PolicySpec("priority")},
            expected_revision=1,
        )
        assert info == await client.policies()
        assert info.revision == 2
        changed = {axis for axis, name in names_of(info).items() if name != registry.DEFAULTS[axis]}
        assert changed == {"victim"}
        by_axis = {policy.axis: policy for policy in info.axes}
        assert by_axis["reclaim"].options["swap_weight"] == 2.0
        assert by_axis["queue"].shadow is not None
        assert by_axis["queue"].shadow.name == "priority"
        gone = await client.set_policies(shadows={"queue": None})
        assert all(policy.shadow is None for policy in gone.axes)
        assert names_of(gone)["victim"] == "last-arrived", "left out, hence left alone"
    audit = [entry for entry in bench.log if entry["event"] == "policies_set"]
    assert [entry["revision"] for entry in audit] == [2, 3]
    assert audit[0]["origin"].startswith("peer ipv4:127.0.0.1:")
    assert audit[0]["old"]["victim"].startswith("least-computed(")
    assert audit[0]["new"]["victim"] == "last-arrived()"
    assert "swap_weight=2.0" in audit[0]["new"]["reclaim"]
    assert set(audit[0]["new"]) == {"victim", "reclaim", "queue"}


async def test_a_preset_sets_all_axes_and_what_is_named_goes_over_it() -> None:
    async with policy_bench() as bench, serving(bench.engine) as served:
        info = await served.client.set_policies({"victim": PolicySpec("least-computed")}, preset="vllm-v1")
        assert names_of(info)["reclaim"] == "always-recompute"
        assert names_of(info)["victim"] == "least-computed"
        with pytest.raises(InvalidArgument, match="no preset 'vllm-v7'") as caught:
            await served.client.set_policies(preset="vllm-v7")
        assert caught.value.field == "preset"


async def test_a_stale_revision_is_refused() -> None:
    async with policy_bench() as bench, serving(bench.engine) as served:
        first, second = (
            served.client.set_policies({"victim": PolicySpec(name)}, expected_revision=1)
            for name in ("last-arrived", "lowest-priority")
        )
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["PoliciesInfo", "StaleRevision"]
        (winner,) = (result for result in results if not isinstance(result, BaseException))
        assert await served.client.policies() == winner
        with pytest.raises(StaleRevision, match="at revision 2, not 1"):
            await served.client.set_policies({"victim": PolicySpec("last-arrived")}, expected_revision=1)
    assert [entry["event"] for entry in bench.log].count("policies_refused") == 2


@pytest.mark.parametrize(
    ("policies", "shadows", "field"),
    [
        ({"victims": PolicySpec("last-arrived")}, {}, "policies[victims]"),
        ({"victim": PolicySpec("last-arived")}, {}, "policies[victim].name"),
        ({"victim": PolicySpec("no.such.module:X")}, {}, "policies[victim].name"),
        ({}, {"victim": PolicySpec("no.such.module:X")}, "shadows[victim].name"),
        ({"victim": PolicySpec("")}, {}, "policies[victim].name"),
        ({"reclaim": PolicySpec("cost-model", {"x": 1})}, {}, "policies[reclaim].options[x]"),
        (
            {"reclaim": PolicySpec("cost-model", {"swap_weight": "heavy"})},
            {},
            "policies[reclaim].options[swap_weight]",
        ),
        ({}, {"queue": PolicySpec("fcfs", {"x": 1})}, "shadows[queue].options[x]"),
        ({}, {}, "policies"),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_changed(
    policies: dict[str, PolicySpec], shadows: dict[str, PolicySpec | None], field: str
) -> None:
    good = {"queue": PolicySpec("priority"), "eviction": PolicySpec("lru")} if policies else {}
    async with policy_bench() as bench, serving(bench.engine) as served:
        before = await served.client.policies()
        with pytest.raises(InvalidArgument) as caught:
            await served.client.set_policies(good | policies, shadows=shadows)
        assert caught.value.field == field
        assert await served.client.policies() == before


async def test_clients_import_nothing_unless_they_may() -> None:
    change = {"queue": PolicySpec(FAILS)}
    async with policy_bench() as bench, serving(bench.engine) as served:
        with pytest.raises(InvalidArgument, match=r"server\.allow_policy_imports"):
            await served.client.set_policies(change)
        await bench.engine.set_policies(PolicyChange(change))
        assert bench.engine.policies().axes[0].name == FAILS, "the server's own configuration may"


async def test_options_that_are_no_json_are_refused() -> None:
    async with policy_bench() as bench, serving(bench.engine) as served:
        stub = admin_pb2_grpc.AdminServiceStub(served.channel)
        for text, reason in (("{", "is not JSON"), ("[" * 100_000, "is nested too deeply")):
            choice = admin_pb2.PolicyChoice(name="cost-model", options={"swap_weight": text})
            with pytest.raises(Exception, match=rf"policies\[reclaim\].options\[swap_weight\]: {reason}"):
                await stub.SetPolicies(admin_pb2.SetPoliciesRequest(policies={"reclaim": choice}))
        assert (await served.client.policies()).revision == 1


async def test_streams_go_on_while_every_axis_is_swapped() -> None:
    async with policy_bench() as bench, serving(bench.engine) as served:
        is_done = asyncio.Event()

        async def swap() -> int:
            count = 0
            while not is_done.is_set():
                axis = AXES[count % len(AXES)]
                name = NAMES[axis][count // len(AXES) % len(NAMES[axis])]
                await served.client.set_policies({axis: PolicySpec(name)})
                count += 1
            return count

        async def use(i: int) -> Completion:
            prompt = tuple((i * j) % 3 for j in range(1 + i % 7))
            answer = await served.client.generate(prompt, max_tokens=12, n=1 + i % 2, seed=i)
            for choice in answer.choices:
                tokens = [token.token_id for token in choice.tokens]
                assert tokens == expected_tokens(prompt, i, choice.index, Stop(12))
            return answer

        swapping = asyncio.ensure_future(swap())
        answers = await asyncio.gather(*map(use, range(48)))
        is_done.set()
        assert await swapping > 6
        assert any(answer.policies_changed for answer in answers)
        assert all(set(answer.policies) == set(AXES) for answer in answers)
        calm = await served.client.generate((0, 1), max_tokens=2)
        assert not calm.policies_changed
        assert calm.policies == names_of(await served.client.policies())
    bench.scheduler.check_integrity()


async def test_the_final_message_of_a_stream_names_the_policies() -> None:
    async with policy_bench() as bench, serving(bench.engine) as served:
        items = [item async for item in served.client.stream((0, 1), max_tokens=2)]
        assert isinstance(items[1], TokenEvent)
        (end,) = (item for item in items if isinstance(item, FinishedEvent))
        assert end.policies == {axis: registry.DEFAULTS[axis] for axis in AXES}
        assert not end.policies_changed


async def test_a_quarantine_is_shown_and_logged_once() -> None:
    async with (
        policy_bench(max_policy_faults=3) as bench,
        serving(bench.engine, allow_policy_imports=True) as served,
    ):
        await served.client.set_policies({"queue": PolicySpec(FAILS)})
        for _ in range(5):
            await served.client.generate((0, 1), max_tokens=2)
        queue = (await served.client.policies()).axes[0]
        assert (queue.name, queue.is_quarantined, queue.num_faults) == (FAILS, True, 3)
        assert queue.last_fault == "raised ValueError('planted')"
        answer = await served.client.generate((0, 1), max_tokens=2)
        assert answer.policies["queue"] == "fcfs", "what decides, not what was chosen"
    (entry,) = [entry for entry in bench.log if entry["event"] == "policy_quarantined"]
    assert (entry["axis"], entry["policy"], entry["num_faults"]) == ("queue", FAILS, 3)
    assert "planted" in entry["last_fault"]


async def test_a_draining_engine_keeps_its_policies() -> None:
    async with policy_bench() as bench, serving(bench.engine) as served:
        await bench.engine.drain(0.0)
        with pytest.raises(Draining):
            await served.client.set_policies({"queue": PolicySpec("priority")})
        assert (await served.client.policies()).revision == 1


async def test_the_wire_carries_the_change_as_it_was_meant() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        assert await served.client.policies() == engine.policies()
        await served.client.set_policies(
            {"queue": PolicySpec("priority", {"x": [1, None], "y": "z"})},
            shadows={"admission": None, "queue": PolicySpec("fcfs")},
            preset="p",
            expected_revision=3,
        )
        (change,) = engine.policy_changes
    assert change == PolicyChange(
        {"queue": PolicySpec("priority", {"x": [1, None], "y": "z"})},
        {"admission": None, "queue": PolicySpec("fcfs")},
        "p",
        3,
        change.origin,
    )
    assert json.dumps(change.origin).startswith('"peer ipv4:')


@pytest.mark.fault("I")
async def test_a_policy_that_leaves_by_system_exit_ends_neither_engine_nor_request() -> None:
    async with policy_bench() as bench, serving(bench.engine) as served:
        await put_in_force(bench, queue=Takes(bench.clock, leaves=True))
        answers = await asyncio.gather(*(served.client.generate((0, 1), max_tokens=2) for _ in range(12)))
        assert all(len(answer.choices[0].tokens) == 2 for answer in answers)
        queue = (await served.client.policies()).axes[0]
        assert (queue.is_quarantined, queue.last_fault) == (True, "raised SystemExit(1)")
        assert bench.engine.health is EngineHealth.SERVING
    told = [entry for entry in bench.log if entry["event"] == "policy_fault"]
    assert [entry["num_faults"] for entry in told] == [1, 2, 4, 8]
    assert told[0]["wanted"].startswith("a tuple")
    assert "raise SystemExit(1)" in told[0]["traceback"]


@pytest.mark.fault("I")
async def test_a_policy_beyond_its_budget_is_quarantined_and_its_time_shown() -> None:
    async with policy_bench() as bench, serving(bench.engine) as served:
        await put_in_force(bench, queue=Takes(bench.clock, seconds=2.0))
        for _ in range(5):
            await served.client.generate((0, 1), max_tokens=2)
        queue = (await served.client.policies()).axes[0]
        assert queue.is_quarantined
        assert queue.quarantine_reason.endswith("ms a step over the last 64 steps; 50 ms are allowed")
        assert (queue.num_calls, queue.seconds, queue.num_faults) == (5, 10.0, 0)
        assert queue.step_seconds > 0.05
    (entry,) = [entry for entry in bench.log if entry["event"] == "policy_quarantined"]
    assert entry["reason"] == queue.quarantine_reason


@pytest.mark.fault("I")
async def test_a_policy_that_does_not_answer_is_shown_while_it_hangs_and_logged_once() -> None:
    async with policy_bench() as bench, serving(bench.engine) as served:
        gate = threading.Event()
        hangs = Takes(bench.clock, gate=gate)
        await put_in_force(bench, queue=hangs)
        asked = asyncio.ensure_future(served.client.generate((0, 1), max_tokens=2))
        assert await asyncio.to_thread(hangs.is_asked.wait, 60)
        bench.clock.advance(31.0)
        bench.engine._watchdog.check()
        bench.engine._watchdog.check()
        assert bench.engine.health is EngineHealth.STALLED
        by_axis = {policy.axis: policy.asking_seconds for policy in (await served.client.policies()).axes}
        assert by_axis["queue"] == 31.0
        assert max(seconds for axis, seconds in by_axis.items() if axis != "queue") == 0.0
        gate.set()
        await asked
    (entry,) = [entry for entry in bench.log if entry["event"] == "engine_stalled"]
    assert entry["policy"].startswith("queue policy ")
    assert entry["policy"].endswith(":Takes has not answered")


@pytest.mark.fault("I")
async def test_a_policy_whose_making_leaves_by_system_exit_is_refused() -> None:
    async with policy_bench() as bench:
        for name in ("Leaves", "LeavesAtImport", "Interrupts"):
            change = PolicyChange({"queue": PolicySpec(f"support.leaving:{name}")})
            with pytest.raises(InvalidArgument, match=r"SystemExit|KeyboardInterrupt") as caught:
                await bench.engine.set_policies(change)
            assert caught.value.field == "policies[queue].name"


def choices(count: int, **choice: Any) -> dict[str, admin_pb2.PolicyChoice]:
    return {f"axis{i}": admin_pb2.PolicyChoice(**choice) for i in range(count)}


@pytest.mark.fault("O", "R")
@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (admin_pb2.SetPoliciesRequest(policies=choices(17)), "policies"),
        (admin_pb2.SetPoliciesRequest(shadows=choices(17)), "shadows"),
        (admin_pb2.SetPoliciesRequest(preset="p" * 257), "preset"),
        (admin_pb2.SetPoliciesRequest(policies=choices(1, name="n" * 257)), "policies[axis0].name"),
        (
            admin_pb2.SetPoliciesRequest(policies=choices(1, options={f"o{i}": "1" for i in range(65)})),
            "policies[axis0].options",
        ),
        (
            admin_pb2.SetPoliciesRequest(policies=choices(1, options={"o": "1" * ((1 << 17) + 1)})),
            "policies[axis0].options[o]",
        ),
    ],
    ids=["policies", "shadows", "preset", "name", "options", "option"],
)
def test_counts_and_sizes_are_refused_before_anything_is_read(
    request_: admin_pb2.SetPoliciesRequest, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", None)  # not even an option is
    with pytest.raises(InvalidArgument, match="at most") as caught:
        to_policy_change(request_, "test")
    assert caught.value.field == field
