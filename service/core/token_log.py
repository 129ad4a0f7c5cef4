"""The tokens of a sequence as they grow, and frozen views of what there was at a moment.

A view costs the same however long the sequence is. Who derives something from it (`service.model.sampler`
counts tokens) may keep that by its log, and take in only what has come since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload
from weakref import ref


class TokenLog:
    """Tokens that are only ever appended to, by the one who made the log.

    num_shared: with how many of its tokens the log began that it was forked from; 0 where it was from none.
    """

    __slots__ = ("__weakref__", "_origin", "_tokens", "num_shared")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._origin: ref[TokenLog] | None = None
        self.num_shared = 0

    def fork(self, tokens: list[int]) -> TokenLog:
        """A log of tokens that are the same up to now. What is derived of these by this log holds for it."""
        child = TokenLog(tokens)
        child._origin, child.num_shared = ref(self), len(tokens)
        return child

    @property
    def origin(self) -> TokenLog | None:
        """The log that it was forked from, while anyone has that."""
        return None if self._origin is None else self._origin()

    def view(self, start: int, stop: int) -> TokenView:
        """The tokens from `start` up to `stop`, both within what there is."""
        assert 0 <= start <= stop <= len(self._tokens), f"{start}:{stop} of {len(self._tokens)} tokens"
        return TokenView(self, start, stop)

    def slice(self, start: int, stop: int) -> tuple[int, ...]:
        """A copy of the tokens from `start` up to `stop`."""
        return tuple(self._tokens[start:stop])


class TokenView(Sequence[int]):
    """A stretch of a log, never another one. Equal to a tuple of the same tokens, and pickled as one."""

    __slots__ = ("_stop", "log", "start")

    def __init__(self, log: TokenLog, start: int, stop: int) -> None:
        self.log = log
        self.start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(self.log.slice(self.start, self._stop))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, int):
            return self.log.slice(self.start, self._stop)[index]
        start, stop, step = index.indices(len(self))
        assert step == 1, "a view is sliced in its own order"
        return self.log.slice(self.start + start, self.start + stop)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (TokenView, tuple)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[object, ...]:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        return repr(tuple(self))


class DraftedTokens(Sequence[int]):
    """What a view shows, and drafts behind it. Equal to a tuple of the same tokens, and pickled as one."""

    __slots__ = ("drafts", "view")

    def __init__(self, view: TokenView, drafts: tuple[int, ...]) -> None:
        self.view = view
        self.drafts = drafts

    def __len__(self) -> int:
        return len(self.view) + len(self.drafts)

    def __iter__(self) -> Iterator[int]:
        yield from self.view
        yield from self.drafts

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (DraftedTokens, TokenView, tuple)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[object, ...]:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        return repr(tuple(self))
