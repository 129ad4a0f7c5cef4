"""The figures of a fleet's run: those of one server, as far as they can be told of many, and the balance."""

from __future__ import annotations

import math

from pageturner.service.simulator.figures import (
    DEFAULT_SLO,
    METRICS,
    SHARES,
    Figures,
    Slo,
    percentile,
)
from pageturner.service.simulator.fleet_result import FleetResult


def ttfts_of(result: FleetResult) -> list[float]:
    """Seconds from arrival to the first token, of every request that had one; sorted."""
    table = result.table
    pairs = zip(table.first_at, table.arrived_at, strict=True)
    return sorted(first - arrived for first, arrived in pairs if first == first)


def figures_of_fleet(result: FleetResult, slo: Slo = DEFAULT_SLO) -> Figures:
    """Latencies are those of requests that ended well, from their arrival.

    imbalance: tokens that the busiest server computed, over the mean. prefix_hit_share: of prompt tokens,
    those that no server computed; what was handed over another one did.
    """
    table, seconds = result.table, max(result.seconds, 1e-12)
    ttfts: list[float] = []
    tpots: list[float] = []
    ends: list[float] = []
    num_met = num_output = num_prompt = num_cached = 0
    for index, request in enumerate(result.requests):
        if table.has_failed[index]:
            continue
        arrived, first, count = table.arrived_at[index], table.first_at[index], table.num_output[index]
        ttft = first - arrived
        tpot = (table.ended_at[index] - first) / (count - 1) if count > 1 else None
        ttfts.append(ttft)
        ends.append(table.ended_at[index] - arrived)
        if tpot is not None:
            tpots.append(tpot)
        num_met += ttft <= slo.ttft_seconds and (tpot is None or tpot <= slo.tpot_seconds)
        num_output += count
        num_prompt += request.num_prompt_tokens
        num_cached += table.num_cached[index]
    computed = result.num_scheduled_tokens
    num_found = max(0, num_cached - result.num_handed_tokens) + result.num_hit_tokens
    found = {
        "throughput": num_output / seconds,
        "total_throughput": (num_output + num_prompt) / seconds,
        "goodput": num_met / seconds,
        "preemptions": float(sum(result.num_preemptions)),
        "prefix_hit_share": num_found / max(1, num_prompt),
        "handed_share": result.num_handed_tokens / max(1, num_prompt),
        "failed_handovers": float(result.handovers.num_failed),
        "imbalance": max(computed) * len(computed) / max(1, sum(computed)),
        "failed": float(len(table) - len(ends)),
        "seconds": result.seconds,
    }
    for name, values in (
        ("ttft", sorted(ttfts)),
        ("tpot", sorted(tpots)),
        ("itl", result.gaps),
        ("e2e", sorted(ends)),
    ):
        if values:
            found[f"{name}_mean"] = math.fsum(values) / len(values)
            for share in SHARES:
                found[f"{name}_p{share * 100:.0f}"] = percentile(values, share)
    if ttfts:
        found["ttft_max"] = max(ttfts)
    if result.gaps:
        found["itl_max"] = result.gaps[-1]
    return {metric.name: found[metric.name] for metric in METRICS if metric.name in found}
