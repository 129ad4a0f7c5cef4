"""Control tokens that a caller's text spells out stay text; those that the template writes are tokens.

A special token in a rendered prompt may come from the template or from a message, and afterwards nothing
tells which. So before a template sees a caller's text, one character of each control token in it is put
behind a stand-in: a lone surrogate, which no caller can send, since it is not Unicode. Lengths stay, and so
do comparisons and searches for anything but a control token. What still reads as a control token after
rendering is the template's. It becomes a placeholder; the characters come back from behind their stand-ins,
and a second tokenizer, which has placeholders in the place of control tokens, encodes the whole, so that
normalizing and merging happen as they would around the real tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from os.path import commonprefix
from typing import Any

import tokenizers

from pageturner.service.errors import InvalidArgument

CONTINUE_HERE = "\udfff"
"""Stands at the end of the message that an answer continues."""

_FIRST_STAND_IN, _MAX_STAND_INS = 0xD800, 0xDFFF - 0xD800
_STAND_IN = re.compile("[\ud800-\udfff]")
_DELIMITER = "\U0010ffff"  # a noncharacter: for internal use, says Unicode


class ControlTokens:
    """The special tokens of one tokenizer. Calls may come from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._ids = {str(token.content): token_id for token_id, token in added.items() if token.special}
        texts = sorted(self._ids)
        self._whole = re.compile(_any_of(texts))
        self._begin = re.compile(_begin_any_of(texts))
        characters = sorted(set("".join(texts)))[:_MAX_STAND_INS]
        self._stand_ins = {character: chr(_FIRST_STAND_IN + i) for i, character in enumerate(characters)}
        self._restored = {ord(stand_in): character for character, stand_in in self._stand_ins.items()}
        model = backend.model
        unknown = getattr(model, "unk_token", None), getattr(model, "unk_id", None)
        self._counted = {i for text, i in self._ids.items() if text not in unknown and i not in unknown}
        self._longest = max(map(len, texts), default=0)
        self._heads = {text[:cut] for text in texts for cut in range(1, len(text))}
        self._tails = {text[cut:] for text in texts for cut in range(1, len(text))}

    @property
    def ids(self) -> Mapping[str, int]:
        """The id of each control token by its text."""
        return self._ids

    def find(self, text: str) -> Iterable[re.Match[str]]:
        """Where a text spells control tokens, the longest at each place."""
        return self._whole.finditer(text)

    def replace(self, text: str, by: Callable[[re.Match[str]], str]) -> str:
        """The text with what `by` gives in the place of each control token that it spells."""
        return self._whole.sub(by, text)

    def hide(self, text: str, *, edges: bool = True) -> str:
        """The text with each control token in it behind a stand-in.

        edges: so also what it ends or begins with of a control token that its surroundings might complete.
        """
        text = self._begin.sub(lambda found: self._stand_in(found[0]), text)
        return self._hide_edges(text) if edges else text

    def hide_within(self, text: str) -> str:
        """As `hide`; so also a text that its surroundings might complete from both sides."""
        word = text.strip()
        if word and any(word in control for control in self._ids):
            place = text.index(word)
            return text[:place] + self._stand_in(word[0]) + text[place + 1 :]
        return self.hide(text)

    def _hide_edges(self, text: str) -> str:
        stripped = text.strip()
        bound = min(self._longest, len(stripped) + 1)
        start = text.find(stripped)
        end = start + len(stripped)
        for length in range(1, bound):
            if stripped[-length:] in self._heads:
                place = end - length
                text = text[:place] + self._stand_in(text[place]) + text[place + 1 :]
        if any(stripped[:length] in self._tails for length in range(1, bound)):
            text = text[:start] + self._stand_in(text[start]) + text[start + 1 :]
        return text

    def show(self, text: str) -> str:
        """The text with every character back from behind its stand-in."""
        return text.translate(self._restored)

    def has_hidden(self, text: str) -> bool:
        """Whether a character of the text stands behind a stand-in."""
        return _STAND_IN.search(text) is not None

    def escaped(self, token_ids: Iterable[int], text: str) -> bool:
        """Whether the ids hold more control tokens than their text spells: a normalizer can make one of other
        characters (of full width, say), and some models know one as a word. Unknown text is none."""
        num_tokens = sum(token_id in self._counted for token_id in token_ids)
        return num_tokens > 0 and num_tokens > sum(1 for _ in self.find(text))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a rendered prompt: control tokens that are not hidden are tokens, all else is text."""
        return self._encode(
            self._whole.sub(lambda found: self._placeholder(found[0]), text), text, add_special_tokens
        )

    def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        return self._encode(text, text, add_special_tokens)

    def _encode(self, marked: str, text: str, add_special_tokens: bool) -> list[int]:
        if _DELIMITER in text:
            raise InvalidArgument("prompt", "holds U+10FFFF, which is no character, beside control tokens")
        plain, ids = self._plain
        # Only the methods for batches let go of the GIL: a long text would hold up every other thread.
        (encoding,) = plain.encode_batch_fast([self.show(marked)], add_special_tokens=add_special_tokens)
        return [ids.get(token_id, token_id) for token_id in encoding.ids]

    @cached_property
    def _plain(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer for which no control token is one, and what its placeholders' ids stand for.

        Made when first needed: few prompts spell control tokens.
        """
        data = json.loads(self._backend.to_str())
        renamed = {text: self._placeholder(text) for text in self._ids}
        for token in data["added_tokens"]:
            if token["content"] in renamed:
                token |= {"content": renamed[token["content"]], "special": False, "normalized": False}
        _rename(data["model"], renamed)
        plain = tokenizers.Tokenizer.from_str(json.dumps(data))
        plain.no_truncation()
        plain.no_padding()
        ids = {}
        for text, placeholder in renamed.items():
            placed = plain.token_to_id(placeholder)
            assert placed is not None, f"{placeholder!r} is an added token"
            ids[placed] = self._ids[text]
        return plain, ids

    def _placeholder(self, text: str) -> str:
        return f"{_DELIMITER}{self._ids[text]}{_DELIMITER}"

    def _stand_in(self, character: str) -> str:
        return self._stand_ins.get(character, character)


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of the longest of the texts, which beginnings that they share pass once: text that almost
    spells many of them must not cost a try for each."""
    texts = list(texts)
    if not texts:
        return r"(?!)"
    shared = commonprefix(texts)  # noqa: RUF071 - texts, not paths
    endings: dict[str, list[str]] = {}
    for text in texts:
        if ending := text[len(shared) :]:
            endings.setdefault(ending[0], []).append(ending)
    branches = "|".join(map(_any_of, endings.values()))
    may_end = "?" if shared in texts else ""
    return re.escape(shared) + (f"(?:{branches}){may_end}" if branches else "")


def _begin_any_of(texts: Iterable[str]) -> str:
    """A pattern of one character: the first of one of the texts, with the rest of it ahead. So texts that
    overlap are all found."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    return "|".join(f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in rests.items()) or r"(?!)"


def _rename(model: dict[str, Any], renamed: Mapping[str, str]) -> None:
    """Take control tokens out of a model's own vocabulary, where text might meet them (as a word, as a piece,
    as what two tokens merge to), and put their placeholders in their places. model: as tokenizer.json has it.
    """
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed.get(text, text): token_id for text, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[renamed.get(text, text), score] for text, score in vocabulary]
    if merges := model.get("merges"):
        model["merges"] = [
            [left, right] for left, right in merges if not {left, right, left + right} & renamed.keys()
        ]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
