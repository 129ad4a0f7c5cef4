"""A test of a policy, as its author would write it."""

from __future__ import annotations

from dataclasses import replace

from support.policy_views import LOAD, VICTIM, request

from pageturner.policies import registry
from pageturner.policies.testing import check_policy
from pageturner.service.examples.own_policy import BusiestTenant

NAME = f"{BusiestTenant.__module__}:{BusiestTenant.__name__}"


def rank(policy: BusiestTenant, *tenants_and_computed: tuple[str, int]) -> list[str]:
    """The order of requests that are named by their place, with so many tokens computed of 100."""
    candidates = [
        replace(
            VICTIM,
            request=request(str(place), tenant=tenant, num_tokens=100, num_uncomputed_tokens=100 - computed),
        )
        for place, (tenant, computed) in enumerate(tenants_and_computed)
    ]
    return list(policy.rank(candidates, request("claimant"), LOAD))


def test_it_keeps_the_contract_of_its_axis() -> None:
    check_policy("victim", BusiestTenant())


def test_it_is_found_by_its_path_and_takes_its_option() -> None:
    assert registry.create("victim", NAME, {"at_least": 3}) == BusiestTenant(3)


def test_the_busiest_tenants_least_computed_request_yields_first() -> None:
    assert rank(BusiestTenant(), ("a", 50), ("b", 10), ("a", 20), ("a", 90)) == ["2", "0", "3", "1"]


def test_tenants_with_fewer_requests_than_the_option_says_yield_last() -> None:
    assert rank(BusiestTenant(at_least=2), ("a", 1), ("b", 5), ("b", 9)) == ["1", "2", "0"]
