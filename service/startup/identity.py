"""What a model's logits hang on, wherever a part of it is computed: its weights, and the code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import torch

from pageturner import __version__, kernels
from pageturner.service import grammars as grammars_package
from pageturner.service import model as model_package
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.backend import Backend
from pageturner.service.model.conversion_cache import content_key

_SOURCE_SUFFIXES = frozenset({".py", ".h", ".cpp", ".cu", ".cuh"})


def part_identity(artifacts: ModelArtifacts, backend: Backend) -> dict[str, str]:
    """What must be equal on all ranks of a model, for their parts to make one."""
    return {
        "code": code_key(),
        "torch": torch.__version__,
        "weights": weights_key(artifacts),
        "dtype": artifacts.dtype,
        "device": backend.device.type,
    }


def weights_key(artifacts: ModelArtifacts) -> str:
    """Changes with the content of the weights, and of the configuration that says how they are used."""
    config = json.dumps(artifacts.config, sort_keys=True, default=str)
    if artifacts.packed is not None:
        content = artifacts.packed.name  # a conversion is named for the content of its source
    else:
        content = content_key(artifacts.weight_files, "")
    return short(content, config)


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


def short(*texts: str) -> str:
    """A digest of texts, in their order."""
    return sha256("\0".join(texts).encode()).hexdigest()[:12]
