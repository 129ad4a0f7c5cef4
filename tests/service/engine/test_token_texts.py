"""Each token's bytes are what it adds to a text; tokenizers without such bytes are refused."""

from __future__ import annotations

import pytest
import tokenizers
from support.tiny_tokenizers import CORPUS, byte_level_bpe, sentencepiece_bpe, word_piece
from tokenizers import decoders, models, pre_tokenizers

from pageturner.service.engine.token_texts import NoTokenTexts
from pageturner.service.engine.tokenizer import Tokenizer


def metaspace_unigram() -> tokenizers.Tokenizer:
    """T5's kind."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), ("▁the", -1.0), ("fox", -1.0), ("é", -2.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


@pytest.mark.parametrize("make", [byte_level_bpe, sentencepiece_bpe, metaspace_unigram])
def test_the_bytes_of_tokens_join_to_the_text_that_they_decode_to(make: object) -> None:
    backend: tokenizers.Tokenizer = make()  # type: ignore[operator] # one of those above
    tokenizer = Tokenizer(backend)
    texts = tokenizer.texts_of_tokens(backend.get_vocab_size() + 3)
    assert texts[-3:] == (b"",) * 3
    (start,) = tokenizer.encode("fox", add_special_tokens=False)[:1]
    for corpus in CORPUS:
        ids = (start, *tokenizer.encode(corpus, add_special_tokens=False))
        decoded = tokenizer.decode(ids).encode()
        joined = b"".join(texts[token_id] for token_id in ids)
        assert joined.decode("utf-8", "replace").lstrip(" ") == decoded.decode().lstrip(" ")


@pytest.mark.parametrize("make", [byte_level_bpe, sentencepiece_bpe])
def test_control_tokens_have_no_text(make: object) -> None:
    backend: tokenizers.Tokenizer = make()  # type: ignore[operator] # one of those above
    texts = Tokenizer(backend).texts_of_tokens(backend.get_vocab_size())
    special = [i for i, token in backend.get_added_tokens_decoder().items() if token.special]
    assert special
    assert {texts[token_id] for token_id in special} == {b""}


def test_tokens_beyond_the_models_logits_are_left_out() -> None:
    assert len(Tokenizer(byte_level_bpe()).texts_of_tokens(300)) == 300


def test_a_tokenizer_whose_tokens_depend_on_what_stands_beside_them_is_refused() -> None:
    with pytest.raises(NoTokenTexts, match="WordPiece writes a token by what stands beside it"):
        Tokenizer(word_piece()).texts_of_tokens(9)


def test_a_decoder_that_does_otherwise_than_it_says_is_found_out() -> None:
    backend = tokenizers.Tokenizer.from_str(sentencepiece_bpe().to_str())
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", "_"), decoders.Strip("s", 0, 1), decoders.Fuse()]
    )
    with pytest.raises(NoTokenTexts, match="writes the token"):
        Tokenizer(backend).texts_of_tokens(backend.get_vocab_size())
