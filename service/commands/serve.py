"""`pageturner serve`: the service itself, until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner import __version__
from pageturner.service.commands import signals
from pageturner.service.commands.flags import add_config_flags, load_from
from pageturner.service.commands.output import OutputLost, discard_output, note, write
from pageturner.service.config import LoadedConfig, cache_directory, calm_openmp, notify_socket, quiet_grpc
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.errors import ConfigError, EngineDead

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from pageturner.service.auth.identities_in_force import IdentitiesInForce
    from pageturner.service.engine.async_engine import AsyncEngine
    from pageturner.service.engine.metrics import Metrics
    from pageturner.service.flight.phases import RequestPhases
    from pageturner.service.flight.recording import LineFile
    from pageturner.service.logs.writer import LogStream
    from pageturner.service.monitoring.options import MetricsOptions, TracesOptions
    from pageturner.service.monitoring.port import MonitoringPort
    from pageturner.service.monitoring.tracing import Tracing
    from pageturner.service.rpc.certificates import Certificates
    from pageturner.service.rpc.server import Server
    from pageturner.service.startup.stages import Stages

HELP = "run the service"
EXAMPLE = "pageturner serve --model ./my-model --num-blocks 2048 --victim-policy last-arrived"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write arrivals, lengths, shared prefixes and step times there, never text: for `simulate`",
    )


def run(arguments: argparse.Namespace) -> int:
    clock = MonotonicClock()
    started_at = clock.now()
    calm_openmp()  # before torch is imported
    quiet_grpc()  # before grpc is
    # A search for garbage in what imports make finds none and takes a tenth of their time.
    gc.disable()
    with _recording(arguments.record) as recording:
        return asyncio.run(_serve(partial(load_from, arguments), clock, started_at, recording))


def _recording(path: Path | None) -> contextlib.AbstractContextManager[LineFile | None]:
    """The file of --record; opened before the model loads, so that a bad path is known at once."""
    if path is None:
        return contextlib.nullcontext()
    import structlog

    from pageturner.service.flight.recording import LineFile

    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--record", f"{path}: {error.strerror}") from error
    return contextlib.closing(LineFile(file, structlog.get_logger()))


async def _serve(
    load: Callable[[], LoadedConfig], clock: MonotonicClock, started_at: float, recording: LineFile | None
) -> int:
    import structlog

    from pageturner.service.auth.proof import Authenticator
    from pageturner.service.client.server_process import ready_line
    from pageturner.service.engine.api import EngineHealth
    from pageturner.service.engine.metrics import Metrics
    from pageturner.service.logs import structured
    from pageturner.service.rpc.options import format_address
    from pageturner.service.rpc.server import Server
    from pageturner.service.startup.allocator import bound_arenas
    from pageturner.service.startup.descriptors import connection_limit, raise_descriptor_limit
    from pageturner.service.startup.interpreter import share_interpreter
    from pageturner.service.startup.readiness import READY, STOPPING, Readiness
    from pageturner.service.startup.reload import ConfigReloader, Reloadable, watch
    from pageturner.service.startup.stages import STARTED, Stages

    stages, readiness = Stages(clock.now, started_at), Readiness(notify_socket())
    loaded = load()
    log = structured.detach_stderr(loaded.config.log)
    structured.configure(loaded.config.log)
    logger, metrics = structlog.get_logger(), Metrics(loaded.config.metrics.max_tenants)
    if loaded.service_variables:
        reason = "Kubernetes sets these for a Service; they configure nothing here"
        logger.warning("variables_ignored", names=loaded.service_variables, reason=reason)
    stopped, hung_up = asyncio.Event(), asyncio.Event()
    options = loaded.config.server
    soft, num_descriptors = raise_descriptor_limit()
    most = connection_limit(num_descriptors, options.max_connections)
    logger.info("descriptors", limit=num_descriptors, before=soft, max_connections=most)
    options = replace(options, max_connections=most)
    bound_arenas(options.malloc_arenas)  # before the threads that would have arenas
    share_interpreter()
    tracing = _tracing(loaded.config.traces, clock)
    identities = _identities(loaded, logger, metrics)
    certificates = _certificates(loaded, logger, metrics)
    server = Server(
        options,
        logger,
        clock,
        metrics,
        write_timeout_seconds=loaded.config.engine.slow_consumer_timeout_seconds,
        authenticator=None if identities is None else Authenticator(identities.current, time.time),
        certificates=certificates,
        tracer=tracing,
    )
    # Before a thread loads, whose end the process would wait for: an address that is taken is known at once,
    # and health answers NOT_SERVING meanwhile.
    stages.end("imports of the server")
    port = await server.start()
    monitoring: MonitoringPort | None = None
    engine: AsyncEngine | None = None
    watching: asyncio.Task[None] | None = None
    try:
        monitoring = await _start_monitoring(
            loaded.config.metrics, server, clock, metrics, logger, log, certificates
        )
        stages.end("bind")
        on_phases = None if tracing is None else tracing.note_request
        loading = asyncio.create_task(
            _load(loaded, clock, started_at, logger, metrics, recording, stages, on_phases)
        )
        _on_signals(stopped, is_loading=lambda: not loading.done(), flush=log.finish)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up.set)
        engine = await loading
        await engine.start()
        server.attach(engine)
        stages.end("engine started")
        gc.freeze()  # nor is there any later
        gc.enable()
        logger.info(STARTED, **{name: round(seconds, 4) for name, seconds in stages.seconds.items()})
        reloaded: list[Reloadable] = [
            ConfigReloader(engine, load, loaded, logger, partial(metrics.file_refused, "configuration"))
        ]
        reloaded += filter(None, (identities, certificates))
        readiness.tell(READY)
        _say_ready(ready_line(engine.models()[0].name, format_address(options.host, port)))
        watching = asyncio.create_task(watch(reloaded))
        while not stopped.is_set() and engine.health is not EngineHealth.DEAD:
            await _first(stopped.wait(), hung_up.wait(), engine.wait_for_health_change(engine.health))
            if hung_up.is_set():
                hung_up.clear()
                for part in reloaded:
                    await part.reload("SIGHUP")
        if engine.health is EngineHealth.DEAD:
            raise EngineDead("the engine met a fault that it cannot recover from; the log has it")
        readiness.tell(STOPPING)
        note("draining; the same signal once more exits at once")
        await server.drain()
    finally:
        if watching is not None:
            watching.cancel()
        await server.stop()
        if engine is not None:
            await engine.aclose()
        if tracing is not None:
            tracing.close()
            if tracing.num_dropped:
                logger.warning("traces_incomplete", num_requests_dropped=tracing.num_dropped)
        if monitoring is not None:  # last: a probe is told of the end as long as it lasts
            await monitoring.aclose()
        if recording is not None:
            recording.close()
    return 0


def _identities(
    loaded: LoadedConfig, logger: FilteringBoundLogger, metrics: Metrics
) -> IdentitiesInForce | None:
    """Of the file of auth.identities; None where there is none, and so no authentication. Raises
    ConfigError."""
    from pageturner.service.auth.identities_in_force import IdentitiesInForce

    path = loaded.config.auth.identities
    return (
        None if path is None else IdentitiesInForce(path, logger, partial(metrics.file_refused, "identities"))
    )


def _certificates(
    loaded: LoadedConfig, logger: FilteringBoundLogger, metrics: Metrics
) -> Certificates | None:
    """Of the files of [tls]; None where connections are in plain text. Raises ConfigError."""
    if not loaded.config.tls.is_on:
        return None
    from pageturner.service.rpc.certificates import Certificates

    return Certificates(loaded.config.tls, logger, time.time, partial(metrics.file_refused, "certificate"))


def _tracing(options: TracesOptions, clock: MonotonicClock) -> Tracing | None:
    """Where an endpoint is configured. Raises ConfigError where OpenTelemetry is not installed."""
    if options.endpoint is None:
        return None
    try:
        from pageturner.service.monitoring.tracing import open_tracing
    except ModuleNotFoundError as error:
        missing = f"needs {error.name}, which is not installed: pip install 'pageturner[traces]'"
        raise ConfigError("traces.endpoint", missing) from error
    return open_tracing(options, __version__, clock)


async def _start_monitoring(
    options: MetricsOptions,
    server: Server,
    clock: MonotonicClock,
    metrics: Metrics,
    logger: FilteringBoundLogger,
    log: LogStream,
    certificates: Certificates | None,
) -> MonitoringPort | None:
    """Where a port is configured: before the model loads, so that probes are answered from then on."""
    if options.port is None:
        return None
    from pageturner.service.monitoring.metrics_page import Sources
    from pageturner.service.monitoring.port import MonitoringPort

    sources = Sources(
        metrics,
        lambda: server.condition,
        lambda: server.engine,
        lambda: log.num_lines_lost,
        lambda: None if certificates is None else certificates.current.ends.timestamp(),
    )
    monitoring = MonitoringPort(sources, clock, logger, names=options.names.split(","))
    await monitoring.start(options.host, options.port)
    return monitoring


async def _load(
    loaded: LoadedConfig,
    clock: MonotonicClock,
    started_at: float,
    logger: FilteringBoundLogger,
    metrics: Metrics,
    recording: LineFile | None,
    stages: Stages,
    on_phases: Callable[[RequestPhases], None] | None,
) -> AsyncEngine:
    def build() -> AsyncEngine:
        from pageturner.service.startup.wiring import build_service  # torch comes with it

        stages.end("imports of the model")
        return build_service(
            loaded,
            *(cache_directory(), clock, started_at, logger, metrics, recording),
            on_stage=stages.end,
            on_phases=on_phases,
        )

    # In a thread that ends: each thread that ran torch keeps its OpenMP team. With more members than cores,
    # libgomp's threads sleep between the operations of a step, and one at 16 decodes takes 28 ms for 21.
    with ThreadPoolExecutor(1, "pageturner-load") as loader:
        return await asyncio.get_running_loop().run_in_executor(loader, build)


def _say_ready(line: str) -> None:
    """Print the line. Nothing depends on it but a program that waits for it: a lost one is only logged."""
    import structlog

    try:
        write(line)
    except (OutputLost, BrokenPipeError) as error:
        discard_output()
        structlog.get_logger().warning("ready_line_lost", line=line, reason=str(error))


def _on_signals(stopped: asyncio.Event, is_loading: Callable[[], bool], flush: Callable[[], object]) -> None:
    """The first signal asks for a drain; a second one, or one that comes while loading, ends the process.

    flush: writes the log's last lines.
    """
    loop = asyncio.get_running_loop()

    def handle(number: int) -> None:
        if stopped.is_set() or is_loading():
            # Not sys.exit: threads of the model may be deep in a product and would be waited for.
            flush()
            os._exit(128 + number)
        stopped.set()

    for number in SIGNALS:
        if not signals.is_ignored(number):
            loop.add_signal_handler(number, handle, number)


async def _first(*awaitables: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of them is done, and cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
