"""`pageturner bench accuracy`: perplexity and KL divergence of each way to compute products and keep KV."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict

from pageturner.service.commands.flags import add_config_flags, load_from
from pageturner.service.commands.output import show, write
from pageturner.service.commands.progress import progress
from pageturner.service.config import cache_directory
from pageturner.service.errors import ConfigError

EXAMPLE = "pageturner bench accuracy --candidates file,file/int8,file/fp8 --tokens 1024 --json"
_NAMES = ("float32", "bfloat16", "file", "int8", "int4")
_KV_NAMES = ("float32", "bfloat16", "int8", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--candidates",
        metavar="NAME,...",
        help=f"of {', '.join(_NAMES)}, each perhaps with /KV, of {', '.join(_KV_NAMES)}: what its KV is kept "
        "in (default: all products that this machine and model have, and codes of KV)",
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="of the packaged text (default: all)")
    parser.add_argument(
        "--window", type=int, default=512, metavar="N", help="tokens of a context (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.set_defaults(measure=run)
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from pageturner.service.bench.accuracy import candidates_for, measure_accuracies
    from pageturner.service.logs.structured import warnings_on_standard_error
    from pageturner.service.startup.placement import choose_backend

    config = load_from(arguments).config
    if arguments.window < 2:
        raise ConfigError("--window", f"{arguments.window} is below 2")
    names = candidates_for(config.model.source)
    if arguments.candidates is not None:
        names = tuple(arguments.candidates.split(","))
    for name in names:
        products, slash, kv_dtype = name.partition("/")
        if products not in _NAMES:
            raise ConfigError("--candidates", f"{products!r} is none of {', '.join(_NAMES)}")
        if slash and kv_dtype not in _KV_NAMES:
            raise ConfigError("--candidates", f"KV in {kv_dtype!r} is none of {', '.join(_KV_NAMES)}")
    with ExitStack() as stack:

        def begin(num_windows: int) -> Callable[[], object]:
            advance = stack.enter_context(progress(num_windows))
            return lambda: advance("a window was read by all", 1)

        report = measure_accuracies(
            config.model,
            choose_backend(config, cache_directory(), warnings_on_standard_error()),
            cache_directory(),
            names,
            arguments.tokens,
            arguments.window,
            begin,
        )
    if arguments.json:
        write(json.dumps(asdict(report), indent=2))
        return 0
    lines = [
        f"{report.model}, {report.text_tokens} tokens of English in windows of {report.window}; "
        f"auto takes a mean KL below {report.kl_bound:g}",
        f"{'products/KV':16} {'perplexity':>10} {'mean KL':>10} {'same top token':>15}",
    ]
    for name, found in report.results.items():
        lines.append(f"{name:16} {found.perplexity:10.2f} {found.mean_kl:10.4f} {found.top1_agreement:15.1%}")
    show("\n".join(lines))
    return 0
