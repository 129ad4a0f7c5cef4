"""`pageturner plan`: how much KV cache a model needs, and how many requests fit, before it is loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from pageturner.service.commands import kv_plan
from pageturner.service.commands.output import show, write
from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.sizes import parse_size

HELP = "compute the size of a KV cache: a token, a block, a request, a budget"
EXAMPLE = "pageturner plan --num-layers 80 --num-kv-heads 8 --head-dim 128 --dtype float16 --budget 80GiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="a model folder or its config.json, or any model that `serve` takes"
    )
    parser.add_argument(
        "--model", dest="named", metavar="MODEL", help="the same as a flag, as `serve` has it"
    )
    shape = parser.add_argument_group("a model by its numbers")
    shape.add_argument("--num-layers", type=int, metavar="N")
    shape.add_argument("--num-kv-heads", type=int, metavar="N", help="all heads, where none are shared")
    shape.add_argument("--head-dim", type=int, metavar="N")
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--dtype", "--kv-dtype", help="of the KV cache, such as int8 (default: the model's, or float16)"
    )
    load.add_argument(
        "--request-tokens", type=int, default=2048, metavar="N", help="prompt and output (default 2048)"
    )
    load.add_argument("--batch", type=int, default=1, metavar="N", help="requests at once (default 1)")
    load.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens a block (default 16)")
    load.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="what contiguous memory is reserved for (default: the same)",
    )
    load.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="keys that every layer sees at most, 0 for all (default: the model's)",
    )
    load.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a step, which a request holds beyond its window (default 512)",
    )
    load.add_argument("--budget", metavar="SIZE", help="memory for KV, such as 24GiB: how many requests fit?")
    parser.add_argument("--json", action="store_true", help="every number, exact")


def run(arguments: argparse.Namespace) -> int:
    shape, window = _model(arguments)
    planned = kv_plan.KvPlan(
        shape=shape,
        request_tokens=arguments.request_tokens,
        batch=arguments.batch,
        block_size=arguments.block_size,
        max_model_len=arguments.max_model_len,
        budget_bytes=_budget(arguments.budget),
        window=window if arguments.window is None else arguments.window or None,
        step_tokens=arguments.max_num_batched_tokens,
    )
    if arguments.json:
        write(json.dumps(kv_plan.to_json(planned), indent=2))
    else:
        show(kv_plan.render(planned))
    return 0


def _model(arguments: argparse.Namespace) -> tuple[kv_plan.ModelShape, int | None]:
    """Its shape, and the window of all its layers; None where one sees everything, or nothing is known."""
    if arguments.model and arguments.named:
        raise ConfigError("--model", f"the model is named twice: {arguments.model} and {arguments.named}")
    if model := arguments.model or arguments.named:
        config = _model_config(model)
        return kv_plan.plan_from_config(config, arguments.dtype), _window(config)
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        if getattr(arguments, name) is None:
            raise ConfigError(f"--{name.replace('_', '-')}", "is needed where no model is named")
    shape = kv_plan.shape_in(
        arguments.dtype or "float16",
        num_layers=arguments.num_layers,
        num_kv_heads=arguments.num_kv_heads,
        head_dim=arguments.head_dim,
    )
    return shape, None


def _window(config: Mapping[str, object]) -> int | None:
    """As the decoder will have it. Of other families only a probe can tell, which `serve` makes."""
    if "sliding_window" not in config and config.get("model_type") != "mistral":
        return None  # without a look at the decoder, which brings torch
    from pageturner.service.model.decoder_config import family_window

    return family_window(config)


def _model_config(model: str) -> dict[str, object]:
    """config.json, of a folder or by itself; whatever else `serve` takes goes through its loader."""
    path = Path(model)
    if path.suffix == ".json":
        return _read_json(path)
    if (path / "config.json").is_file():
        return _read_json(path / "config.json")
    from pageturner.service.config import cache_directory
    from pageturner.service.model.loader import load_artifacts
    from pageturner.service.model.options import ModelOptions

    artifacts = load_artifacts(ModelOptions(source=model), cache_directory())
    return {**artifacts.config, "dtype": artifacts.dtype}


def _read_json(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return config


def _budget(text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise ConfigError("--budget", str(error)) from error
