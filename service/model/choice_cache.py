"""Choices of products, kept under the user's cache folder by all that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pageturner.service.codec import scalar, strict_converter
from pageturner.service.model.product_choice import ProductChoice

FORMAT_VERSION = 2
"""Raised whenever the same machine and model would be measured or judged otherwise."""


def _number(value: object, annotation: type[float]) -> float:
    """Finite or not: logits that are no numbers have a KL that is none, and are not to be judged again."""
    return value if isinstance(value, float) else float(scalar(value, annotation))


_CONVERTER = strict_converter()
_CONVERTER.register_structure_hook(float, _number)


class ChoiceCache:
    """The choice of one model on one machine.

    name: for the eye. depends_on: texts that a choice holds for: the model's content, the processor, versions
    and the like.
    """

    def __init__(self, cache_dir: Path, name: str, depends_on: Sequence[str]) -> None:
        identity = json.dumps([FORMAT_VERSION, *depends_on])
        key = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._path = cache_dir / "choices" / f"{name}-{key}.json"

    def read(self, names: Container[str]) -> ProductChoice | None:
        """What was chosen, None if nothing was, or if that can't be read or is none of the names that can be
        chosen here: it can be measured again."""
        try:
            choice = _CONVERTER.structure(json.loads(self._path.read_bytes()), ProductChoice)
            return choice if choice.name in names else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def write(self, choice: ProductChoice) -> bool:
        """Keep it for the next start; whether that could be done."""
        # By a rename, so that a reader meets all of it or none.
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(choice), indent=2))
            partial.rename(self._path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return False
        return True
