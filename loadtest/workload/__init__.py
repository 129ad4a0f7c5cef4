"""What is sent, and when: pure, and the same for the same seed, however many processes send it.

It owns lengths, arrivals, conversations and what readers do, and the named workloads made of them. The runner
asks it for plans, benchmarks do for prompts. Each conversation draws from generators of its own, seeded by
(seed, number), so that a process can make its share of the requests without making the others.
"""

from pageturner.loadtest.workload.lengths import Lengths, Lognormal, Quantiles
from pageturner.loadtest.workload.load import LoadtestWorkload, SystemPrompts
from pageturner.loadtest.workload.mix import Mix
from pageturner.loadtest.workload.plan import (
    FollowUp,
    PlannedConversation,
    PlannedRequest,
    arrivals,
    plan_conversations,
    plan_requests,
)

__all__ = [
    "FollowUp",
    "Lengths",
    "LoadtestWorkload",
    "Lognormal",
    "Mix",
    "PlannedConversation",
    "PlannedRequest",
    "Quantiles",
    "SystemPrompts",
    "arrivals",
    "plan_conversations",
    "plan_requests",
]
