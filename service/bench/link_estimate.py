"""What ranks say to each other in a step, and the least time that a link between GPUs takes for it, on paper.

Bytes come from the way the sums are made (`model/tensor_parallel`): a small tensor goes whole to every rank,
a large one in two steps of its shares. Bandwidths are the makers'. What a collective takes to start is
published by nobody and left out: of a decode's small tensors it is most of the time, so `num_collectives`
stands beside.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.model.tensor_parallel.torch_collectives import TWO_STEP_BYTES

_BFLOAT16 = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model, what decides how much is said."""

    name: str
    num_layers: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Link:
    """bandwidth: bytes/s in one direction, of one GPU to all others together."""

    name: str
    bandwidth: float


SHAPES = (Shape("Llama-3-8B", 32, 4096, 128_256), Shape("Llama-3-70B", 80, 8192, 128_256))
LINKS = (
    # NVIDIA H100 and A100 data sheets: 900 and 600 GB/s, both directions together.
    Link("NVLink 4 (H100, H200)", 450e9),
    Link("NVLink 3 (A100)", 300e9),
    Link("PCIe 5.0 x16", 64e9),
)
SIZES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Of a step of num_decodes rows on `size` ranks: bytes that each rank receives, and microseconds by
    link."""

    shape: str
    size: int
    num_decodes: int
    num_collectives: int
    received_bytes: int
    microseconds: dict[str, float]


def estimate_step(shape: Shape, size: int, num_decodes: int) -> LinkEstimate:
    """Two sums a layer, one of the embedding, and the logits of all rows, in bfloat16."""
    rows = num_decodes * shape.hidden * _BFLOAT16
    num_sums = 2 * shape.num_layers + 1
    is_whole = size == 2 or rows < TWO_STEP_BYTES
    # Whole: from every other rank its tensor. In two steps: of every other rank a share, twice.
    a_sum = (size - 1) * rows if is_whole else 2 * (size - 1) * rows // size
    logits = num_decodes * shape.vocabulary * _BFLOAT16 * (size - 1) // size
    received = num_sums * a_sum + logits
    num_collectives = num_sums * (1 if is_whole else 2) + 1
    times = {link.name: received / link.bandwidth * 1e6 for link in LINKS}
    return LinkEstimate(shape.name, size, num_decodes, num_collectives, received, times)
