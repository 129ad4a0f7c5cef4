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
        withheld = _withheld(np.stack(list(allowed.values())), logits)
        if len(allowed) < len(logits):
            (numbers,) = upload((np.array(list(allowed), dtype=np.int64),), logits.device)
            some = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            withheld = some.index_copy_(0, numbers, withheld)
        logits.masked_fill_(withheld, -math.inf)
    return errors


def _withheld(words: Words, logits: torch.Tensor) -> torch.Tensor:
    """bool [k, V]: the bits of int32 [k, words] that are 0."""
    if logits.device.type == "cpu":
        return unset_bits(words, logits.shape[-1])
    (packed,) = upload((words,), logits.device)  # an eighth of what the bits would be as bytes
    return unset_bits_of_tensor(packed, logits.shape[-1])


def unset_bits(words: Words, width: int) -> torch.Tensor:
    """bool [k, width] of int32 [k, words], on the CPU."""
    bits = np.unpackbits(words.view(np.uint8), axis=-1, count=width, bitorder="little")
    return torch.from_numpy(bits == 0)


def unset_bits_of_tensor(words: torch.Tensor, width: int) -> torch.Tensor:
    """The same of a tensor on any device, where it is."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return (((words.unsqueeze(-1) >> shifts) & 1) == 0).flatten(1)[:, :width]
