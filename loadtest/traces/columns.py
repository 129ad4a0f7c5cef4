"""The requests of a trace in memory: a few numbers each, in columns, since there may be millions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LENGTH = (1 << 20) - 1
"""The most tokens of a prompt or an output that a reader takes."""


@dataclass(frozen=True, slots=True)
class Labels:
    """What few formats say of a request, and equal for many.

    deadline_seconds: after its arrival. num_choices: answers that it asked for. max_tokens: of each of them;
    None where it is what was generated.
    """

    tenant: str = ""
    priority: int = 0
    deadline_seconds: float | None = None
    num_choices: int = 1
    max_tokens: int | None = None


NO_LABELS = Labels()


@dataclass(slots=True)
class TraceColumns:
    """Requests in the order of the file: `add` appends one to every column.

    at_seconds: of any origin. hash_ids: of all requests one after the other; hash_ends: where those of a
    request end. labels: index into label_values.
    """

    at_seconds: array[float] = field(default_factory=lambda: array("d"))
    num_prompt: array[int] = field(default_factory=lambda: array("l"))
    num_output: array[int] = field(default_factory=lambda: array("l"))
    hash_ids: array[int] = field(default_factory=lambda: array("Q"))
    hash_ends: array[int] = field(default_factory=lambda: array("Q"))
    block_tokens: array[int] = field(default_factory=lambda: array("l"))
    labels: array[int] = field(default_factory=lambda: array("l"))
    label_values: list[Labels] = field(default_factory=list)
    num_silent: int = 0
    """Requests that generated nothing: they failed when the trace was taken, and are left out."""
    _label_index: dict[Labels, int] = field(default_factory=dict)

    def add_lengths(self, at_seconds: float, num_prompt: int, num_output: int) -> None:
        """A request of a format that tells nothing else."""
        self.at_seconds.append(at_seconds)
        self.num_prompt.append(num_prompt)
        self.num_output.append(num_output)

    def add(
        self,
        at_seconds: float,
        num_prompt: int,
        num_output: int,
        hash_ids: Sequence[int],
        block_tokens: int,
        labels: Labels,
    ) -> None:
        """A request whose prompt begins with the blocks of `hash_ids`. Raises OverflowError for an id that is
        not from 0 to 2**64 - 1, before anything is added."""
        ids = array("Q", hash_ids)
        self.add_lengths(at_seconds, num_prompt, num_output)
        self.hash_ids.extend(ids)
        self.hash_ends.append(len(self.hash_ids))
        self.block_tokens.append(block_tokens)
        index = self._label_index.setdefault(labels, len(self.label_values))
        if index == len(self.label_values):
            self.label_values.append(labels)
        self.labels.append(index)
