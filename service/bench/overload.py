"""`pageturner bench overload`: what a server makes of more requests than it can serve.

Its capacity, without deadlines: whole answers a second of a closed loop that keeps the queue full. In turns
with that, requests with a deadline at multiples of it, sent at their own pace whatever comes back. Goodput is
what ended whole in its deadline, as a share of the capacity before and after. Last a burst over the bounds of
the queue: the time after which each refused client was told to come again, beside the time at which the queue
had room for it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pageturner.service.bench.child_process import ChildProcess, child_process
from pageturner.service.bench.front import quantile, server_words
from pageturner.service.bench.null_service import NullLoad
from pageturner.service.bench.overload_clients import Outcome, Phase
from pageturner.service.client.server_process import running_server
from pageturner.service.errors import ModelError

WARM_SHARE = 0.25
"""Of each phase, that is not counted."""
REST_SECONDS = 5.0
"""Before the burst, so that the refusals of the load before are forgotten."""
NUM_REFUSED = 32
"""Requests of the burst that find no room."""


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """The load. deadline: seconds, of each request. seconds: of each phase. max_num_seqs, max_waiting: bounds
    of the server. step_seconds, token_seconds: of a model that only takes time, in place of a real one."""

    prompt_tokens: int
    output_tokens: int
    deadline: float
    seconds: float
    multiples: tuple[float, ...]
    max_num_seqs: int
    max_waiting: int
    step_seconds: float | None = None
    token_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """At one multiple of the capacity (requests a second, before and after).

    outcomes: requests by how they ended, "whole" among them. goodput: whole answers a second, as a
    share of the capacity. refusal_p50, refusal_p99: milliseconds from a request to its refusal at the door.
    latency_p50: seconds of a whole answer. send_lag_p99: milliseconds that the client was late.
    """

    multiple: float
    capacity: float
    sent_per_second: float
    goodput: float
    outcomes: Mapping[str, int]
    refusal_p50: float
    refusal_p99: float
    latency_p50: float
    send_lag_p99: float


@dataclass(frozen=True, slots=True)
class RetryFigures:
    """Of the burst, in the order of their return: seconds until clients were told to come, and until the
    queue had room for them. taken_in: of them, on their return. refusal_p99: milliseconds."""

    told: tuple[float, ...]
    true: tuple[float, ...]
    taken_in: int
    refusal_p99: float

    @property
    def ratio(self) -> float:
        """The median of told over true; NaN where nobody was refused."""
        ratios = [told / true for told, true in zip(self.told, self.true, strict=True)]
        return statistics.median(ratios) if ratios else float("nan")


@dataclass(frozen=True, slots=True)
class OverloadResult:
    """All of it. capacities: whole answers a second without deadlines, before and after each load."""

    plan: OverloadPlan
    capacities: tuple[float, ...]
    loads: tuple[LoadFigures, ...]
    retries: RetryFigures


def num_phases(plan: OverloadPlan) -> int:
    """That `say` is told of."""
    return 2 + len(plan.multiples)


def measure_overload(
    plan: OverloadPlan, arguments: Sequence[str], cache_dir: Path, say: Callable[[str], None]
) -> OverloadResult:
    """arguments: flags of the server. Raises ModelError where a process fails."""
    with (
        _server(plan, arguments, cache_dir) as target,
        child_process("pageturner.service.bench.overload_clients", target) as clients,
    ):
        phase = Phase(plan.seconds, plan.prompt_tokens, plan.output_tokens)
        full = replace(phase, concurrency=plan.max_num_seqs + plan.max_waiting // 2)
        capacities = [capacity_of(_ask(clients, full), plan.seconds)]
        say(f"capacity: {capacities[0]:.2f} requests/s")
        loads = []
        for seed, multiple in enumerate(plan.multiples, 1):
            load = replace(phase, rate=multiple * capacities[-1], deadline=plan.deadline, seed=seed)
            outcomes = _ask(clients, load)
            capacities.append(capacity_of(_ask(clients, replace(full, seed=seed)), plan.seconds))
            around = statistics.mean(capacities[-2:])
            loads.append(load_figures(outcomes, plan.seconds, multiple, around))
            say(f"{multiple:g} x: goodput {loads[-1].goodput:.0%} of {around:.2f} requests/s")
        time.sleep(REST_SECONDS)
        count = plan.max_num_seqs + plan.max_waiting + NUM_REFUSED
        burst = _ask(clients, replace(phase, seconds=0.0, concurrency=count, returns=1))
        retries = retry_figures(burst)
        say(f"a burst: {len(retries.told)} refused")
    return OverloadResult(plan, tuple(capacities), tuple(loads), retries)


@contextmanager
def _server(plan: OverloadPlan, arguments: Sequence[str], cache_dir: Path) -> Iterator[str]:
    """Its address, while it runs."""
    if plan.step_seconds is None:
        bounds = (f"--max-num-seqs={plan.max_num_seqs}", f"--max-waiting={plan.max_waiting}")
        with running_server([*arguments, *bounds]) as server:
            yield server.target
        return
    load = NullLoad(
        plan.max_num_seqs,
        plan.prompt_tokens,
        plan.output_tokens,
        plan.step_seconds,
        plan.token_seconds,
        plan.max_waiting,
    )
    with child_process(*server_words(load, cache_dir)) as null:
        yield str(null.read()["target"])


def _ask(clients: ChildProcess, phase: Phase) -> list[Outcome]:
    clients.write_json(asdict(phase))
    return [Outcome(**outcome) for outcome in clients.read()]


# --- figures -------------------------------------------------------------------------------


def capacity_of(outcomes: Sequence[Outcome], seconds: float) -> float:
    """Whole answers a second while the loop was closed and warm. Raises ModelError where there was none.

    An answer counts by the part of its time from the first token to the end that lies in there: requests that
    began together end together, and whole numbers of such waves would say little.
    """
    begin = WARM_SHARE * seconds
    count = 0.0
    for one in outcomes:
        if one.is_whole and one.first is not None:
            length = max(one.ended - one.first, 1e-9)
            count += max(0.0, min(one.ended, seconds) - max(one.first, begin)) / length
    if not count:
        raise ModelError(f"no request was answered within {seconds:g} s: --seconds is too short")
    return count / (seconds - begin)


def load_figures(
    outcomes: Sequence[Outcome], seconds: float, multiple: float, capacity: float
) -> LoadFigures:
    """Of requests that were due when the load was there already."""
    begin = WARM_SHARE * seconds
    counted = [one for one in outcomes if one.due >= begin]
    whole = [one for one in counted if one.is_whole]
    refusals = [1e3 * (one.ended - one.sent) for one in counted if one.is_refused]
    return LoadFigures(
        multiple,
        capacity,
        sent_per_second=len(counted) / (seconds - begin),
        goodput=len(whole) / (seconds - begin) / capacity,
        outcomes=dict(Counter(one.reason or "whole" for one in counted)),
        refusal_p50=quantile(refusals, 0.5),
        refusal_p99=quantile(refusals, 0.99),
        latency_p50=quantile([one.ended - one.sent for one in whole], 0.5),
        send_lag_p99=quantile([1e3 * (one.sent - one.due) for one in counted], 0.99),
    )


def retry_figures(burst: Sequence[Outcome]) -> RetryFigures:
    """A place in the queue is free when a request that waited gets its first token: it has started then."""
    refused = sorted(
        (one for one in burst if one.is_refused and one.attempt == 1),
        key=lambda one: one.ended + (one.retry_seconds or 0.0),
    )
    since = min((one.ended for one in refused), default=0.0)
    accepted = [one.first for one in burst if one.first is not None and one.attempt == 1]
    firsts = sorted(first for first in accepted if first > since)
    pairs = list(zip(refused, firsts, strict=False))
    return RetryFigures(
        told=tuple(one.ended + (one.retry_seconds or 0.0) for one, _ in pairs),
        true=tuple(first for _, first in pairs),
        taken_in=sum(one.attempt == 2 and not one.is_refused for one in burst),
        refusal_p99=quantile([1e3 * (one.ended - one.sent) for one in refused], 0.99),
    )


def document(result: OverloadResult) -> dict[str, Any]:
    """The figures for JSON."""
    figures = asdict(result)
    figures["retries"]["ratio"] = result.retries.ratio
    return figures
