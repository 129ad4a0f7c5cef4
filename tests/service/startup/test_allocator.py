"""The bound on the allocator's arenas, as the C library is told it."""

from __future__ import annotations

import pytest

from pageturner.service.errors import ConfigError
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.startup.allocator import bound_arenas


@pytest.mark.fault("S")
def test_the_c_library_is_told_the_number_of_arenas() -> None:
    told: list[tuple[int, int]] = []

    def mallopt(name: int, value: int) -> int:
        told.append((name, value))
        return 1

    assert bound_arenas(2, mallopt)
    assert told == [(-8, 2)], "M_ARENA_MAX of malloc.h"
    assert not bound_arenas(0, mallopt), "0 leaves the allocator as it is"
    assert len(told) == 1
    assert not bound_arenas(2, lambda name, value: 0), "a C library may refuse"


def test_a_server_bounds_them_by_default() -> None:
    assert ServerOptions().malloc_arenas == 2
    with pytest.raises(ConfigError, match=r"server\.malloc_arenas"):
        ServerOptions(malloc_arenas=-1)
