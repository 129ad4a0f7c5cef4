"""Settings in which routing policies differ: what is asked, of how many servers, through how many routers.

Rates are for 16 servers of an 8B model on an H100 each, and scale with their number. The shapes follow what
is published of traces: lognormal lengths over two orders of magnitude (Azure, BurstGPT), conversations whose
prompts hold all before them, and system prompts of Zipf's popularity (Mooncake, Qwen-Bailian).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pageturner.service.simulator.fleet_setup import FleetSetup
from pageturner.service.simulator.synthetic import Synthetic

NUM_SERVERS = 16


@dataclass(frozen=True, slots=True)
class RoutingCase:
    """One setting. why: in words. best: the policy that wins, alone or with others. metric: of METRICS.
    num_blocks: of each server's pool."""

    name: str
    why: str
    best: str
    recipe: Synthetic
    fleet: FleetSetup
    metric: str = "ttft_mean"
    num_blocks: int = 24700

    def on(self, num_servers: int) -> RoutingCase:
        """The same load a server, on so many."""
        factor = num_servers / self.fleet.num_replicas
        recipe = replace(
            self.recipe,
            requests=max(1, round(self.recipe.requests * factor)),
            rate=self.recipe.rate * factor,
            groups=self.recipe.groups if self.recipe.groups <= 1 else round(self.recipe.groups * factor) or 1,
        )
        return replace(self, recipe=recipe, fleet=replace(self.fleet, num_replicas=num_servers))


ONE = FleetSetup(NUM_SERVERS, is_coarse=True)
MANY = replace(ONE, num_routers=32, report_seconds=0.5)
UNEQUAL = Synthetic(
    requests=2500, rate=120, prompt=500, prompt_sigma=1.4, output=150, output_sigma=0.8, longest=30000
)
CHATS = Synthetic(requests=500, rate=40, prompt=400, prompt_sigma=1.0, output=200, turns=5, think=5)
AGENTS = Synthetic(
    requests=250,
    rate=12,
    prompt=1500,
    prompt_sigma=0.8,
    output=150,
    turns=8,
    think=2,
    groups=20,
    shared=4000,
)

CASES: tuple[RoutingCase, ...] = (
    RoutingCase("chats", "conversations of five turns", "prefix-aware", CHATS, ONE),
    RoutingCase("agents", "eight turns on 20 system prompts of 4,000 tokens", "prefix-aware", AGENTS, ONE),
    RoutingCase(
        "agents, small pools",
        "the same where a server holds a quarter as much",
        "prefix-aware",
        AGENTS,
        ONE,
        num_blocks=6000,
    ),
    RoutingCase(
        "system prompts",
        "200 system prompts of 3,000 tokens, short questions",
        "prefix-aware",
        Synthetic(requests=2500, rate=150, prompt=200, output=80, groups=200, shared=3000, group_skew=0.8),
        ONE,
    ),
    RoutingCase(
        "one short prefix",
        "one system prompt of 512 tokens, which all servers soon hold, before very unequal prompts",
        "least-tokens",
        Synthetic(
            requests=2500,
            rate=250,
            prompt=500,
            prompt_sigma=1.4,
            output=80,
            groups=1,
            shared=512,
            longest=12000,
        ),
        ONE,
    ),
    RoutingCase("unequal", "nothing is shared, lengths are very unequal", "least-tokens", UNEQUAL, ONE),
    RoutingCase(
        "bursts",
        "the same in bursts, less unequal",
        "least-tokens",
        replace(UNEQUAL, burstiness=30, prompt_sigma=1.0, longest=12000),
        ONE,
    ),
    RoutingCase(
        "unequal, 32 routers",
        "nothing is shared, and loads are old by half a second",
        "power-of-two",
        replace(UNEQUAL, rate=160),
        MANY,
    ),
    RoutingCase(
        "alike, 32 routers",
        "requests are all alike, and loads are old by half a second",
        "round-robin",
        Synthetic(
            requests=2500,
            rate=220,
            burstiness=0.0,
            prompt=1000,
            prompt_sigma=0,
            output=100,
            output_sigma=0,
        ),
        MANY,
    ),
    RoutingCase(
        "chats, 32 routers",
        "conversations of which each router sees a turn now and then",
        "session",
        CHATS,
        MANY,
    ),
)
