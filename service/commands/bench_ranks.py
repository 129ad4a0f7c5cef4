"""`pageturner bench ranks`: what several processes of one model cost a step, and what comes of it."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import write, write_json
from pageturner.service.commands.progress import progress
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench ranks --ranks 2 --concurrency 16 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default, doc in (
        ("ranks", 2, "processes that share the model"),
        ("hidden", 576, "width of the rows that are added up over ranks; 576 is the embedded model's"),
        ("concurrency", 16, "requests at once; 0 leaves servers out"),
        ("output-tokens", 64, "tokens of each output"),
        ("rounds", 3, "rounds of each server"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{doc} (default {default})"
        )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a count that is too small."""
    import structlog

    from pageturner.service.bench.link_estimate import LINKS, SHAPES, SIZES, estimate_step
    from pageturner.service.bench.ranks import CONTEXT, DECODES, measure_rates, measure_steps
    from pageturner.service.config import cache_directory, local_gloo

    for name, least in (("ranks", 2), ("hidden", 1), ("concurrency", 0), ("output_tokens", 1), ("rounds", 1)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{getattr(arguments, name)} is below {least}")
    sizes, costs, rates = (1, arguments.ranks), [], None
    num_stages = len(DECODES) + (len(sizes) * arguments.rounds if arguments.concurrency else 0)
    with local_gloo(), progress(num_stages) as advance:
        for cost in measure_steps(
            arguments.ranks, arguments.hidden, cache_directory(), structlog.get_logger()
        ):
            costs.append(cost)
            advance(f"{cost.num_decodes} decodes: {cost.exchange:.0f} us to all ranks and back", 1)
        if arguments.concurrency:
            rates = measure_rates(
                sizes,
                arguments.concurrency,
                arguments.output_tokens,
                arguments.rounds,
                config_arguments(arguments),
                lambda text: advance(text, 1),
            )
    estimates = [estimate_step(shape, size, 64) for shape in SHAPES for size in SIZES]
    if arguments.json:
        document = {
            "ranks": arguments.ranks,
            "context_tokens": CONTEXT,
            "steps": [asdict(cost) for cost in costs],
            "rates": None if rates is None else asdict(rates),
            "links": [asdict(estimate) for estimate in estimates],
        }
        write_json(document)
        return 0
    write(
        f"a step on {arguments.ranks} ranks, contexts of {CONTEXT} tokens; microseconds, the tenth percentile"
    )
    write("decodes  bytes at first  bytes  encode  decode  to all ranks and back  a sum over ranks")
    for cost in costs:
        write(
            f"{cost.num_decodes:7d}  {cost.whole_bytes:14d}  {cost.step_bytes:5d}  {cost.encode:6.0f}  "
            f"{cost.decode:6.0f}  {cost.exchange:21.0f}  {cost.addition:16.0f}"
        )
    if rates is not None:
        one, more = (rates.median(size) for size in sizes)
        write(
            f"output tokens/s of {arguments.concurrency} requests at once, median of {arguments.rounds}: "
            f"1 rank {one:.1f}, {arguments.ranks} ranks {more:.1f}, ratio {more / one:.2f}"
        )
    write("on paper: what a rank receives in a step of 64 decodes in bfloat16, and the least microseconds")
    names = [link.name for link in LINKS]
    write(f"{'model':<12}  ranks  collectives  MiB received  " + "  ".join(names))
    for each in estimates:
        times = "  ".join(f"{each.microseconds[name]:{len(name)}.0f}" for name in names)
        write(
            f"{each.shape:<12}  {each.size:5d}  {each.num_collectives:11d}  "
            f"{each.received_bytes / 2**20:12.1f}  {times}"
        )
    return 0
