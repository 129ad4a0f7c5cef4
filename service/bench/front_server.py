"""The serving process of `bench front`: a null service behind the real gRPC server.

Prints one line of JSON when it serves, and one for each line of its standard input: `mark` answers with the
process's counters at that moment, `alone SECONDS` with those of so long a run of the engine without a client.
Ends when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from pageturner.service.bench.null_service import AloneRun, NullLoad, NullModel, NullParts
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.engine.metrics import Metrics
from pageturner.service.logs import structured
from pageturner.service.rpc.options import ServerOptions, format_address
from pageturner.service.rpc.server import Server
from pageturner.service.startup.interpreter import share_interpreter


@dataclass(frozen=True, slots=True)
class ServerMark:
    """Counters since the process began: seconds of its CPU by all threads, steps and tokens of the model."""

    seconds: float
    cpu_seconds: float
    num_steps: int
    num_tokens: int

    @classmethod
    def of(cls, model: NullModel) -> ServerMark:
        """Now."""
        return cls(time.perf_counter(), time.process_time(), model.num_steps, model.num_tokens)

    def since(self, earlier: ServerMark) -> ServerMark:
        """The difference."""
        return ServerMark(
            self.seconds - earlier.seconds,
            self.cpu_seconds - earlier.cpu_seconds,
            self.num_steps - earlier.num_steps,
            self.num_tokens - earlier.num_tokens,
        )


def run_alone(parts: NullParts, seconds: float, warm_up_seconds: float) -> ServerMark:
    """What the engine does in so long with all streams running and no client."""
    run = AloneRun(parts)
    run.start()
    time.sleep(warm_up_seconds)
    before = ServerMark.of(run.model)
    time.sleep(seconds)
    after = ServerMark.of(run.model)
    run.stop()
    return after.since(before)


async def serve(parts: NullParts) -> None:
    """Serve until standard input ends."""
    metrics, stopped = Metrics(), asyncio.Event()
    loop = asyncio.get_running_loop()
    server = Server(ServerOptions(port=0), parts.logger, parts.clock, metrics, write_timeout_seconds=30.0)
    port = await server.start()
    engine, model = parts.service(metrics)
    await engine.start()
    server.attach(engine)
    say(
        {
            "target": format_address("127.0.0.1", port),
            "prompts": [parts.prompt(n) for n in range(parts.load.num_streams)],
        }
    )
    answering = threading.Thread(
        target=_answer, args=(parts, model, lambda: loop.call_soon_threadsafe(stopped.set)), daemon=True
    )
    answering.start()
    await stopped.wait()
    await server.stop()
    await engine.aclose()


def _answer(parts: NullParts, model: NullModel, on_end: Callable[[], object]) -> None:
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "alone":
            seconds, warm_up_seconds = map(float, rest.split())
            say(asdict(run_alone(parts, seconds, warm_up_seconds)))
        else:
            say(asdict(ServerMark.of(model)))
    on_end()


def say(document: object) -> None:
    """One line to the parent."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cache_dir", type=Path)
    for name in ("streams", "prompt-tokens", "output-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--max-waiting", type=int, default=SchedulerOptions().max_waiting)
    arguments = parser.parse_args()
    load = NullLoad(
        arguments.streams,
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.step_seconds,
        arguments.token_seconds,
        arguments.max_waiting,
    )
    structured.configure(structured.LogOptions())
    share_interpreter()  # as `serve` does
    parts = NullParts.read(load, arguments.cache_dir, MonotonicClock(), structlog.get_logger())
    asyncio.run(serve(parts))


if __name__ == "__main__":
    main()
