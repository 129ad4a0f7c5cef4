"""What this server's tokens hang on: weights, tokenizer, arithmetic, and the code that does it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import torch

from pageturner import __version__, kernels
from pageturner.service import grammars as grammars_package
from pageturner.service import model as model_package
from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.conversion_cache import content_key
from pageturner.service.model.cpu_features import cpu_identity, has_bfloat16, read_cpuinfo
from pageturner.service.model.kv_dtypes import name_of
from pageturner.service.startup.loading import LoadedModel

_SOURCE_SUFFIXES = frozenset({".py", ".h", ".cpp", ".cu", ".cuh"})


def describe_fingerprint(model: LoadedModel) -> Fingerprint:
    """The fingerprint of answers that this model gives.

    Its parts change with anything that may change a bit of the logits, or the choice of a token from them. A
    block's size is none of them: no kernel whose promise is kept adds in an order that depends on it.
    """
    return Fingerprint.of_parts(
        {
            "weights": weights_key(model.artifacts),
            "tokenizer": tokenizer_key(model.artifacts),
            "products": model.products.name,
            "kv": name_of(model.model.kv_dtype),
            "kernels": model.ops.name,
            "deterministic": "yes" if model.deterministic else "no",
            "machine": machine_key(model, read_cpuinfo()),
            "code": code_key(),
        },
        is_exact=model.deterministic,
    )


def weights_key(artifacts: ModelArtifacts) -> str:
    """Changes with the content of the weights, and of the configuration that says how they are used."""
    config = json.dumps(artifacts.config, sort_keys=True, default=str)
    if artifacts.packed is not None:
        content = artifacts.packed.name  # a conversion is named for the content of its source
    else:
        content = content_key(artifacts.weight_files, "")
    return _short(content, config)


def tokenizer_key(artifacts: ModelArtifacts) -> str:
    """Changes with the text of any token, and with the tokens that end an answer."""
    # Its files where it has them: writing a tokenizer out takes ten times as long as reading them.
    files = [artifacts.folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    if artifacts.tokenizer is None:
        texts = [""]
    elif files[0].exists():
        texts = [sha256(file.read_bytes()).hexdigest() for file in files if file.exists()]
    else:
        texts = [artifacts.tokenizer.to_str()]
    return _short(*texts, str(artifacts.eos_token_ids))


def machine_key(model: LoadedModel, cpuinfo: str) -> str:
    """What of the machine the bits may depend on: the instructions that kernels and torch were chosen for.

    Libraries for products of plain numbers choose by the processor's model and share work by the threads.
    Quantised products have the same bits on all machines, but attention multiplies pairs of bfloat16 where
    the processor has instructions for them. cpuinfo: of Linux.
    """
    torch_name = f"torch-{torch.__version__}"
    if model.backend.device.type != "cpu":
        return _short(torch_name, torch.cuda.get_device_name(model.backend.device))
    quantised = model.backend.quantised
    if model.artifacts.packed is not None and quantised is not None:
        pairs = "bfloat16" if has_bfloat16(cpuinfo) else ""
        return _short(torch_name, torch.backends.cpu.get_cpu_capability(), quantised.ops.name, pairs)
    return _short(torch_name, cpu_identity(cpuinfo), str(torch.get_num_threads()))


def code_key() -> str:
    """Changes with the source of kernels, forward, sampler and what masks tokens."""
    digest = sha256(__version__.encode())
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _sources() -> Iterator[Path]:
    for package in (kernels, model_package, grammars_package):
        for folder in package.__path__:
            yield from sorted(path for path in Path(folder).rglob("*") if path.suffix in _SOURCE_SUFFIXES)


def _short(*texts: str) -> str:
    return sha256("\0".join(texts).encode()).hexdigest()[:12]
