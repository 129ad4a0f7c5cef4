"""A mapping that never changes: `set` and `remove` give a new one that shares almost all with the old.

For the states of policies, which must be values, and yet may hold an entry for each of 100,000 requests.
It is a trie over the bits of a key's hash whose leaves are small dicts (Bagwell, "Ideal Hash Trees",
2001, made plainer), so a change copies one leaf and the few nodes above it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_BITS = 5
_LEAF_ENTRIES = 16
_HASH_BITS = 60
_Node: TypeAlias = "dict[Any, Any] | tuple[_Node, ...]"


class FrozenMap(Generic[K, V]):
    """Equal to another if the entries are; their order is unspecified, so nothing may depend on it.

    No value is None: that is what `get` gives for a key that is not there.
    """

    __slots__ = ("_root", "_size")

    def __init__(self) -> None:
        self._root: _Node = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self.items())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FrozenMap):
            return NotImplemented
        return self is other or dict(self.items()) == dict(other.items())

    __hash__ = None  # type: ignore[assignment]  # its values need not be hashable

    def __repr__(self) -> str:
        return f"FrozenMap({dict(self.items())!r})"

    def get(self, key: K) -> V | None:
        """The value of `key`; None if it has none."""
        node, bits = self._root, hash(key)
        while isinstance(node, tuple):
            node, bits = node[bits & 31], bits >> _BITS
        value: V | None = node.get(key)
        return value

    def items(self) -> Iterator[tuple[K, V]]:
        """Keys and values, in no stated order."""
        return _items(self._root)

    def values(self) -> Iterator[V]:
        """Values, in the order of `items`."""
        return (value for _, value in self.items())

    def set(self, key: K, value: V) -> FrozenMap[K, V]:
        """With `value` at `key`, whatever was there."""
        return _made(_with(self._root, key, value, 0), self._size + (self.get(key) is None))

    def remove(self, key: K) -> FrozenMap[K, V]:
        """Without `key`; itself if there is none."""
        if self.get(key) is None:
            return self
        return _made(_without(self._root, key, hash(key)) if self._size > 1 else {}, self._size - 1)


def _made(root: _Node, size: int) -> FrozenMap[K, V]:
    made: FrozenMap[K, V] = FrozenMap()
    made._root, made._size = root, size
    return made


def _items(node: _Node) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, dict):
        yield from node.items()
    else:
        for child in node:
            yield from _items(child)


def _with(node: _Node, key: Any, value: Any, shift: int) -> _Node:
    if isinstance(node, tuple):
        index = hash(key) >> shift & 31
        return (*node[:index], _with(node[index], key, value, shift + _BITS), *node[index + 1 :])
    leaf = {**node, key: value}
    if len(leaf) <= _LEAF_ENTRIES or shift >= _HASH_BITS:  # equal hashes cannot be told apart any further
        return leaf
    children: list[dict[Any, Any]] = [{} for _ in range(1 << _BITS)]
    for each, its_value in leaf.items():
        children[hash(each) >> shift & 31][each] = its_value
    return tuple(children)


def _without(node: _Node, key: Any, bits: int) -> _Node:
    if isinstance(node, tuple):
        index = bits & 31
        return (*node[:index], _without(node[index], key, bits >> _BITS), *node[index + 1 :])
    return {each: value for each, value in node.items() if each != key}
