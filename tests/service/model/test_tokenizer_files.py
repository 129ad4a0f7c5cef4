"""What the tokenizer files of a folder come to together, with transformers as the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizers import byte_level_bpe

from pageturner.service.errors import ModelError
from pageturner.service.model.tokenizer_files import TokenizerFiles, read_tokenizer, special_tokens_of


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def without(folder: Path, text: str) -> int:
    """Take a special token out of tokenizer.json; its id, which is free afterwards."""
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != text]
    token_id: int = data["model"]["vocab"].pop(text)
    write(folder, "tokenizer.json", data)
    return token_id


def read(folder: Path, config: Any = None, special: Any = None, added: Any = None) -> TokenizerFiles:
    return read_tokenizer(folder, config or {}, special or {}, added or {})


def token(text: str, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": text, **off, **flags}


@pytest.mark.fault("22")
@pytest.mark.parametrize("is_special", [True, False])
def test_a_token_of_added_tokens_decoder_alone_has_the_id_stated_there(
    is_special: bool, folder: Path
) -> None:
    token_id = without(folder, "<|end|>")
    config = {"added_tokens_decoder": {str(token_id): token("<|end|>", special=is_special)}}
    files = read(folder, config)
    assert files.tokenizer is not None
    assert token_id in files.tokenizer.encode("fox<|end|>fox").ids
    assert files.tokenizer.get_added_tokens_decoder()[token_id].special is is_special
    assert files.notes == ()


@pytest.mark.fault("22")
def test_a_token_of_added_tokens_json_alone_has_the_id_stated_there(folder: Path) -> None:
    token_id = without(folder, "<|end|>")
    files = read(folder, special={"eos_token": "<|end|>"}, added={"<|end|>": token_id, "<tool>": 421})
    assert files.tokenizer is not None
    assert token_id in files.tokenizer.encode("fox<|end|>").ids
    assert files.tokenizer.encode("<tool>").ids == [421]
    assert files.tokenizer.get_added_tokens_decoder()[token_id].special
    assert not files.tokenizer.get_added_tokens_decoder()[421].special


@pytest.mark.fault("22")
def test_files_that_give_a_token_two_ids_are_noted(folder: Path) -> None:
    found = byte_level_bpe().token_to_id("<|end|>")
    files = read(folder, {"added_tokens_decoder": {"300": token("<|end|>", special=True)}})
    assert files.tokenizer is not None
    assert files.tokenizer.token_to_id("<|end|>") == found
    (note,) = files.notes
    assert "'<|end|>' is token 300" in note
    assert f"there it is {found}" in note


@pytest.mark.fault("22")
def test_ids_are_those_of_transformers_where_tokens_stand_in_both_files(folder: Path) -> None:
    from transformers import AutoTokenizer

    added = byte_level_bpe().get_added_tokens_decoder()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "added_tokens_decoder": {
            str(token_id): token(str(one.content), special=one.special) for token_id, one in added.items()
        },
    }
    write(folder, "tokenizer_config.json", config)
    theirs = AutoTokenizer.from_pretrained(folder)
    files = read(folder, config)
    assert files.tokenizer is not None
    for text in ("<|start|>fox <|end|> added token fox", "Gr\u00fc\u00dfe", " a  b "):
        assert files.tokenizer.encode(text).ids == theirs(text)["input_ids"]


@pytest.mark.fault("23")
@pytest.mark.parametrize("names", [("tokenizer.model",), ("vocab.json", "merges.txt"), ("tekken.json",)])
def test_tokenizers_of_a_kind_that_is_not_read_are_refused_by_name(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_text("")
    with pytest.raises(ModelError, match="save_pretrained") as caught:
        read(tmp_path)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.fault("23")
def test_a_folder_without_any_tokenizer_is_noted(tmp_path: Path) -> None:
    files = read(tmp_path)
    assert files.tokenizer is None
    assert files.notes == (f"{tmp_path} holds no tokenizer: prompts must be token ids",)


@pytest.mark.parametrize("content", ["{}", "", "[]"])
def test_a_broken_file_is_the_models_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read(tmp_path)


@pytest.mark.fault("6")
def test_special_tokens_by_name_are_found_however_they_are_written() -> None:
    config = {
        "bos_token": token("<s>"),
        "pad_token": "<pad>",
        "unk_token": None,
        "add_bos_token": True,
        "additional_special_tokens": ["<repo>", token("<file>")],
    }
    assert special_tokens_of(config) == {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "additional_special_tokens": ("<repo>", "<file>"),
    }
    assert special_tokens_of({"extra_special_tokens": {"image_token": "<image>"}}) == {
        "image_token": "<image>"
    }
