"""Small real tokenizers, trained or built on the spot."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Grüße aus Köln, naïve café, señor Ångström. " * 3,
    "日本語のテキストと中文文本以及한국어 텍스트 " * 3,
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀😃😄 👍🏽 🇩🇪🇯🇵 " * 3,
    "def f(x):\n    return x + 1\n\n" * 3,
)


@cache
def byte_level_bpe(vocab_size: int = 420) -> tokenizers.Tokenizer:
    """GPT-2's kind: every byte string is the text of some tokens, characters spread over several."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("added token", special=False)])
    return backend


@cache
def sentencepiece_bpe() -> tokenizers.Tokenizer:
    """Llama 2's kind: a space opens each word, the first one is dropped, unknown characters are bytes."""
    words = ["▁", "▁the", "▁a", "▁fox", "the", "fox", "s", "e", "t", "h", "日", "本", "."]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("t", "h"), ("th", "e")] if "th" in pieces else [],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@cache
def word_piece() -> tokenizers.Tokenizer:
    """BERT's kind: pieces inside a word are marked, spaces are put back on decoding."""
    pieces = ["[UNK]", "[CLS]", "the", "fox", "##es", "##s", "a", "b", "##b"]
    backend = tokenizers.Tokenizer(
        models.WordPiece(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens(["[UNK]", "[CLS]"])
    return backend
