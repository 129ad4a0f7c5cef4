"""Masks of tokens over logits: what a row's form does not allow gets probability 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from pageturner.service.core.outputs import SampleRow
from pageturner.service.errors import PageturnerError
from pageturner.service.grammars.compiler import Words
from pageturner.service.model.upload import upload


class RowMasks(Protocol):
    """Says what rows may sample."""

    def of(self, rows: Sequence[SampleRow]) -> Sequence[Words | PageturnerError]:
        """For each row a bit for each token, int32 [words], or why it can sample nothing."""
        ...


def mask_(
    logits: torch.Tensor, rows: Sequence[tuple[int, SampleRow]], masks: RowMasks
) -> dict[int, PageturnerError]:
    """Withhold in place what is not allowed; logits: float32 [R, V]. Rows that are not named stay as they
    are.

    rows: numbers of rows and what they ask for. Returns why rows can sample nothing, which are left alone.
    """
    found = masks.of([row for _, row in rows])
    errors: dict[int, PageturnerError] = {}
    allowed: dict[int, Words] = {}
    for (number, _), mask in zip(rows, found, strict=True):
        if isinstance(mask, PageturnerError):
            errors[number] = mask
        else:
            allowed[number] = mask
    if allowed:
        (numbers,) = upload((np.array(list(allowed), dtype=np.int64),), logits.device)
        logits.index_add_(0, numbers, _penalties(np.stack(list(allowed.values())), logits))
    return errors


def _penalties(words: Words, logits: torch.Tensor) -> torch.Tensor:
    """float32 [k, V] of int32 [k, words]: 0 where a bit is set, else -inf."""
    if logits.device.type == "cpu":
        return penalties(words, logits.shape[-1])
    (packed,) = upload((words,), logits.device)  # a 32nd of what the penalties would be
    return penalties_of_tensor(packed, logits.shape[-1])


_BITS_OF_BYTE = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_OF_BYTE = np.where(_BITS_OF_BYTE == 1, np.float32(0), np.float32(-np.inf))
"""float32 [256, 8]: the penalties of the eight tokens of a byte. A look-up takes a sixth of what filling by
a mask does, whatever the bits are: 0.15 ms for 16 rows of 49,152 tokens."""


def penalties(words: Words, width: int) -> torch.Tensor:
    """float32 [k, width] of int32 [k, words], on the CPU."""
    of_bytes = np.take(_OF_BYTE, words.view(np.uint8)[:, : -(-width // 8)], axis=0)
    return torch.from_numpy(of_bytes.reshape(len(words), -1)[:, :width])


def penalties_of_tensor(words: torch.Tensor, width: int) -> torch.Tensor:
    """The same of a tensor on any device, where it is."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    bits = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :width]
    return torch.where(bits == 0, -math.inf, 0.0)
