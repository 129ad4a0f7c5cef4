"""Philox against its authors' vectors, and the uniforms made of it."""

from __future__ import annotations

import numpy as np
import pytest

from pageturner.service.model.random_streams import philox4x32, uniforms

# kat_vectors of Random123: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _columns(texts: list[str]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array([_words(text) for text in texts], dtype=np.uint64).T


def test_philox_gives_the_published_words_alone_and_together() -> None:
    counters, keys, results = (list(column) for column in zip(*VECTORS, strict=True))
    assert (philox4x32(_columns(counters), _columns(keys)) == _columns(results)).all()
    for counter, key, result in VECTORS:
        assert philox4x32(_columns([counter]), _columns([key]))[:, 0].tolist() == _words(result)


def test_a_uniform_is_the_first_52_bits_of_its_counter() -> None:
    first, second = _words("6627e8d5 e169c58d")
    assert uniforms([0], [0], [0])[0] == ((first << 20) | (second >> 12)) / 2**52


def test_streams_do_not_depend_on_their_neighbours() -> None:
    seeds, indices, positions = [5, 2**64 - 1, 5, 5], [0, 1, 1, 0], [7, 2**40, 7, 8]
    together = uniforms(seeds, indices, positions)
    alone = [uniforms([s], [i], [p])[0] for s, i, p in zip(seeds, indices, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_every_word_of_seed_index_and_position_counts() -> None:
    cases = [(0, 0, 0)]
    cases += [(1 << bit, 0, 0) for bit in range(64)]
    cases += [(0, 1 << bit, 0) for bit in range(32)]
    cases += [(0, 0, 1 << bit) for bit in range(64)]
    seeds, indices, positions = zip(*cases, strict=True)
    assert len(set(uniforms(seeds, indices, positions).tolist())) == len(cases)


def test_uniforms_are_uniform_along_each_axis() -> None:
    count, bins = 20_000, 20
    axis = list(range(count))
    zeros = [0] * count
    for keys in ((axis, zeros, zeros), (zeros, axis, zeros), (zeros, zeros, axis)):
        values = uniforms(*keys)
        assert values.min() >= 0
        assert values.max() < 1
        observed = np.bincount((values * bins).astype(int), minlength=bins)
        chi_square = ((observed - count / bins) ** 2 / (count / bins)).sum()
        assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001; the streams are fixed
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.025


def test_a_draw_never_reaches_the_mass() -> None:
    largest = (2**52 - 1) / 2**52
    for mass in (1.0, np.nextafter(1.0, 2.0), 3.0, 1e-300, float(np.nextafter(2.0, 0.0)), 49152.7):
        assert largest * mass < mass


@pytest.mark.parametrize("count", [0, 1])
def test_small_batches(count: int) -> None:
    assert uniforms([3] * count, [0] * count, [0] * count).shape == (count,)
