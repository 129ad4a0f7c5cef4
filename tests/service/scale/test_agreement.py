"""Changes of policies add up: a replica that starts late is brought where the others went step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.errors import StaleRevision
from pageturner.service.scale import agreement as agreements
from pageturner.service.scale.agreement import Agreement, merge
from pageturner.v1 import admin_pb2 as pb

AXES = ("queue", "victim", "reclaim")
NAMES = ("x", "y", "z")
choices = st.dictionaries(
    st.sampled_from(AXES), st.builds(lambda name: pb.PolicyChoice(name=name), st.sampled_from(NAMES))
)
shadows = st.dictionaries(
    st.sampled_from(AXES), st.builds(lambda name: pb.PolicyChoice(name=name), st.sampled_from(("", *NAMES)))
)
changes = st.builds(
    lambda policies, shadows, preset: pb.SetPoliciesRequest(
        policies=policies, shadows=shadows, preset=preset
    ),
    choices,
    shadows,
    st.sampled_from(("", "", "p", "q")),
)
State = tuple[dict[str, str], dict[str, str]]


def carried_out(state: State, change: pb.SetPoliciesRequest) -> State:
    """What a scheduler has in force after a change: a model of `Engine.set_policies`."""
    policies, shadowed = dict(state[0]), dict(state[1])
    if change.preset:
        policies = {axis: f"{change.preset} of {axis}" for axis in AXES}
    policies |= {axis: choice.name for axis, choice in change.policies.items()}
    for axis, choice in change.shadows.items():
        shadowed.pop(axis, None)
        if choice.name:
            shadowed[axis] = choice.name
    return policies, shadowed


def check(steps: list[pb.SetPoliciesRequest]) -> None:
    state: State = (dict.fromkeys(AXES, "default"), {})
    start, agreement = state, Agreement(b"key")
    for change in steps:
        state = carried_out(state, change)
        agreement = agreement.changed(change)
    assert carried_out(start, pb.SetPoliciesRequest.FromString(agreement.policies)) == state
    assert agreement.revision <= len(steps)
    assert agreement.prefix_key == b"key"


@given(st.lists(changes, max_size=6))
def test_one_change_does_what_all_of_them_did(steps: list[pb.SetPoliciesRequest]) -> None:
    check(steps)


def test_a_preset_that_leaves_former_choices_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(first: pb.SetPoliciesRequest, then: pb.SetPoliciesRequest) -> pb.SetPoliciesRequest:
        kept = merge(first, then)
        for axis, choice in first.policies.items():
            if axis not in then.policies:
                kept.policies[axis].CopyFrom(choice)
        return kept

    monkeypatch.setattr(agreements, "merge", forgetful)
    with pytest.raises(AssertionError):
        check(
            [
                pb.SetPoliciesRequest(policies={"queue": pb.PolicyChoice(name="x")}),
                pb.SetPoliciesRequest(preset="p"),
            ]
        )


def test_a_change_that_changes_nothing_raises_no_revision_and_a_stale_one_is_refused() -> None:
    change = pb.SetPoliciesRequest(policies={"queue": pb.PolicyChoice(name="x")})
    first = Agreement(b"key").changed(change)
    assert first.revision == 1
    assert first.changed(change) is first
    first.check(pb.SetPoliciesRequest(expected_revision=1))
    first.check(pb.SetPoliciesRequest())
    with pytest.raises(StaleRevision):
        first.check(pb.SetPoliciesRequest(expected_revision=0))
