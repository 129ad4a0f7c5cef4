"""Who attends: our paged kernels, torch's SDPA on keys laid out for it, and SDPA that gathers them first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name every reader of torch expects
from torch.nn.attention import SDPBackend, sdpa_kernel

from pageturner.service.bench.attention_cases import Inputs, contiguous

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pageturner.kernels.interface import PagedOps

BLOCK_SIZES = (16, 64)
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_MOST_ELEMENTS = 2**31
Call = Callable[[], torch.Tensor]


class NotAtHand(Exception):
    """A contender can't take part; the message says why."""


class AttentionContender(Protocol):
    """block_size: of the pool that it wants."""

    @property
    def name(self) -> str:
        """As reports show it."""

    @property
    def block_size(self) -> int:
        """Of the pool that it is given."""

    def prepare(self, inputs: Inputs) -> Call:
        """What shall be timed: a call without arguments that gives [T, num_heads, head_dim], or the same
        numbers as SDPA lays them out. Raises NotAtHand, now or when it is first called."""
        ...


@dataclass(frozen=True, slots=True)
class Paged:
    """Our operations over a pool of blocks of this size."""

    ops: PagedOps
    block_size: int

    @property
    def name(self) -> str:
        return paged_name(self.block_size)

    def prepare(self, inputs: Inputs) -> Call:
        return lambda: self.ops.attention(inputs.query, inputs.kv_layer, inputs.batch, inputs.spec)


@dataclass(frozen=True, slots=True)
class Sdpa:
    """torch's SDPA by one backend. gathers: the call first gathers the keys and values from the pool."""

    backend: str
    gathers: bool
    block_size: int = BLOCK_SIZES[0]

    @property
    def name(self) -> str:
        return sdpa_name(self.backend, gathers=self.gathers)

    def prepare(self, inputs: Inputs) -> Call:
        if inputs.kv_layer.numel() // 2 >= _MOST_ELEMENTS:
            raise NotAtHand("keys of 2^31 elements, which not every backend of SDPA can address")
        if self.gathers:
            return lambda: self._attend(inputs, *contiguous(inputs))
        query, keys, values = contiguous(inputs)
        keys, values = keys.contiguous(), values.contiguous()
        return lambda: self._attend(inputs, query, keys, values)

    def _attend(
        self, inputs: Inputs, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[T, num_heads, head_dim]."""
        shape, prefills = inputs.query.shape, inputs.case.kind == "prefill"
        if not prefills:
            # The heads of a group as rows: SDPA then reads its keys once, and every backend takes part.
            query = query.reshape(len(query), inputs.case.heads.num_kv_heads, -1, query.shape[-1])
        with _reasons_as_not_at_hand(), sdpa_kernel(SDPA_BACKENDS[self.backend]):
            result = F.scaled_dot_product_attention(
                query, keys, values, is_causal=prefills, scale=inputs.spec.scale, enable_gqa=prefills
            )
        return result.transpose(1, 2).reshape(shape) if prefills else result.reshape(shape)


@dataclass(frozen=True, slots=True)
class TritonPaged:
    """vLLM's paged attention in Triton, where vLLM is installed (0.32 was read; it has not been run here).

    Its blocks keep tokens before heads, so it gets a pool of its own. Small batches are split over `segments`
    of the keys, as its own backend does.
    """

    block_size: int = BLOCK_SIZES[0]
    segments: int = 16
    split_below: int = 128
    name: str = "triton paged (vLLM)"

    def prepare(self, inputs: Inputs) -> Call:
        attention = _vllm_attention()
        heads, batch = inputs.case.heads, inputs.batch
        keys, values = (inputs.kv_layer[:, side].transpose(1, 2).contiguous() for side in (0, 1))
        output = torch.empty_like(inputs.query)
        most_split = self.split_below // heads.num_kv_heads
        parts = output.new_empty(
            most_split, heads.num_heads, self.segments, heads.head_dim, dtype=torch.float32
        )
        sums = [torch.empty_like(parts[..., 0]) for _ in range(2)]

        def attend() -> torch.Tensor:
            try:
                attention(
                    q=inputs.query,
                    k=keys,
                    v=values,
                    out=output,
                    cu_seqlens_q=batch.query_start_loc,
                    max_seqlen_q=batch.max_query_len,
                    seqused_k=batch.seq_lens,
                    max_seqlen_k=batch.max_seq_len,
                    softmax_scale=inputs.spec.scale,
                    causal=True,
                    window_size=(-1, -1),
                    block_table=batch.block_tables,
                    softcap=0.0,
                    q_descale=None,
                    k_descale=None,
                    v_descale=None,
                    seq_threshold_3D=most_split,
                    num_par_softmax_segments=self.segments,
                    softmax_segm_output=parts,
                    softmax_segm_max=sums[0],
                    softmax_segm_expsum=sums[1],
                )
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whichever version is installed may take other arguments
                raise NotAtHand(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
            return output

        return attend


def _vllm_attention() -> Callable[..., None]:
    try:
        found = import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    except (ImportError, AttributeError) as error:
        raise NotAtHand(str(error)) from error
    return cast("Callable[..., None]", found)


def contenders(ops: PagedOps) -> Sequence[AttentionContender]:
    """Ours at both block sizes first, then the others."""
    return (
        *(Paged(ops, block_size) for block_size in BLOCK_SIZES),
        *(Sdpa(backend, gathers) for gathers in (True, False) for backend in SDPA_BACKENDS),
        TritonPaged(),
    )


def paged_name(block_size: int) -> str:
    """The name of our operations at a block size."""
    return f"pageturner, blocks of {block_size}"


def sdpa_name(backend: str, *, gathers: bool) -> str:
    """The name of SDPA by a backend."""
    return f"sdpa {backend}, {'gathered' if gathers else 'contiguous'}"


@contextmanager
def _reasons_as_not_at_hand() -> Iterator[None]:
    """torch warns of why a backend can't be used, each reason a warning, and then raises that none can."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            said = [str(warning.message).partition(" (Triggered")[0].strip() for warning in caught]
            reasons = [reason for reason in said if not reason.endswith("because:")]
            raise NotAtHand(reasons[0] if reasons else str(error).partition("\n")[0]) from error
