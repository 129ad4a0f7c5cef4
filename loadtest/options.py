"""The flags of `pageturner loadtest`, and the run that they ask for."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from pageturner.loadtest.address import check_address
from pageturner.loadtest.channel import TOKEN_FILE_VARIABLE, Access, named_token_file
from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.runner import Run
from pageturner.loadtest.server import ServedModel, Target
from pageturner.loadtest.traces.reader import read_trace
from pageturner.loadtest.workload.arrivals import ArrivalProcess, RandomArrivals, TraceArrivals
from pageturner.loadtest.workload.conduct import ConductMix
from pageturner.loadtest.workload.lengths import Distribution, Lengths
from pageturner.loadtest.workload.load import LoadtestWorkload, SystemPrompts
from pageturner.loadtest.workload.mix import Mix
from pageturner.loadtest.workload.named import NAMED, NamedWorkload

DEFAULT_CONCURRENCY = 16
FIRST_RATE = 1.0
MAX_TIMEOUT_SECONDS = 1e8
"""Three years; gRPC's own count of time overflows not far above."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag that decides what is sent, with its default in the help."""
    _add_target(parser.add_argument_group("the server"))
    _add_arrivals(parser.add_argument_group("when requests come"))
    _add_workload(parser.add_argument_group("what is sent"))


def _add_target(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--target",
        "--address",
        dest="address",
        default="127.0.0.1:50051",
        metavar="HOST:PORT|unix:PATH,...",
        help="where it is (%(default)s); of several servers, conversations go to each in turn, and the first "
        "one is watched",
    )
    add("--admin-target", metavar="HOST:PORT|unix:PATH", help="where AdminService is, if apart from it")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"with this caller's token; else what {TOKEN_FILE_VARIABLE} names",
    )
    add("--tls", action="store_true", help="encrypt, and trust the authorities that gRPC brings")
    add("--tls-ca", type=Path, metavar="FILE", help="encrypt, and trust these authorities (PEM) alone")
    add("--client-certificate", type=Path, metavar="FILE", help="this caller's certificate (PEM)")
    add("--client-key", type=Path, metavar="FILE", help="its key")
    add("--model", default="", help="its model's name; the one that the server runs if left out")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for one request (%(default)s)")
    add("--processes", type=int, default=1, metavar="N", help="client processes; more if send lag shows (1)")


def _add_arrivals(group: argparse._ArgumentGroup) -> None:
    loop = group.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"closed loop: conversations at once ({DEFAULT_CONCURRENCY})",
    )
    loop.add_argument(
        "--rate", type=float, metavar="R", help="open loop: arrivals a second on average, a Poisson process"
    )
    loop.add_argument(
        "--arrivals", type=Path, metavar="TRACE", help="open loop: arrivals at the times of a trace"
    )
    add = group.add_argument
    add(
        "--burstiness",
        type=float,
        metavar="B",
        help="with --rate: gaps of a gamma distribution of shape B; below 1 bursts, inf a constant rate (1)",
    )
    add("--ramp-to", type=float, metavar="R", help="with --rate: rises linearly to this rate over the run")
    add("--speed", type=float, default=1.0, metavar="X", help="of a trace: so many times as fast (1)")


def _add_workload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    names = "; ".join(f"{name}: {workload.summary}" for name, workload in NAMED.items())
    add("--workload", default="random", metavar="NAME|TRACE", help=f"{names}; or a trace's path (random)")
    add("--requests", type=int, default=128, metavar="N", help="how many to send (%(default)s)")
    add("--warmup", type=int, default=4, metavar="N", help="requests sent before, not counted (%(default)s)")
    add("--prompt-tokens", metavar="N|LOW-HIGH", help="new tokens of each prompt (128)")
    add("--output-tokens", metavar="N|LOW-HIGH", help="tokens of each answer (128)")
    add("--turns", metavar="N|LOW-HIGH", help="requests of a conversation; each holds all before it (1)")
    add("--think-seconds", type=float, metavar="S", help="from an answer to the next turn, on average (0)")
    add("--shared-prefix-tokens", type=int, default=0, metavar="N", help="that all prompts begin with (0)")
    add("--system-prompts", metavar="COUNT:TOKENS", help="one of COUNT stands before each conversation")
    add("--priorities", default="0", metavar="P:WEIGHT,...", help="mix of priorities, such as 0:9,5:1")
    add("--tenants", default="", metavar="NAME:WEIGHT,...", help="mix of tenants, such as alice:3,bob:1")
    add("--cancel-rate", type=float, default=0.0, metavar="P", help="share that the client cancels (0)")
    add("--slow-reader-rate", type=float, default=0.0, metavar="P", help="share that is read slowly (0)")
    add(
        "--slow-reader-seconds",
        type=float,
        default=0.05,
        metavar="S",
        help="pause of a slow reader after each message (%(default)s)",
    )
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals (0)")


def make_run(arguments: argparse.Namespace) -> Run:
    """What the flags ask for, before any server is asked. Raises OptionError and TraceError."""
    address, *others = (check_address("target", each) for each in _listed(arguments.address))
    target = Target(
        address,
        arguments.model,
        _seconds("timeout", arguments.timeout),
        access=_access(arguments),
        admin_address=check_address("admin-target", arguments.admin_target) if arguments.admin_target else "",
        others=tuple(others),
    )
    workload = _workload(arguments)
    is_closed = arguments.concurrency is not None
    if is_closed and arguments.find_knee:
        raise OptionError("find-knee", "searches rates, and --concurrency has none")
    arrivals = None if is_closed else _arrivals(arguments, workload)
    concurrency = DEFAULT_CONCURRENCY if arguments.concurrency is None else arguments.concurrency
    workload = replace(workload, arrivals=arrivals)
    return Run(target, workload, concurrency, arguments.processes, arguments.warmup)


def _access(arguments: argparse.Namespace) -> Access:
    """Raises OptionError for a file that can't be read, or that needs another."""
    if (arguments.client_certificate is None) != (arguments.client_key is None):
        raise OptionError("client-certificate", "and --client-key need each other")
    token_file = arguments.token_file or named_token_file()
    token = _content("token-file", token_file) or b""
    if not token.isascii():
        raise OptionError("token-file", f"{token_file} holds no token")
    return Access(
        token.decode("ascii").strip(),
        arguments.tls,
        _content("tls-ca", arguments.tls_ca),
        _content("client-certificate", arguments.client_certificate),
        _content("client-key", arguments.client_key),
    )


def _content(option: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise OptionError(option, f"{path} cannot be read: {error.strerror}") from error


def for_model(planned: Run, model: ServedModel) -> Run:
    """The same with prompts of the model's tokens, cut to its context and the pool. Raises OptionError where
    lengths that were asked for by number never fit."""
    workload = planned.workload
    prompt, output = workload.prompt_lengths, workload.output_lengths
    if isinstance(prompt, Lengths) and isinstance(output, Lengths) and not workload.trace:
        longest = prompt.high + output.high
        if longest > model.max_context:
            raise OptionError(
                "output-tokens",
                f"prompt and output may reach {longest} tokens, {model.name} has room for "
                f"{model.max_context}",
            )
    workload = replace(workload, token_ids=model.token_ids, max_context=model.max_context)
    return replace(planned, workload=workload)


def _workload(arguments: argparse.Namespace) -> LoadtestWorkload:
    named = NAMED.get(arguments.workload)
    made = _named(arguments, named or NAMED["random"])
    return made if named else _traced(arguments, made)


def _named(arguments: argparse.Namespace, named: NamedWorkload) -> LoadtestWorkload:
    """A named workload, but for what flags change."""

    def lengths(option: str, text: str | None, default: Distribution) -> Distribution:
        return default if text is None else Lengths.parse(option, text)

    prompts = arguments.system_prompts
    return LoadtestWorkload(
        num_requests=arguments.requests,
        prompt_lengths=lengths("prompt-tokens", arguments.prompt_tokens, named.prompt_lengths),
        output_lengths=lengths("output-tokens", arguments.output_tokens, named.output_lengths),
        seed=arguments.seed,
        shared_prefix_tokens=arguments.shared_prefix_tokens,
        priorities=Mix.parse_integers("priorities", arguments.priorities),
        tenants=Mix.parse("tenants", arguments.tenants),
        correlation=named.correlation,
        turns=lengths("turns", arguments.turns, named.turns),
        think_seconds=named.think_seconds if arguments.think_seconds is None else arguments.think_seconds,
        system_prompts=(
            named.system_prompts if prompts is None else SystemPrompts.parse("system-prompts", prompts)
        ),
        conduct=ConductMix(arguments.cancel_rate, arguments.slow_reader_rate, arguments.slow_reader_seconds),
        name=arguments.workload,
    )


def _traced(arguments: argparse.Namespace, workload: LoadtestWorkload) -> LoadtestWorkload:
    path = Path(arguments.workload)
    if not path.exists():
        raise OptionError("workload", f"{str(path)!r} is none of {', '.join(NAMED)}, and no file")
    trace = read_trace(path)
    taken = trace.window(workload.num_requests, workload.seed)
    return replace(workload, name=trace.name, trace=taken, num_requests=len(taken))


def _arrivals(arguments: argparse.Namespace, workload: LoadtestWorkload) -> ArrivalProcess | None:
    """None for a closed loop."""
    if arguments.find_knee and (arguments.arrivals is not None or arguments.ramp_to is not None):
        raise OptionError(
            "find-knee", "searches constant rates: it goes with neither --arrivals nor --ramp-to"
        )
    if arguments.rate is not None or arguments.find_knee:
        rate = FIRST_RATE if arguments.rate is None else arguments.rate
        burstiness = 1.0 if arguments.burstiness is None else arguments.burstiness
        return RandomArrivals(rate, burstiness, arguments.ramp_to)
    for option, value in (("burstiness", arguments.burstiness), ("ramp-to", arguments.ramp_to)):
        if value is not None:
            raise OptionError(option, "needs --rate")
    if arguments.arrivals is not None:
        trace = read_trace(arguments.arrivals)
        taken = trace.window(workload.num_requests, workload.seed)
        return TraceArrivals(trace.name, tuple(request.at_seconds for request in taken), arguments.speed)
    if workload.trace:
        times = tuple(request.at_seconds for request in workload.trace)
        return TraceArrivals(workload.name, times, arguments.speed)
    return None


def _seconds(option: str, value: float) -> float:
    """A time limit that gRPC can count."""
    if not 0 < value <= MAX_TIMEOUT_SECONDS:
        raise OptionError(option, f"must be above 0 and at most {MAX_TIMEOUT_SECONDS:g} seconds, not {value}")
    return value


def _listed(targets: str) -> list[str]:
    """Addresses with commas between them; a scheme of gRPC's that takes several itself is left whole."""
    if targets.startswith(("ipv4:", "ipv6:", "dns:", "xds:")):
        return [targets]
    return [target.strip() for target in targets.split(",")]
