"""`pageturner bench front`: gRPC, prompts and text around a model that costs nothing, or a fixed time a step.

A model that costs nothing ends a short request before the next one has come, and steps are of one
sequence: to see many streams at once, give it a step time.

The server and its clients are processes of their own. In turns with them the engine runs alone, on the same
load with no client, so that what the front takes from it is seen.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pageturner.service.bench.child_process import ChildProcess, child_process
from pageturner.service.bench.front_clients import FrontWindow
from pageturner.service.bench.front_server import ServerMark
from pageturner.service.bench.null_service import NullLoad

WARM_UP_SECONDS = 1.5

ClientKind = Literal["library", "stub"]
"""The Python client, or what protoc makes of the wire contract."""


@dataclass(frozen=True, slots=True)
class FrontRound:
    """Figures of one round. CPU is in microseconds a token; the server's includes the engine's.

    itl: milliseconds between two messages of a stream with tokens. ttft: from sending a request to its first
    token. engine: of the run without a client.
    """

    tokens_per_second: float
    messages_per_token: float
    server_cpu: float
    client_cpu: float
    engine_cpu: float
    itl_p50: float
    itl_p90: float
    itl_p99: float
    ttft_p50: float
    ttft_p99: float
    steps_per_second: float
    engine_steps_per_second: float

    @property
    def steps_kept(self) -> float:
        """Steps with streams attached, of those without."""
        return self.steps_per_second / self.engine_steps_per_second


@dataclass(frozen=True, slots=True)
class FrontResult:
    """What was asked, and every round's figures."""

    load: NullLoad
    client: ClientKind
    num_client_processes: int
    rounds: tuple[FrontRound, ...]

    def medians(self) -> dict[str, float]:
        """Of each figure."""
        names = (*(field.name for field in fields(FrontRound)), "steps_kept")
        return {name: statistics.median(getattr(one, name) for one in self.rounds) for name in names}


def measure_front(
    load: NullLoad,
    rounds: int,
    seconds: float,
    client: ClientKind,
    num_client_processes: int,
    cache_dir: Path,
    say: Callable[[str], None],
) -> FrontResult:
    """seconds: of each measurement, two of which make a round. Raises ModelError where a process fails."""
    found = []
    with child_process(*server_words(load, cache_dir)) as server:
        ready = server.read()
        for number in range(1, rounds + 1):
            alone = ServerMark(**server.ask(f"alone {seconds} {WARM_UP_SECONDS}"))
            marks, windows = _attached(server, ready, load, seconds, client, num_client_processes)
            found.append(summarise(alone, marks, windows))
            say(f"round {number}: {found[-1].tokens_per_second:.0f} tokens/s")
    return FrontResult(load, client, num_client_processes, tuple(found))


def summarise(alone: ServerMark, attached: ServerMark, windows: Sequence[FrontWindow]) -> FrontRound:
    """alone, attached: the server's counters over the engine's own run and the clients'; one window a client
    process."""
    num_tokens = max(1, sum(window.num_tokens for window in windows))
    gaps = [gap for window in windows for gap in window.gaps]
    firsts = [one for window in windows for one in window.first_seconds]
    return FrontRound(
        tokens_per_second=sum(window.num_tokens / window.seconds for window in windows),
        messages_per_token=sum(window.num_messages for window in windows) / num_tokens,
        server_cpu=attached.cpu_seconds / max(1, attached.num_tokens) * 1e6,
        client_cpu=sum(window.cpu_seconds for window in windows) / num_tokens * 1e6,
        engine_cpu=alone.cpu_seconds / max(1, alone.num_tokens) * 1e6,
        itl_p50=quantile(gaps, 0.5) * 1e3,
        itl_p90=quantile(gaps, 0.9) * 1e3,
        itl_p99=quantile(gaps, 0.99) * 1e3,
        ttft_p50=quantile(firsts, 0.5) * 1e3,
        ttft_p99=quantile(firsts, 0.99) * 1e3,
        steps_per_second=attached.num_steps / attached.seconds,
        engine_steps_per_second=max(1, alone.num_steps) / alone.seconds,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them is below; NaN for none."""
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def server_words(load: NullLoad, cache_dir: Path) -> tuple[str, ...]:
    """The module and the arguments of a server process for this load."""
    return (
        "pageturner.service.bench.front_server",
        str(cache_dir),
        f"--streams={load.num_streams}",
        f"--prompt-tokens={load.prompt_tokens}",
        f"--output-tokens={load.output_tokens}",
        f"--step-seconds={load.step_seconds}",
        f"--token-seconds={load.token_seconds}",
        f"--max-waiting={load.max_waiting}",
    )


def _attached(
    server: ChildProcess, ready: Any, load: NullLoad, seconds: float, client: ClientKind, num_processes: int
) -> tuple[ServerMark, list[FrontWindow]]:
    words = (
        "pageturner.service.bench.front_clients",
        ready["target"],
        f"--client={client}",
        f"--output-tokens={load.output_tokens}",
        f"--seconds={seconds}",
        f"--warm-up-seconds={WARM_UP_SECONDS}",
    )
    with ExitStack() as stack:
        children = [stack.enter_context(child_process(*words)) for _ in range(num_processes)]
        for number, child in enumerate(children):
            child.write(json.dumps(ready["prompts"][number::num_processes]))
        for child in children:
            assert child.read() == "begin"
        before = ServerMark(**server.ask("mark"))
        windows = [FrontWindow(**child.read()) for child in children]
        after = ServerMark(**server.ask("mark"))
    return after.since(before), windows


def document(result: FrontResult) -> dict[str, Any]:
    """The figures for JSON."""
    return {**asdict(result), "medians": result.medians()}
