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
_OPENED = {"llama-bpe", "llama3", "llama-v3"}  # texts start with BOS unless the file says otherwise
_CLOSERS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<end_of_utterance>")
"""Control tokens that close a turn: they end an answer, whatever the file calls its end token."""


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
    bos_id = special_ids(fields).get("bos")
    if adds_bos(fields) and bos_id is not None:
        tokenizer.post_processor = _bos_first(tokens, bos_id)
    pairs = list(zip(tokens, _kinds(fields), strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in pairs if kind == _USER_DEFINED]
    )
    return tokenizer


def adds_bos(fields: Mapping[str, Any]) -> bool:
    """Whether texts start with BOS. Where the file does not say, llama.cpp's defaults hold: they do for
    SentencePiece vocabularies, and for byte-level ones by pre-tokenizer."""
    by_default = (
        fields.get("tokenizer.ggml.model") == "llama" or str(fields.get("tokenizer.ggml.pre")) in _OPENED
    )
    return bool(fields.get("tokenizer.ggml.add_bos_token", by_default))


def special_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    """Ids of `bos`, `eos`, `unk` and `pad`, those that there are. A SentencePiece vocabulary that does not
    say has its first three in llama.cpp's order."""
    found = {"unk": 0, "bos": 1, "eos": 2} if fields.get("tokenizer.ggml.model") == "llama" else {}
    for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            found[kind] = int(token_id)
    return {kind: i for kind, i in found.items() if i < len(fields["tokenizer.ggml.tokens"])}


def end_ids(fields: Mapping[str, Any]) -> list[int]:
    """Every token that ends an answer: those that the file names, and the control tokens that close a turn.

    A chat fine-tune often keeps the end token of its base model.
    """
    named = [special_ids(fields).get("eos")]
    named += [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    controls = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, _kinds(fields), strict=True))
        if kind == _CONTROL
    }
    named += [controls.get(closer) for closer in _CLOSERS]
    return list(dict.fromkeys(end for end in named if end is not None and end < len(tokens)))


def _kinds(fields: Mapping[str, Any]) -> list[int]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)


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
    kinds = _kinds(fields)
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
            unk_token=tokens[special_ids(fields)["unk"]],
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
