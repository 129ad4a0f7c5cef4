"""Which block of a grid does what: planned on the host, once a step and mask, for all layers alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Int32Array = np.ndarray[tuple[int, int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work of the attention kernels, rows as the structs of arguments.cuh.

    decode_items: int32 [D, 4] (sequence, first_key, end_key, partial). merge_items: int32 [M, 4]
    (sequence, first_partial, num_partials, 0). prefill_tiles: int32 [P, 2] (sequence, first_row).
    num_partials: partial results that the decode items leave.
    """

    decode_items: Int32Array
    merge_items: Int32Array
    prefill_tiles: Int32Array
    num_partials: int
