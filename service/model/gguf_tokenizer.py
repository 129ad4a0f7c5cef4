"""A `tokenizers` tokenizer built from the fields of a GGUF file.

GGUF stores vocabulary and merges, but of the pre-tokenizer only its llama.cpp name. A name that is not
known here is refused: a guess would split digits or white space wrongly and still look like text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pageturner.service.errors import ModelError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bytes(*, words: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return _bytes(words=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes(words=True)])


def _split(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated"), _bytes(words=False)]
    )


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "llama3": _split(r"\p{N}{1,3}"),
    "llama-v3": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3"}  # a word in the vocabulary is taken without merging
_COMPOSED = {"qwen2"}  # text is normalised to NFC


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer of the fields. Raises ModelError for any other kind."""
    model, pre = str(fields.get("tokenizer.ggml.model")), str(fields.get("tokenizer.ggml.pre"))
    if model != "gpt2":
        raise ModelError(
            f"the GGUF file has a {model!r} tokenizer, only byte-level BPE ('gpt2') is read from GGUF; "
            "use the model's safetensors folder"
        )
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF file's pre-tokenizer {pre!r} is not one of {', '.join(sorted(_PRE_TOKENIZERS))}; "
            "use the model's safetensors folder"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(fields, tokens)
    kinds: list[int] = fields.get("tokenizer.ggml.token_type") or []
    tokenizer.add_special_tokens(
        [
            AddedToken(t, normalized=False, special=True)
            for t, kind in zip(tokens, kinds, strict=False)
            if kind == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False)
            for t, kind in zip(tokens, kinds, strict=False)
            if kind == _USER_DEFINED
        ]
    )
    return tokenizer


def _post_processor(fields: Mapping[str, Any], tokens: list[str]) -> processors.PostProcessor:
    if not fields.get("tokenizer.ggml.add_bos_token", False):
        return processors.ByteLevel(trim_offsets=False)
    bos_id = int(fields["tokenizer.ggml.bos_token_id"])
    bos = tokens[bos_id]
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )
