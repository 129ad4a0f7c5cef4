"""How products are settled at a start: what is measured, kept, refused and obeyed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ops import cpu_library
from support.random_models import save, tiny_model
from support.scripted import recording_logger
from support.tiny_tokenizers import byte_level_bpe

from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.reference import ReferenceQuantisedOps
from pageturner.kernels.selection import QuantisedKernels
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.errors import ConfigError, ModelError
from pageturner.service.model import candidate_forwards, linear
from pageturner.service.model.backend import Backend
from pageturner.service.model.decoder_config import DecoderConfig
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.packed_file import PackedFile
from pageturner.service.model.product_timing import TimedProducts
from pageturner.service.model.products import Products
from pageturner.service.model.streams import streams_of
from pageturner.service.startup import products
from pageturner.service.startup.products import Machine, settle_products

AVX2 = "flags : avx2 fma"
BF16 = "flags : avx2 avx512f avx512_bf16"
CPU = torch.device("cpu")
FAST_BF16 = {"float32": 3.0, "bfloat16": 1.0, "int8": 2.0}
FAST_INT8 = {"float32": 3.0, "bfloat16": 2.0, "int8": 1.0}


@dataclass
class Stopwatch:
    """Stands for the timing of products: seconds by name; counts how often it was asked."""

    seconds: Mapping[str, float]
    asked: list[tuple[str, ...]] = field(default_factory=list)
    steady: bool = True

    def __call__(self, candidates: Mapping[str, Products], config: DecoderConfig) -> TimedProducts:
        assert config.num_layers == 2
        self.asked.append(tuple(candidates))
        return TimedProducts({name: (self.seconds[name],) * 3 for name in candidates}, self.steady)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sizes that groups divide, with a tokenizer."""
    tokenizer = byte_level_bpe()
    vocab_size = tokenizer.get_vocab_size()
    _, model = tiny_model(
        "llama", 0, hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=vocab_size
    )
    path = save(model, tmp_path_factory.mktemp("tiny"))
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def backend(**changes: Any) -> Backend:
    values: dict[str, Any] = {
        "device": CPU,
        "choose_ops": lambda heads, dtype: CpuOps(cpu_library()),
        "streams": streams_of(CPU),
        "quantised": QuantisedKernels(ReferenceQuantisedOps()),
    }
    return Backend(**(values | changes))


def settle(
    folder: Path,
    cache: Path,
    stopwatch: Stopwatch,
    *,
    cpuinfo: str = BF16,
    memory: int = 1 << 40,
    on: Backend | None = None,
    block_size: int = 16,
    **options: Any,
) -> tuple[tuple[str, str], str, list[dict[str, Any]]]:
    """((dtype, quantization), what was chosen, the log)."""
    logger, lines = recording_logger()
    machine = Machine(cpuinfo, memory, stopwatch)
    given = ModelOptions(source=str(folder), **options)
    settled = settle_products(given, block_size, on or backend(), cache, machine, logger)
    found = settled.options
    if settled.artifacts is not None:
        assert settled.artifacts.packed is not None
        assert found.quantised
    said = [dict(line) for line in lines if line["event"] != "measuring_products"]
    return (found.dtype, found.quantization), settled.choice.name, said


def test_the_fastest_is_chosen_said_and_kept(folder: Path, tmp_path: Path) -> None:
    stopwatch = Stopwatch(FAST_INT8)
    named, chosen, lines = settle(folder, tmp_path, stopwatch)
    assert (named, chosen) == (("auto", "int8"), "int8")
    (line,) = lines
    assert (line["event"], line["chosen"]) == ("products", "int8")
    assert line["figures"][0].startswith("int8 1e+03 / 1e+03 / 1e+03 ms, KL 0.00")
    assert stopwatch.asked == [("float32", "bfloat16", "int8")]
    assert settle(folder, tmp_path, stopwatch)[:2] == (named, chosen)
    assert len(stopwatch.asked) == 1
    settle(folder, tmp_path, stopwatch, cpuinfo=AVX2)
    assert len(stopwatch.asked) == 2, "another processor is another choice"
    (kept, _) = sorted((tmp_path / "choices").iterdir())
    kept.write_text("[" * 10_000)
    _.write_text('{"name": 3}')
    settle(folder, tmp_path, stopwatch)
    settle(folder, tmp_path, stopwatch, cpuinfo=AVX2)
    assert len(stopwatch.asked) == 4, "what is damaged is measured again"


def test_another_block_size_is_another_choice(folder: Path, tmp_path: Path) -> None:
    """It decides which operations attend, and so how near to float32 and how fast a candidate is."""
    stopwatch = Stopwatch(FAST_INT8)
    for block_size in (16, 8, 16, 8):
        settle(folder, tmp_path, stopwatch, block_size=block_size)
    assert len(stopwatch.asked) == 2


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}])
def test_a_kept_choice_of_products_that_are_none_here_is_measured_anew(
    options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    stopwatch = Stopwatch(FAST_INT8)
    named = settle(folder, tmp_path, stopwatch, **options)[0]
    (kept,) = (tmp_path / "choices").iterdir()
    choice = json.loads(kept.read_text())
    for number, name in enumerate(("int9", "file", "int4"), start=2):
        kept.write_text(json.dumps(choice | {"name": name}))
        assert settle(folder, tmp_path, stopwatch, **options)[0] == named
        assert len(stopwatch.asked) == number
    assert json.loads(kept.read_text()) == choice


def test_bfloat16_is_never_the_automatic_choice_without_its_instructions(
    folder: Path, tmp_path: Path
) -> None:
    stopwatch = Stopwatch(FAST_BF16)
    assert settle(folder, tmp_path, stopwatch, cpuinfo=AVX2)[0] == ("auto", "int8")
    assert stopwatch.asked == [("float32", "int8")]
    assert settle(folder, tmp_path, stopwatch, cpuinfo=AVX2, quantization="none")[0] == ("float32", "none")
    assert settle(folder, tmp_path, stopwatch)[0] == ("bfloat16", "none"), "with them it may be"


def test_what_is_too_far_from_float32_is_refused_aloud(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        products._Measurement, "_mean_kl", lambda self, name: 0.02 if name == "int8" else 0.001
    )
    named, _, lines = settle(folder, tmp_path, Stopwatch(FAST_INT8))
    assert named == ("bfloat16", "none")
    assert [line["log_level"] for line in lines] == ["info", "warning"]
    assert lines[1]["reason"].startswith("too far from float32 and not chosen: int8")


@pytest.mark.parametrize(
    ("options", "named", "warned"),
    [
        ({"dtype": "float32"}, ("float32", "none"), True),
        ({"dtype": "bfloat16"}, ("bfloat16", "none"), False),
        ({"quantization": "int8"}, ("auto", "int8"), True),
        ({"quantization": "int4"}, ("auto", "int4"), False),
        ({"dtype": "float32", "quantization": "int8"}, ("auto", "int8"), True),
    ],
)
def test_a_choice_by_name_is_obeyed_and_warned_about_where_it_is_slow(
    options: dict[str, Any], named: tuple[str, str], warned: bool, folder: Path, tmp_path: Path
) -> None:
    stopwatch = Stopwatch(FAST_BF16 | {"int4": 0.9})
    found, _, lines = settle(folder, tmp_path, stopwatch, **options)
    assert found == named
    assert any("was asked for and takes" in line["reason"] for line in lines) == warned
    assert (tmp_path / "converted").exists() == ("quantization" in options)


def test_times_that_other_programs_disturbed_are_not_kept(folder: Path, tmp_path: Path) -> None:
    stopwatch = Stopwatch(FAST_INT8 | {"int8": 1.1}, steady=False)
    for count in (1, 2):
        named, _, lines = settle(folder, tmp_path, stopwatch)
        assert (named, len(stopwatch.asked)) == (("auto", "int8"), count)
        assert "the next start measures them again" in lines[0]["reason"]
    assert not (tmp_path / "choices").exists()
    clear = Stopwatch(FAST_INT8, steady=False)
    for _ in range(2):
        assert settle(folder, tmp_path, clear)[0] == ("auto", "int8")
    assert len(clear.asked) == 1, "half the time of the next is beyond doubt"


def test_what_memory_does_not_hold_is_no_candidate(folder: Path, tmp_path: Path) -> None:
    stopwatch = Stopwatch(FAST_BF16)
    assert settle(folder, tmp_path, stopwatch, memory=150_000)[0] == ("auto", "int8")
    assert stopwatch.asked == [("int8",)]


@pytest.mark.parametrize(
    ("on", "options", "reason"),
    [
        ({"device": torch.device("cuda:1")}, {}, "the model runs on cuda:1"),
        ({}, {"forward": "transformers"}, "model.forward is transformers"),
        ({"quantised": None}, {}, "can't be compiled here"),
    ],
)
def test_what_cannot_be_quantised_keeps_the_dtype_it_had(
    on: dict[str, Any], options: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    stopwatch = Stopwatch({})
    found, chosen, lines = settle(folder, tmp_path, stopwatch, on=backend(**on), **options)
    assert (found, chosen, stopwatch.asked) == (("auto", "none"), "auto", [])
    assert [line["event"] for line in lines] == ["not_quantised"]
    assert reason in lines[0]["reason"]
    with pytest.raises(ConfigError, match=f"int8 can't be had: .*{reason}"):
        settle(folder, tmp_path, stopwatch, on=backend(**on), quantization="int8", **options)


def test_a_folder_with_a_weight_that_is_no_number_is_served_as_it_is(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "holed"
    shutil.copytree(folder, source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    stopwatch = Stopwatch({})
    found, _, lines = settle(source, tmp_path, stopwatch)
    assert (found, stopwatch.asked) == (("auto", "none"), [])
    assert lines[0]["reason"].startswith("model.norm.weight holds values that are infinite")
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds"):
        settle(source, tmp_path, stopwatch, quantization="int8")


def test_a_model_of_other_sizes_and_one_without_a_tokenizer_keep_theirs(folder: Path, tmp_path: Path) -> None:
    _, odd = tiny_model("llama", 0)
    source = save(odd, tmp_path / "odd")
    stopwatch = Stopwatch(FAST_INT8)
    assert settle(source, tmp_path, stopwatch, cpuinfo=AVX2)[0] == ("float32", "none")
    with pytest.raises(ConfigError, match="intermediate_size is 48"):
        settle(source, tmp_path, stopwatch, quantization="int4")
    _, mute = tiny_model("llama", 0, hidden_size=64, intermediate_size=96)
    source = save(mute, tmp_path / "mute")
    assert settle(source, tmp_path, stopwatch)[0] == ("auto", "none")
    assert settle(source, tmp_path, stopwatch, quantization="int8")[0] == ("auto", "int8")


def test_what_the_pool_that_is_wanted_cannot_hold_is_no_candidate(folder: Path, tmp_path: Path) -> None:
    stopwatch = Stopwatch(FAST_BF16)
    assert settle(folder, tmp_path, stopwatch, kv_dtype="float32")[0] == ("auto", "int8")
    assert stopwatch.asked == [("float32", "int8")]
    plain = backend(choose_ops=lambda heads, dtype: TorchOps())
    assert settle(folder, tmp_path, stopwatch, on=plain, kv_dtype="bfloat16")[0] == ("bfloat16", "none")
    with pytest.raises(ConfigError, match=r"float32 rows can't be kept in torch\.bfloat16"):
        settle(folder, tmp_path, stopwatch, on=plain, cpuinfo=AVX2, kv_dtype="bfloat16")


def test_packed_weights_are_in_memory_once_while_they_are_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(packed: Path) -> PackedFile:
        read.append(packed)
        return PackedFile(packed)

    monkeypatch.setattr(candidate_forwards, "PackedFile", counted)
    assert settle(folder, tmp_path, Stopwatch(FAST_INT8))[0] == ("auto", "int8")
    assert len(read) == 1


def test_a_model_that_takes_no_two_tokens_of_a_text_is_not_judged(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "short"
    shutil.copytree(folder, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1}))
    found, _, lines = settle(source, tmp_path, Stopwatch(FAST_INT8))
    assert found == ("auto", "none")
    assert lines[0]["reason"].startswith("the model takes no two tokens of a text")


def test_a_choice_whose_logits_are_no_numbers_is_kept_as_well(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products._Measurement, "_mean_kl", lambda self, name: math.nan)
    stopwatch = Stopwatch(FAST_INT8)
    for _ in range(2):
        assert settle(folder, tmp_path, stopwatch)[0] == ("float32", "none")
    assert len(stopwatch.asked) == 1


def test_products_that_cannot_be_deterministic_are_no_candidate_where_they_must(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_float32(make: object, shape: object, dtype: torch.dtype, *_: object, **__: object) -> tuple[int]:
        if dtype is torch.bfloat16:
            raise ModelError("deterministic: a row's place matters")
        return (8,)

    monkeypatch.setattr(linear, "probe_row_invariance", only_float32)
    stopwatch = Stopwatch(FAST_BF16)
    assert settle(folder, tmp_path, stopwatch, deterministic=True)[0] == ("auto", "int8")
    assert settle(folder, tmp_path, stopwatch)[0] == ("bfloat16", "none"), "a choice of its own"
    assert stopwatch.asked == [("float32", "int8"), ("float32", "bfloat16", "int8")]
    with pytest.raises(ModelError, match="a row's place matters"):
        settle(folder, tmp_path, stopwatch, deterministic=True, dtype="bfloat16")
