"""A map that never changes does what a dict does, and keeps all its old selves."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pageturner.policies.frozen_map import FrozenMap


@dataclass(frozen=True)
class Colliding:
    """A key that shares its hash with many others."""

    number: int

    def __hash__(self) -> int:
        return self.number % 2


keys = st.integers(0, 200) | st.integers(0, 200).map(Colliding) | st.text(max_size=3)
changes = st.lists(st.tuples(st.booleans() | st.just(True), keys, st.integers()), max_size=200)


@given(changes)
def test_it_does_what_a_dict_does(changes: list[tuple[bool, int | Colliding | str, int]]) -> None:
    made: FrozenMap[int | Colliding | str, int] = FrozenMap()
    expected: dict[int | Colliding | str, int] = {}
    for is_set, key, value in changes:
        if is_set:
            made = made.set(key, value)
            expected[key] = value
        else:
            made = made.remove(key)
            expected.pop(key, None)
        assert made.get(key) == expected.get(key)
        assert len(made) == len(expected)
    assert dict(made.items()) == expected
    assert set(made) == expected.keys()
    assert sorted(made.values()) == sorted(expected.values())


@given(changes)
def test_old_selves_stay(changes: list[tuple[bool, int | Colliding | str, int]]) -> None:
    made: FrozenMap[int | Colliding | str, int] = FrozenMap()
    selves = []
    for is_set, key, value in changes:
        selves.append((made, dict(made.items())))
        made = made.set(key, value) if is_set else made.remove(key)
    assert all(dict(old.items()) == entries for old, entries in selves)


def test_maps_with_equal_entries_are_equal_however_they_were_built() -> None:
    grown: FrozenMap[int, int] = FrozenMap()
    for number in range(500):
        grown = grown.set(number, number)
    for number in range(1, 500):
        grown = grown.remove(number)
    assert grown == FrozenMap[int, int]().set(0, 0)
    assert grown != FrozenMap[int, int]().set(0, 1)
    assert grown != {0: 0}


def test_to_take_out_what_is_not_there_changes_nothing() -> None:
    made = FrozenMap[str, int]().set("a", 1)
    assert made.remove("b") is made
