"""What the tokens of an answer hang on beside its request, as text that travels with the answer.

It is made of `name=value` parts. An answer goes on elsewhere with exactly the tokens that would have come
where all parts are equal and the kernels' promise is kept: a row's bits depend on its own tokens alone. Then
it is one whether the KV of a token was computed by itself, as it was sampled, or in a chunk of known ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from pageturner.service.errors import NotResumable

MAX_CHARACTERS = 1024
"""Of a fingerprint that a client gives."""

ESSENTIAL = frozenset({"weights", "tokenizer", "prompt", "adapter"})
"""Parts without which tokens that were received mean nothing here."""

_PROMPT, _GRAMMAR, _ADAPTER = "prompt", "grammar", "adapter"
_OF_ANSWER = (_PROMPT, _GRAMMAR)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one server. text: its parts; empty where nothing is resumed. is_exact: the promise is kept."""

    text: str = ""
    is_exact: bool = False

    @classmethod
    def of_parts(cls, parts: Mapping[str, str], *, is_exact: bool) -> Fingerprint:
        """The server whose parts these are. Neither a name nor a value holds `=` or `;`."""
        return cls(";".join(f"{name}={value}" for name, value in parts.items()), is_exact)

    def of_prompt(self, token_ids: Iterable[int], grammar: str = "", adapter: str = "") -> str:
        """Of one answer: with a part for the prompt, which a template may write otherwise on another day, one
        for what decides which tokens its form allows, and one for its adapter, by its digest, if it has
        them."""
        if not self.text:
            return ""
        parts = f"{self._with(adapter)};{_PROMPT}={_digest(token_ids)}"
        return f"{parts};{_GRAMMAR}={grammar}" if grammar else parts

    def check_server(self, given: str, adapter: str = "", *, allow_inexact: bool) -> None:
        """Raises NotResumable unless an answer of this fingerprint can go on here, whatever its prompt.

        adapter: the digest of the one that the request names. allow_inexact: parts that are not essential may
        differ, and the promise need not be kept.
        """
        if not self.text:
            raise NotResumable("this server resumes no answers", "")
        mine, theirs = _parts(self._with(adapter)), _parts(given)
        for name in _OF_ANSWER:
            theirs.pop(name, None)
        differing = [name for name in mine if theirs.get(name) != mine[name]]
        differing += [name for name in theirs if name not in mine]
        if allow_inexact:
            differing = [name for name in differing if name in ESSENTIAL]
        if differing:
            told = ", ".join(
                f"{name} ({theirs.get(name, 'none')}, here {mine.get(name, 'none')})" for name in differing
            )
            raise NotResumable(f"the answer began where other things held: {told}", ",".join(differing))
        if not self.is_exact and not allow_inexact:
            reason = (
                "this server's kernels promise no equal bits (deterministic is off); resume.allow_inexact"
            )
            raise NotResumable(f"{reason} lets tokens differ", "deterministic")

    def _with(self, adapter: str) -> str:
        return f"{self.text};{_ADAPTER}={adapter}" if adapter else self.text

    def check_prompt(
        self, given: str, token_ids: Iterable[int], grammar: str = "", *, allow_inexact: bool = False
    ) -> None:
        """Raises NotResumable if the prompt became other tokens than where the answer began, or its form is
        obeyed by other means and allow_inexact does not let these differ."""
        parts = _parts(given)
        if parts.get(_PROMPT) != _digest(token_ids):
            raise NotResumable("the prompt becomes other tokens here than where the answer began", _PROMPT)
        theirs = parts.get(_GRAMMAR, "")
        if theirs != grammar and not allow_inexact:
            told = f"{_GRAMMAR} ({theirs or 'none'}, here {grammar or 'none'})"
            raise NotResumable(f"the answer began where other things held: {told}", _GRAMMAR)


def _parts(text: str) -> dict[str, str]:
    """By name. Raises NotResumable for what no server of ours gave."""
    parts = {}
    for part in text[:MAX_CHARACTERS].split(";"):
        name, equals, value = part.partition("=")
        if not name or not equals:
            raise NotResumable("the fingerprint is none that a server of this service gave", "fingerprint")
        parts[name] = value
    return parts


def _digest(token_ids: Iterable[int]) -> str:
    return blake2b(array("I", token_ids).tobytes(), digest_size=8).hexdigest()
