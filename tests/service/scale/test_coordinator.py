"""All replicas come to one agreement, whichever of them die, start late, or are not reached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.service.errors import InvalidArgument, StaleRevision
from pageturner.service.scale import coordinator as coordinators
from pageturner.service.scale.agreement import Agreement
from pageturner.service.scale.calls import Call, Failure, ReplicaLost
from pageturner.service.scale.coordinator import Coordinator
from pageturner.v1 import admin_pb2 as pb


@dataclass
class FakeReplica:
    """Carries agreements out as `EngineReplica.agree` does, on a mapping in place of an engine."""

    agreement: Agreement
    policies: dict[str, str] = field(default_factory=dict)
    is_reached: bool = True
    loses_answers: bool = False

    def agree(self, agreement: Agreement, change: bytes, call: Call) -> bytes | Failure:
        if agreement.revision > self.agreement.revision:
            is_next = agreement.revision == self.agreement.revision + 1
            request = pb.SetPoliciesRequest.FromString(change if is_next and change else agreement.policies)
            if any(choice.name == "bad" for choice in request.policies.values()):
                return Failure.of(InvalidArgument("policies[queue].name", "bad"))
            self.policies |= {axis: choice.name for axis, choice in request.policies.items()}
            self.agreement = agreement
        return pb.SetPoliciesResponse(revision=self.agreement.revision).SerializeToString()


class FakeEngines:
    def __init__(self) -> None:
        self.replicas: list[FakeReplica] = []

    async def one(self, method_name: str, *arguments: Any) -> Any:
        replica = next(each for each in self.replicas if each.is_reached)
        answer = getattr(replica, method_name)(*arguments)
        if replica.loses_answers:
            raise ReplicaLost("it did, and its answer is lost")
        return answer

    async def all(self, method_name: str, *arguments: Any) -> list[Any]:
        found: list[Any] = []
        for each in self.replicas:
            if not each.is_reached:
                found.append(RuntimeError("not reached"))
            elif method_name == "agreement":
                found.append(each.agreement)
            else:
                found.append(each.agree(*arguments))
        return found

    async def start(self, coordinator: Coordinator) -> None:
        agreement = await coordinator.join()
        replica = FakeReplica(Agreement(agreement.prefix_key))
        assert not isinstance(replica.agree(agreement, b"", Call()), Failure)
        self.replicas.append(replica)


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "LOOK_SECONDS", 0.0)


def coordinator_of(engines: FakeEngines, keys: Callable[[int], bytes] | None = None) -> Coordinator:
    return Coordinator(lambda: engines, keys or (lambda size: b"k" * size))


def change(axis: str, name: str, expected: int | None = None) -> bytes:
    request = pb.SetPoliciesRequest(policies={axis: pb.PolicyChoice(name=name)})
    if expected is not None:
        request.expected_revision = expected
    return request.SerializeToString()


def revision_of(answer: bytes | Failure) -> int:
    assert isinstance(answer, bytes)
    return pb.SetPoliciesResponse.FromString(answer).revision


moves = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from(("queue", "victim")), st.sampled_from(("x", "y"))),
        st.sampled_from((("start",), ("die",), ("lose",), ("find",), ("restart",))),
    ),
    max_size=14,
)


@settings(deadline=None)
@given(moves)
async def test_every_replica_is_where_the_changes_led(steps: list[tuple[str, ...]]) -> None:
    engines, wanted, last = FakeEngines(), dict[str, str](), 0
    coordinator = coordinator_of(engines)
    await engines.start(coordinator)
    for step in steps:
        reached = [each for each in engines.replicas if each.is_reached]
        match step:
            case ("set", axis, name):
                changes = wanted.get(axis) != name
                revision = revision_of(await coordinator.set_policies(change(axis, name), Call()))
                assert revision == last + changes, "one revision for all, raised by what changes something"
                wanted[axis], last = name, revision
            case ("start",):
                await engines.start(coordinator)
            case ("die",) if len(reached) > 1:
                engines.replicas.remove(reached[0])
            case ("lose",) if len(reached) > 1:
                reached[0].is_reached = False
            case ("find",):
                for each in engines.replicas:
                    each.is_reached = True
                    # What a replica does every few seconds.
                    each.agree(await coordinator.join(each.agreement), b"", Call())
            case ("restart",):
                coordinator = coordinator_of(engines, lambda size: b"other" * size)
        for each in engines.replicas:
            if each.is_reached:
                assert (each.policies, each.agreement.revision) == (wanted, last)
    assert (await coordinator.join()).prefix_key == b"k" * coordinators.KEY_BYTES, "the key outlives it"


async def test_what_a_replica_refuses_is_in_force_nowhere() -> None:
    engines = FakeEngines()
    coordinator = coordinator_of(engines)
    for _ in range(3):
        await engines.start(coordinator)
    answer = await coordinator.set_policies(change("queue", "bad"), Call())
    assert isinstance(answer, Failure)
    assert isinstance(answer.error(), InvalidArgument)
    assert [each.agreement.revision for each in engines.replicas] == [0, 0, 0]
    assert revision_of(await coordinator.set_policies(change("queue", "x", expected=0), Call())) == 1


async def test_a_revision_that_is_over_is_refused() -> None:
    engines = FakeEngines()
    coordinator = coordinator_of(engines)
    await engines.start(coordinator)
    await coordinator.set_policies(change("queue", "x"), Call())
    answer = await coordinator.set_policies(change("queue", "y", expected=0), Call())
    assert isinstance(answer, Failure)
    assert isinstance(answer.error(), StaleRevision)
    assert engines.replicas[0].policies == {"queue": "x"}


async def test_a_replica_starts_while_a_change_waits_for_one() -> None:
    """With no replica left: the change waits for the one that starts, and that one for nobody."""
    engines, come = FakeEngines(), asyncio.Event()
    coordinator = coordinator_of(engines)
    key = (await coordinator.join()).prefix_key

    async def one(method_name: str, *arguments: Any) -> Any:
        await come.wait()
        return engines.replicas[0].agree(*arguments)

    engines.one = one  # type: ignore[method-assign]
    changing = asyncio.create_task(coordinator.set_policies(change("queue", "x"), Call()))
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await engines.start(coordinator)
        come.set()
        assert revision_of(await changing) == 1
    assert engines.replicas[0].policies == {"queue": "x"}
    assert engines.replicas[0].agreement.prefix_key == key


async def reconcile(engines: FakeEngines, coordinator: Coordinator) -> None:
    for _ in range(2):
        for each in engines.replicas:
            each.agree(await coordinator.join(each.agreement), b"", Call())


async def test_a_change_whose_first_replica_dies_of_it_is_tried_at_others() -> None:
    engines = FakeEngines()
    coordinator = coordinator_of(engines)
    for _ in range(2):
        await engines.start(coordinator)
    engines.replicas[0].loses_answers = True
    one, tries = engines.one, []

    async def dying(method_name: str, *arguments: Any) -> Any:
        tries.append(method_name)
        try:
            return await one(method_name, *arguments)
        except ReplicaLost:
            engines.replicas.pop(0)
            raise

    engines.one = dying  # type: ignore[method-assign]
    assert revision_of(await coordinator.set_policies(change("queue", "x"), Call())) == 1
    assert len(tries) == 2
    assert engines.replicas[0].policies == {"queue": "x"}


@pytest.mark.parametrize("meanwhile", [False, True])
async def test_a_change_that_was_carried_out_unheard_comes_into_force_for_all(meanwhile: bool) -> None:
    """Its replica hung, and lives on. meanwhile: another change got the same revision."""
    engines = FakeEngines()
    coordinator = coordinator_of(engines)
    for _ in range(3):
        await engines.start(coordinator)
    hung = engines.replicas[0]
    hung.loses_answers = True
    with pytest.raises(ReplicaLost):
        await coordinator.set_policies(change("queue", "x"), Call())
    wanted = {"queue": "x"}
    if meanwhile:
        hung.is_reached = False
        assert revision_of(await coordinator.set_policies(change("victim", "y"), Call())) == 1
        wanted["victim"] = "y"
    await reconcile(engines, coordinator)
    assert [each.policies for each in engines.replicas] == [wanted] * 3
    assert {each.agreement.revision for each in engines.replicas} == {2 if meanwhile else 1}
