"""What comes true of the drafts of a simulated answer, whose text nobody knows: drawn, and never found.

How far the drafts of a position come true depends on the seed, the request, the choice and the position
alone. So runs of different policies, bounds and options meet the same luck, as they meet the same workload.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass

from pageturner.service.core.drafting.ngram_index import NO_DRAFTS, Drafts
from pageturner.service.core.request import Request, Sequence
from pageturner.service.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How well answers are guessed.

    repeating: share of requests whose answers repeat what was said before. repeat_odds, odds: that a draft
    comes true if those before it did, of such an answer and of any other. repeat_found, found: shares of
    their positions at which drafts are found. The defaults are near what `bench speculation` saw of answers
    that quote, and of stories.
    """

    repeating: float = 0.0
    repeat_odds: float = 0.97
    odds: float = 0.3
    repeat_found: float = 0.95
    found: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("repeating", "repeat_odds", "odds", "repeat_found", "found"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"--drafts {name}", f"{getattr(self, name)} is not in [0, 1]")

    def repeats(self, request_id: str) -> bool:
        """Whether the answers of this request repeat what was said."""
        return random.Random(f"{self.seed}/{request_id}").random() < self.repeating

    def num_right(self, request_id: str, index: int, position: int) -> int | None:
        """How many drafts behind `position` of a choice would come true, however many there are; None where
        none is found."""
        repeats = self.repeats(request_id)
        found, odds = (self.repeat_found, self.repeat_odds) if repeats else (self.found, self.odds)
        drawn = random.Random(f"{self.seed}/{request_id}/{index}/{position}")
        if drawn.random() >= found:
            return None
        chance = 1.0 - drawn.random()  # in (0, 1]
        if odds >= 1.0:
            return _ALL
        return int(math.log(chance) / math.log(odds)) if odds > 0.0 else 0


_ALL = 1 << 30
"""More than any step verifies."""


def parse_acceptance(text: str) -> Acceptance:
    """`repeating=0.3,odds=0.5`: fields that differ from the defaults. Raises ConfigError."""
    names = [field.name for field in dataclasses.fields(Acceptance) if field.name != "seed"]
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in names:
            raise ConfigError("--drafts", f"there is no {name!r}; there are {', '.join(names)}")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError("--drafts", f"{name}: {value!r} is not a number") from None
    return dataclasses.replace(Acceptance(), **values)  # type: ignore[arg-type]  # seed is not among the names


def true_token(request: Request, position: int) -> int:
    """The token that the null sampler gives at `position` of a sequence of this request."""
    return request.new.seed + position


class SimulatedDrafter:
    """Drafts of which as many come true as `acceptance` says, in the place of a look-up of the text."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        """`limit` tokens, or none. Those of a repeating answer are behind whole matches."""
        request, start = sequence.request, len(sequence.tokens)
        num_right = self._acceptance.num_right(request.request_id, sequence.index, start)
        if num_right is None:
            return NO_DRAFTS
        drafts = [true_token(request, start + i) + (i >= num_right) for i in range(limit)]
        return Drafts(tuple(drafts), self._acceptance.repeats(request.request_id))
