"""A folder's tokenizer files -> one `tokenizers` tokenizer and the special tokens that it names.

tokenizer.json is what is read. Other files may add to it: tokenizer_config.json (`added_tokens_decoder` and
the named tokens), special_tokens_map.json and added_tokens.json; tools that edit a model often change only
one of them. What they say is merged as `transformers` merges it, but a token is never given another id than
the one that is stated: where that cannot be, a note says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from pageturner.service.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"
OTHER_KINDS = (
    *("*.model", "*.tiktoken", "tekken.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "vocab.bpe"),
)
"""Files of tokenizers that are not read here, as patterns."""

ADDITIONAL = "additional_special_tokens"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files hold. tokenizer: None where there is none, for a model of token ids.

    special_tokens: text of `bos_token`, `eos_token`, ... by those names, and a tuple of texts under
    `additional_special_tokens`. notes: what an operator should know, one line each.
    """

    tokenizer: tokenizers.Tokenizer | None = None
    special_tokens: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def token_id(self, name: str) -> int | None:
        """The id of the special token of that name, such as `eos_token`; None if there is none."""
        text = self.special_tokens.get(name)
        if self.tokenizer is None or not isinstance(text, str):
            return None
        found: int | None = self.tokenizer.token_to_id(text)
        return found


@dataclass(frozen=True, slots=True)
class _Stated:
    """A token as one of the files beside tokenizer.json states it."""

    token_id: int
    token: tokenizers.AddedToken

    @property
    def text(self) -> str:
        return str(self.token.content)


def read_tokenizer(
    folder: Path,
    tokenizer_config: Mapping[str, Any],
    special_tokens_map: Mapping[str, Any],
    added_tokens: Mapping[str, Any],
) -> TokenizerFiles:
    """The tokenizer of a folder, with what the other files (as read from JSON) add to it.

    Raises ModelError for a file that cannot be read, and for a folder whose only tokenizer is of a kind that
    is not read.
    """
    special = special_tokens_of({**special_tokens_map, **tokenizer_config})
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        others = sorted({found.name for pattern in OTHER_KINDS for found in folder.glob(pattern)})
        if others:
            raise ModelError(
                f"{folder} holds {', '.join(others)} but no {TOKENIZER_FILE}, which is what is read; write "
                "it with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return TokenizerFiles(None, special, (f"{folder} holds no tokenizer: prompts must be token ids",))
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault
        raise ModelError(f"cannot read the tokenizer {path}: {error}") from error
    stated = list(_stated(tokenizer_config, added_tokens, special))
    lacking = [one for one in stated if tokenizer.token_to_id(one.text) is None]
    if lacking:
        tokenizer = _with_tokens(path, lacking)
    notes = [
        f"{one.text!r} is token {one.token_id} in the files beside {TOKENIZER_FILE}, there it is "
        f"{tokenizer.token_to_id(one.text)}"
        for one in stated
        if tokenizer.token_to_id(one.text) != one.token_id
    ]
    known = {str(token.content) for token in tokenizer.get_added_tokens_decoder().values()}
    for one in stated:
        if one.text not in known and tokenizer.token_to_id(one.text) == one.token_id:
            _add(tokenizer, one.token)
            known.add(one.text)
    for text in _texts(special):
        if text not in known and tokenizer.token_to_id(text) is not None:
            _add(tokenizer, tokenizers.AddedToken(text, special=True, normalized=False))
    return TokenizerFiles(tokenizer, special, tuple(notes))


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str | tuple[str, ...]]:
    """The special tokens that a tokenizer_config.json names, as a chat template may name them."""
    named: dict[str, str | tuple[str, ...]] = {}
    for key, value in config.items():
        if key.endswith("_token") and (text := token_text(value)) is not None:
            named[key] = text
    more = config.get(ADDITIONAL) or config.get("extra_special_tokens")
    if isinstance(more, Mapping):  # by names of the model's own, such as image_token
        named |= {key: text for key, value in more.items() if (text := token_text(value)) is not None}
    elif isinstance(more, list):
        named[ADDITIONAL] = tuple(text for value in more if (text := token_text(value)) is not None)
    return named


def token_text(token: object) -> str | None:
    """Of a token as these files write it: a string, or an object with `content`."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None


def _texts(special: Mapping[str, str | tuple[str, ...]]) -> Iterable[str]:
    for value in special.values():
        yield from (value,) if isinstance(value, str) else value


def _stated(
    tokenizer_config: Mapping[str, Any],
    added_tokens: Mapping[str, Any],
    special: Mapping[str, str | tuple[str, ...]],
) -> Iterable[_Stated]:
    """The tokens of added_tokens_decoder, then those of added_tokens.json that it does not have."""
    seen = set()
    decoder = tokenizer_config.get("added_tokens_decoder")
    for token_id, token in decoder.items() if isinstance(decoder, Mapping) else ():
        text = token_text(token)
        if text is None or not str(token_id).isdecimal():
            continue
        flags = token if isinstance(token, Mapping) else {}
        is_special = bool(flags.get("special", False))
        seen.add(text)
        yield _Stated(
            int(token_id),
            tokenizers.AddedToken(
                text,
                special=is_special,
                normalized=bool(flags.get("normalized", not is_special)),
                lstrip=bool(flags.get("lstrip", False)),
                rstrip=bool(flags.get("rstrip", False)),
                single_word=bool(flags.get("single_word", False)),
            ),
        )
    special_texts = set(_texts(special))
    for text, token_id in added_tokens.items():
        if text and text not in seen and isinstance(token_id, int):
            is_special = text in special_texts
            yield _Stated(
                token_id, tokenizers.AddedToken(text, special=is_special, normalized=not is_special)
            )


def _with_tokens(path: Path, lacking: Iterable[_Stated]) -> tokenizers.Tokenizer:
    """The tokenizer with these tokens in its vocabulary, where their ids are free.

    The library gives a token that is added the next id after the last; one of the vocabulary keeps its own.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = data["model"].get("vocab")
    if isinstance(vocabulary, dict):
        taken = {*vocabulary.values(), *(token["id"] for token in data.get("added_tokens", ()))}
        vocabulary |= {one.text: one.token_id for one in lacking if one.token_id not in taken}
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def _add(tokenizer: tokenizers.Tokenizer, token: tokenizers.AddedToken) -> None:
    if token.special:
        tokenizer.add_special_tokens([token])
    else:
        tokenizer.add_tokens([token])
