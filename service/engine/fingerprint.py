"""What the tokens of an answer hang on beside its request, as text that travels with the answer.

It is made of `name=value` parts. An answer goes on elsewhere with exactly the tokens that would have come
where all parts are equal and the kernels' promise is kept: a row's bits depend on its own tokens alone. Then
it is one whether the KV of a token was computed by itself, as it was sampled, or in a chunk of known ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from hashlib import blake2b

from pageturner.service.errors import HandoverRefused, NotResumable

MAX_CHARACTERS = 1024
"""Of a fingerprint that a client gives."""

ESSENTIAL = frozenset({"weights", "tokenizer", "prompt", "adapter"})
"""Parts without which tokens that were received mean nothing here."""

ESSENTIAL_OF_KV = frozenset({"weights", "tokenizer", "kv"})
"""Parts without which KV of another server means nothing here."""

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
        differing = _differing(mine, theirs, ESSENTIAL if allow_inexact else None)
        if differing:
            told = _told(differing, mine, theirs)
            raise NotResumable(f"the answer began where other things held: {told}", ",".join(differing))
        if not self.is_exact and not allow_inexact:
            reason = (
                "this server's kernels promise no equal bits (deterministic is off); resume.allow_inexact"
            )
            raise NotResumable(f"{reason} lets tokens differ", "deterministic")

    def check_handover(self, given: str, *, allow_inexact: bool) -> None:
        """Raises HandoverRefused unless KV that is computed here is what a server of this fingerprint would
        have computed. allow_inexact: where it would be near it, that will do."""
        try:
            mine, theirs = _parts(self.text), _parts(given)
        except NotResumable as error:
            raise HandoverRefused(str(error), error.differing) from None
        differing = _differing(mine, theirs, ESSENTIAL_OF_KV if allow_inexact else None)
        if differing:
            told = _told(differing, mine, theirs)
            raise HandoverRefused(f"the servers compute KV otherwise: {told}", ",".join(differing))

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


def _differing(mine: Mapping[str, str], theirs: Mapping[str, str], heeded: Set[str] | None) -> list[str]:
    """Names of the parts that differ, of those that are heeded; None heeds all."""
    differing = [name for name in mine if theirs.get(name) != mine[name]]
    differing += [name for name in theirs if name not in mine]
    return [name for name in differing if heeded is None or name in heeded]


def _told(differing: Iterable[str], mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name} ({theirs.get(name, 'none')}, here {mine.get(name, 'none')})" for name in differing
    )


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
