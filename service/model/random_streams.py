"""Counter-based random numbers: a function of (seed, choice, position), with no state to carry.

A token's random number therefore does not depend on which requests share its batch, on preemptions,
or on how the tokens before it were computed, and a broken stream can be resumed elsewhere.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", SC 2011): ten rounds of multiply and xor turn a 128-bit counter under a 64-bit key into 128
random bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """counter [4, R], key [2, R], all below 2**32 -> [4, R] random words below 2**32."""
    for _ in range(_ROUNDS):
        product = counter[::2] * _MULTIPLIERS
        high, low = product >> _32, product & _MASK
        counter = np.stack((high[1] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], low[0]))
        key = (key + _WEYL) & _MASK
    return counter


def uniforms(seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, choice index, token position), float64 [R].

    Seeds are below 2**64, indices below 2**32, positions below 2**64. 52 random bits, so that for any
    positive mass `u * mass < mass` holds after rounding too.
    """
    seed = np.array(seeds, dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    counter = np.stack((position & _MASK, position >> _32, index, np.zeros_like(index)))
    words = philox4x32(counter, np.stack((seed & _MASK, seed >> _32)))
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    result: NDArray[np.float64] = bits * 2.0**-52
    return result
