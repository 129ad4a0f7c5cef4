"""The contract that a policy of each axis keeps, as a check that needs nothing but the standard library.

Owns the clauses of each axis and the views that they are tried on. Tests of policies call it:

    from pageturner.policies.testing import check_policy

    def test_my_policy_keeps_its_contract() -> None:
        check_policy("victim", MyVictimPolicy(patience=3))

`pageturner policies check MODULE:CLASS` runs it from a terminal. The same seed shows a policy the same views.
"""

from pageturner.policies.testing.contract import ContractBroken, Verdict, check_policy, try_policy

__all__ = ["ContractBroken", "Verdict", "check_policy", "try_policy"]
