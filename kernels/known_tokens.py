"""Known tokens that rows of logits score, and their scores: operands of a head that writes no logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageturner.kernels import checks
from pageturner.kernels.errors import KernelArgumentError


@dataclass(frozen=True, slots=True, eq=False)
class KnownTokens:
    """Tokens by the R rows that score them: of row r token_ids[starts[r] : starts[r + 1]]."""

    starts: torch.Tensor
    """int32 [R + 1], ascending from 0."""
    token_ids: torch.Tensor
    """int32 [K]."""
    num_top: int = 0
    """How many of the likeliest tokens are wanted of each row; all, where the vocabulary has no more."""

    @property
    def num_rows(self) -> int:
        return len(self.starts) - 1

    def rows(self) -> torch.Tensor:
        """int64 [K], the row of each token."""
        return torch.repeat_interleave(self.starts.diff().long(), output_size=len(self.token_ids))

    def of_rows(self, begin: int, end: int) -> KnownTokens:
        """Those of rows [begin, end), on the CPU."""
        first, last = (int(self.starts[row]) for row in (begin, end))
        return KnownTokens(self.starts[begin : end + 1] - first, self.token_ids[first:last], self.num_top)

    def contiguous(self) -> KnownTokens:
        """The same, each tensor without gaps."""
        return KnownTokens(self.starts.contiguous(), self.token_ids.contiguous(), self.num_top)

    def check(self, num_rows: int, vocab_size: int) -> None:
        """Raises KernelArgumentError if they are not of so many rows and such a vocabulary, on the CPU."""
        checks.check_shape("starts", self.starts, (num_rows + 1,), torch.int32)
        checks.check_shape("token_ids", self.token_ids, (None,), torch.int32)
        checks.check_on_cpu(starts=self.starts, token_ids=self.token_ids)
        ends = int(self.starts[0]), int(self.starts[-1])
        if ends != (0, len(self.token_ids)) or bool((self.starts.diff() < 0).any()):
            raise KernelArgumentError(
                "starts", f"{ends[0]} to {ends[1]}", f"0 to {len(self.token_ids)}, ascending"
            )
        if len(self.token_ids):
            low, high = (int(bound) for bound in self.token_ids.aminmax())
            if low < 0 or high >= vocab_size:
                raise KernelArgumentError("token_ids", f"{low} to {high}", f"0 to {vocab_size - 1}")
        if self.num_top < 0:
            raise KernelArgumentError("num_top", str(self.num_top), "0 or more")


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Log-probabilities of known tokens, and the likeliest of each row, by value, then by lowest id.

    All of a row are NaN, and its top_ids anything, where it holds NaN or +inf, or nothing but -inf.
    """

    logprobs: torch.Tensor
    """float32 [K]."""
    top_logprobs: torch.Tensor
    """float32 [R, min(num_top, vocabulary)]."""
    top_ids: torch.Tensor
    """int64, of the same shape."""

    @classmethod
    def empty(cls, known: KnownTokens, vocab_size: int) -> TokenScores:
        """Room for those of `known`, on the CPU."""
        shape = (known.num_rows, min(known.num_top, vocab_size))
        return cls(
            torch.empty(len(known.token_ids)), torch.empty(shape), torch.empty(shape, dtype=torch.int64)
        )
