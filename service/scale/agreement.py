"""What all replicas agree on: the policies in force under one revision, and the key of their prefix caches.

Changes of policies add up to one change, which brings a replica that starts later to the same state as those
that saw each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.errors import StaleRevision
from pageturner.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class Agreement:
    """revision: rises with each change of policies; 0 before the first. policies: all changes as one, a
    SetPoliciesRequest serialized. prefix_key: under which all caches hash, so that one chain of hashes names
    a prompt's blocks everywhere."""

    prefix_key: bytes
    revision: int = 0
    policies: bytes = b""

    def check(self, request: admin_pb2.SetPoliciesRequest) -> None:
        """Raise StaleRevision where the request expects another revision."""
        if request.HasField("expected_revision") and request.expected_revision != self.revision:
            raise StaleRevision(request.expected_revision, self.revision)

    def changed(self, request: admin_pb2.SetPoliciesRequest) -> Agreement:
        """With one more change; itself where that changes nothing."""
        merged = merge(admin_pb2.SetPoliciesRequest.FromString(self.policies), request)
        policies = merged.SerializeToString(deterministic=True)
        if policies == self.policies:
            return self
        return Agreement(self.prefix_key, self.revision + 1, policies)

    def with_change_of(self, other: Agreement) -> Agreement:
        """Where a replica has carried out `other`: it where it is newer; both changes under one more
        revision, this one's last, where another change has the same revision; else itself."""
        if other.revision > self.revision:
            return Agreement(self.prefix_key, other.revision, other.policies)
        if other.revision < self.revision or other.policies == self.policies:
            return self
        both = merge(*map(admin_pb2.SetPoliciesRequest.FromString, (other.policies, self.policies)))
        return Agreement(self.prefix_key, self.revision + 1, both.SerializeToString(deterministic=True))


def merge(
    first: admin_pb2.SetPoliciesRequest, then: admin_pb2.SetPoliciesRequest
) -> admin_pb2.SetPoliciesRequest:
    """One change that does what both do, one after the other."""
    merged = admin_pb2.SetPoliciesRequest()
    merged.CopyFrom(first)
    merged.ClearField("expected_revision")
    if then.preset:  # names a policy for every axis, so that nothing said of them before is left
        merged.preset = then.preset
        merged.ClearField("policies")
    for axis, choice in then.policies.items():
        merged.policies[axis].CopyFrom(choice)
    for axis, choice in then.shadows.items():
        merged.shadows[axis].CopyFrom(choice)
    return merged
