"""`pageturner bench structured`: what answers of a form cost beside answers of any."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from pageturner.service.commands.counts import add_counts, check_counts
from pageturner.service.commands.flags import add_config_flags, config_arguments, load_from
from pageturner.service.commands.output import write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory

if TYPE_CHECKING:
    from pageturner.service.bench.structured import StructuredResult

EXAMPLE = "pageturner bench structured --concurrency 16 --rounds 5 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_counts(
        parser,
        ("concurrency", 16, "requests at once"),
        ("output-tokens", 96, "tokens of each answer"),
        ("rounds", 5, "rounds of each kind of answer, in turns"),
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    add_config_flags(parser)
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace) -> int:
    """Print the figures. Raises ConfigError for a number below 1, PageturnerError if a request fails."""
    from pageturner.service.bench.structured import StructuredLoad, measure_structured

    check_counts(arguments, "concurrency", "output_tokens", "rounds")
    load = StructuredLoad(arguments.concurrency, arguments.output_tokens)
    model = load_from(arguments).config.model
    with progress(arguments.rounds) as advance:
        result = measure_structured(
            load,
            arguments.rounds,
            model,
            cache_directory(),
            config_arguments(arguments),
            lambda text: advance(text, 1),
        )
    if arguments.json:
        ratios = {form.form: result.ratio(form) for form in result.forms}
        overlapped = {form.form: result.overlapped(form) for form in result.forms[1:]}
        write(json.dumps({**asdict(result), "ratios": ratios, "overlapped": overlapped}, indent=2))
        return 0
    write("\n".join(lines(result)))
    return 0


def lines(result: StructuredResult) -> Iterator[str]:
    """The figures in words."""
    load, times = result.load, result.times
    yield f"output tokens/s at {load.num_requests} at once, medians of rounds in turns"
    plain, *formed = result.forms
    yield f"without a form {plain.rate:7.1f}"
    for form in formed:
        yield (
            f"{form.form:14} {form.rate:7.1f}, ratio {result.ratio(form):.2f}; "
            f"{result.overlapped(form):.0%} of the masks' time beside the model"
        )
    masks = sorted(times.masks)
    yield (
        f"a mask of the schema {statistics.mean(masks) * 1e6:.0f} us, 95 of 100 within "
        f"{masks[len(masks) * 95 // 100] * 1e6:.0f} us; compiled in {times.compile_seconds * 1e3:.1f} ms; "
        f"the first grammar of a server waits {times.vocabulary_seconds * 1e3:.0f} ms for the vocabulary"
    )
