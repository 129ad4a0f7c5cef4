"""A `tokenizers` tokenizer built from the fields of a GGUF file.

GGUF stores vocabulary and merges (or scores), but of a byte-level pre-tokenizer only its llama.cpp name. A
name that is not known here is refused: a guess would split digits or white space wrongly and still look
like text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pageturner.service.errors import ModelError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp's token types
_SPACE = "\u2581"  # SentencePiece's
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
    """The tokenizer of the fields. Raises ModelError for a kind that is not known."""
    match fields.get("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer = _byte_level(fields)
        case "llama":
            tokenizer = _sentencepiece(fields)
        case kind:
            raise ModelError(f"the GGUF file has a {kind!r} tokenizer; use the model's safetensors folder")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    if fields.get("tokenizer.ggml.add_bos_token", False):
        tokenizer.post_processor = _bos_first(tokens, int(fields["tokenizer.ggml.bos_token_id"]))
    kinds: list[int] = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    pairs = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in pairs if kind == _USER_DEFINED]
    )
    return tokenizer


def _byte_level(fields: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE: the merges are stored."""
    pre = str(fields.get("tokenizer.ggml.pre"))
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF file's pre-tokenizer {pre!r} is not one of {', '.join(sorted(_PRE_TOKENIZERS))}; "
            "use the model's safetensors folder"
        )
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(fields["tokenizer.ggml.tokens"])},
            merges=[tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]],
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any]) -> Tokenizer:
    """SentencePiece BPE: any two pieces that make a third may merge, the best score first."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    scores: list[float] = fields["tokenizer.ggml.scores"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [
        (-scores[token_id], vocab[token[:cut]], vocab[token[cut:]])
        for token_id, token in enumerate(tokens)
        if kinds[token_id] == _NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(tokens[left], tokens[right]) for _, left, right in sorted(merges)],
            unk_token=tokens[int(fields.get("tokenizer.ggml.unknown_token_id", 0))],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    words: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        words.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(words)
    return tokenizer


def _bos_first(tokens: list[str], bos_id: int) -> processors.PostProcessor:
    bos = tokens[bos_id]
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )
