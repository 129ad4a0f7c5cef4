"""`pageturner bench lora`: what adapters in a batch cost, against the same requests with none.

One server has all of them loaded. Contenders take turns in a closed loop, each request of a round with the
next of the contender's adapters, so that every step holds rows of all of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from pageturner.service.client import Client
from pageturner.service.client.server_process import running_server
from pageturner.service.errors import ModelError
from pageturner.service.model.adapter_config import MODULES
from pageturner.service.model.adapters import CONFIG_FILE, WEIGHTS_FILE
from pageturner.service.model.decoder_config import DecoderConfig, parse_decoder_config
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions

REQUESTS_PER_CLIENT = 2
NONE = "no adapter"


@dataclass(frozen=True, slots=True)
class LoraLoad:
    """concurrency: requests in flight. num_adapters: of each rank."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    num_adapters: int
    ranks: tuple[int, ...]

    @property
    def contenders(self) -> Mapping[str, tuple[str, ...]]:
        """By what it is called, the adapters of its requests in turn."""
        adapted = {
            f"{self.num_adapters} adapters of rank {rank}": tuple(
                f"r{rank}-{number}" for number in range(self.num_adapters)
            )
            for rank in self.ranks
        }
        return {NONE: ("",), **adapted}


@dataclass(frozen=True, slots=True)
class LoraResult:
    """Output tokens/s of each round, by contender."""

    load: LoraLoad
    rounds: Mapping[str, tuple[float, ...]]

    def ratios(self) -> dict[str, float]:
        """Of each contender to none: the median over rounds of neighbours in time."""
        base = self.rounds[NONE]
        return {
            name: statistics.median(mine / other for mine, other in zip(found, base, strict=True))
            for name, found in self.rounds.items()
        }


def measure_lora(
    load: LoraLoad,
    rounds: int,
    model: ModelOptions,
    cache_dir: Path,
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> LoraResult:
    """arguments: flags of the server. Raises ModelError for a model that takes no adapters."""
    found: dict[str, list[float]] = {name: [] for name in load.contenders}
    config = parse_decoder_config(load_artifacts(model, cache_dir).config)
    with tempfile.TemporaryDirectory() as folder:
        folders = {
            name: write_adapter(config, Path(folder) / name, int(name[1:].partition("-")[0]), seed)
            for seed, name in enumerate(name for names in load.contenders.values() for name in names if name)
        }
        table = ", ".join(f"{json.dumps(name)} = {json.dumps(str(path))}" for name, path in folders.items())
        flags = (f"--adapters-load={{ {table} }}", f"--adapters-max-rank={max(load.ranks)}")
        with running_server((*arguments, *flags)) as server:
            for names in load.contenders.values():  # warm
                asyncio.run(_round(server.target, load, names, 0))
            for number in range(1, rounds + 1):
                for name, names in load.contenders.items():
                    found[name].append(asyncio.run(_round(server.target, load, names, number)))
                told = ", ".join(f"{name} {figures[-1]:.1f}" for name, figures in found.items())
                say(f"round {number}: output tokens/s {told}")
    return LoraResult(load, {name: tuple(figures) for name, figures in found.items()})


def write_adapter(config: DecoderConfig, folder: Path, rank: int, seed: int) -> Path:
    """An adapter of all modules with random factors, as PEFT saves one; returns the folder."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key, value = config.qkv_sizes
    sizes = [(query, hidden), (key, hidden), (value, hidden), (hidden, query)]
    sizes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for module, (out, width) in zip(MODULES, sizes, strict=True):
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, width, generator=generator) / width**0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.01
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    names = [module.rpartition(".")[2] for module in MODULES]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / CONFIG_FILE).write_text(json.dumps(settings))
    return folder


async def _round(target: str, load: LoraLoad, adapters: Sequence[str], seed: int) -> float:
    """Output tokens/s of a closed loop."""
    dice = random.Random(seed)
    async with Client(target) as client:
        vocab_size = (await client.model()).vocab_size
        if adapters[0] and adapters[0] not in (await client.model()).adapters:
            raise ModelError("the server has not loaded the adapters")

        async def ask(number: int) -> None:
            for turn in range(REQUESTS_PER_CLIENT):
                await client.generate(
                    [dice.randrange(vocab_size) for _ in range(load.prompt_tokens)],
                    max_tokens=load.output_tokens,
                    ignore_eos=True,
                    temperature=0.0,
                    bypass_prefix_cache=True,
                    adapter=adapters[(number + turn) % len(adapters)],
                )

        began = time.monotonic()
        await asyncio.gather(*map(ask, range(load.concurrency)))
        return load.concurrency * REQUESTS_PER_CLIENT * load.output_tokens / (time.monotonic() - began)
