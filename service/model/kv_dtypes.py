"""What the KV cache is kept in: the words of the configuration, and the dtypes of pools."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pageturner.kernels.layout import is_coded

POOL_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
"""By the words that the configuration and GetServerInfo have for them."""


def name_of(dtype: torch.dtype) -> str:
    """The word for a pool's dtype."""
    return next(word for word, pool in POOL_DTYPES.items() if pool is dtype)


def is_coded_name(word: str) -> bool:
    """Whether a word of the configuration asks for codes: beside any activations, whatever the operations."""
    return word in POOL_DTYPES and is_coded(POOL_DTYPES[word])
