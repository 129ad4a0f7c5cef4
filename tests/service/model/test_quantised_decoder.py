"""The decoder on packed weights: its wiring against the float decoder, its bits, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.exact_products import ExactQuantisedOps
from support.ops import BACKENDS, cpu_library
from support.paged_sessions import PagedSession
from support.random_models import VOCAB_SIZE, save, tiny_model
from support.tiny_gguf import write_gguf

from pageturner.kernels.cpu.forward import CpuDecoder
from pageturner.kernels.cpu.ops import CpuOps
from pageturner.kernels.cpu.quantised_ops import CpuQuantisedOps
from pageturner.kernels.interface import PagedOps, QuantisedOps
from pageturner.kernels.layout import CODE_DTYPES
from pageturner.kernels.packed import unpack
from pageturner.kernels.reference import ReferenceQuantisedOps
from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.errors import ModelError
from pageturner.service.model import packed_file
from pageturner.service.model.decoder import Decoder, load_decoder
from pageturner.service.model.decoder_config import DecoderConfig, parse_decoder_config
from pageturner.service.model.loader import WeightFiles, load_artifacts, open_weights, read_folder
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.packed_file import PackedFile
from pageturner.service.model.packing import EMBEDDING, HEAD, NotPackable, check_packable, write_packed
from pageturner.service.model.quantise import GROUP
from pageturner.service.model.quantised_decoder import QuantisedDecoder
from pageturner.service.model.quantised_products import load_quantised_products

FAMILIES = ["llama_bias", "llama_tied", "mistral_window", "qwen2", "qwen3", "smollm3"]
NUM_TOKENS = 40


def tiny_folder(family: str, folder: Path, **changes: Any) -> Path:
    """Sizes that groups of 32 divide."""
    _, model = tiny_model(family, 7, hidden_size=64, intermediate_size=96, **changes)
    return save(model, folder)


def config_of(folder: Path) -> DecoderConfig:
    return parse_decoder_config(read_folder("test", "test", folder, ModelOptions(source="test")).config)


def packed(folder: Path, into: Path, scheme: str = "int8") -> PackedFile:
    into.mkdir()
    write_packed(config_of(folder), WeightFiles([folder / "model.safetensors"]), scheme, into)
    return PackedFile(into)


def quantised(folder: Path, file: PackedFile, ops: PagedOps, products: QuantisedOps) -> Decoder:
    config = config_of(folder)
    return Decoder(config, load_quantised_products("int8", config, file, products, torch.float32), ops)


class Dequantised:
    """A `WeightSource` of the values that a packed file stands for."""

    def __init__(self, config: DecoderConfig, file: PackedFile) -> None:
        self._config, self._file = config, file

    def take(self, name: str, shape: Any) -> torch.Tensor:
        layer, _, part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        sizes = self._config.qkv_sizes
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        layer = layer.removesuffix(".self_attn").removesuffix(".mlp")
        product, start = {
            "q_proj": (f"{layer}.qkv", 0),
            "k_proj": (f"{layer}.qkv", sizes[0]),
            "v_proj": (f"{layer}.qkv", sizes[0] + sizes[1]),
            "o_proj": (f"{layer}.out", 0),
            "gate_proj": (f"{layer}.gate_up", 0),
            "up_proj": (f"{layer}.gate_up", inner),
            "down_proj": (f"{layer}.down", 0),
            "embed_tokens": (EMBEDDING, 0),
            "lm_head": (HEAD, 0),
        }.get(part, ("", 0))
        if not product:
            return self._file.take(name, shape)
        out = {
            "qkv": sum(sizes),
            "gate_up": 2 * inner,
            EMBEDDING: self._config.vocab_size,
            HEAD: self._config.vocab_size,
        }.get(product.rpartition(".")[2], hidden)
        width = {"out": sizes[0], "down": inner}.get(product.rpartition(".")[2], hidden)
        bias = name.endswith("bias")
        weight = self._file.take_packed(product, out, width, bias=bias)
        rows = slice(start, start + shape[0])
        if bias:
            assert weight.bias is not None
            return weight.bias[rows]
        return unpack(weight).dequantised()[rows]

    def take_groups(self, name: str, shape: Any) -> None:
        return None

    def left(self) -> Iterator[str]:
        return iter(())


def tokens_of(seed: int, count: int = NUM_TOKENS) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_logits_are_those_of_the_dequantised_weights(family: str, scheme: str, tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 4} if family == "smollm3" else {}
    folder = tiny_folder(family, tmp_path / "model", **changes)
    file, ops = packed(folder, tmp_path / "packed", scheme), TorchOps()
    config = config_of(folder)
    plain = PagedSession(load_decoder(config, Dequantised(config, file), ops, torch.float32), ops)
    found = PagedSession(quantised(folder, file, TorchOps(), ExactQuantisedOps()), ops)
    tokens = tokens_of(1)
    expected, logits = (session.step([(session.add(tokens), NUM_TOKENS)]) for session in (plain, found))
    assert torch.allclose(logits, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_gguf_file_in_its_own_groups_has_its_own_values(kind: str, tmp_path: Path) -> None:
    """k of 8 bits beside narrower ones: the product of q, k and v is of the widest."""
    kinds = gguf.GGMLQuantizationType
    _, model = tiny_model("llama", 7, hidden_size=64, intermediate_size=96, head_dim=16)
    mixed = {"attn_k": kinds.Q8_0, "ffn_down": kinds.F32, "": kinds[kind]}
    path = write_gguf(model, tmp_path / "a.gguf", "llama", kinds=mixed)
    artifacts = load_artifacts(ModelOptions(source=str(path), quantization="file"), tmp_path)
    config = parse_decoder_config(artifacts.config)
    assert artifacts.packed is not None
    ops = TorchOps()
    truth = PagedSession(load_decoder(config, open_weights(artifacts), ops, torch.float32), ops)
    file = PackedFile(artifacts.packed)
    products = load_quantised_products("file", config, file, ExactQuantisedOps(), torch.float32)
    found = PagedSession(Decoder(config, products, TorchOps()), ops)
    tokens = tokens_of(6)
    expected, logits = (session.step([(session.add(tokens), NUM_TOKENS)]) for session in (truth, found))
    # The down projection is of plain numbers, and so in int8.
    assert (logits - expected).abs().max() < 0.02 * expected.abs().max()
    layer = products.layers[0].products
    query = open_weights(artifacts).take("model.layers.0.self_attn.q_proj.weight", (64, 64))
    assert torch.equal(unpack(layer.merged).dequantised()[:64], query)


def test_activations_in_integers_stay_near(tmp_path: Path) -> None:
    folder = tiny_folder("qwen3", tmp_path / "model")
    ops = TorchOps()
    dense = load_decoder(config_of(folder), WeightFiles([folder / "model.safetensors"]), ops, torch.float32)
    found = quantised(folder, packed(folder, tmp_path / "packed"), ops, ReferenceQuantisedOps())
    tokens = tokens_of(2)
    expected, logits = (
        session.step([(session.add(tokens), NUM_TOKENS)])
        for session in (PagedSession(dense, ops), PagedSession(found, ops))
    )
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()
    assert not torch.equal(logits, expected)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3"])
def test_sizes_are_counted(family: str, tmp_path: Path) -> None:
    folder = tiny_folder(family, tmp_path / "model")
    source = WeightFiles([folder / "model.safetensors"])
    dense = load_decoder(config_of(folder), source, TorchOps(), torch.float32)
    file = packed(folder, tmp_path / "packed")
    found = quantised(folder, file, TorchOps(), ReferenceQuantisedOps())
    assert found.num_parameters == dense.num_parameters
    assert found.num_parameters < found.weight_bytes < dense.weight_bytes / 3
    assert dense.weight_bytes == 4 * dense.num_parameters
    assert (found.dtype, found.kv_dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("backend", ["torch-deterministic", "cpu-deterministic"])
def test_bits_do_not_depend_on_company(backend: str, tmp_path: Path) -> None:
    folder = tiny_folder("llama_tied", tmp_path / "model", head_dim=16)
    file, ops = packed(folder, tmp_path / "packed"), BACKENDS[backend]()
    decoder = quantised(folder, file, ops, ReferenceQuantisedOps())
    tokens, others = tokens_of(3), [tokens_of(4, 5), tokens_of(5, 23)]
    alone = PagedSession(decoder, ops, block_size=16)
    expected = alone.step([(alone.add(tokens), NUM_TOKENS)])
    session = PagedSession(decoder, ops, block_size=16)
    mine, one, other = session.add(tokens), *map(session.add, others)
    session.step([(mine, 7), (one, 5)])
    session.step([(other, 11), (mine, 20)])
    (_, logits) = session.step([(other, 12), (mine, NUM_TOKENS - 27)])
    assert torch.equal(logits, expected[0])


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "mistral_window", "smollm3", "qwen2"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, *CODE_DTYPES])
def test_one_call_gives_the_bits_of_its_operations(
    family: str, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tiny_folder(family, tmp_path / "model", head_dim=16)
    config, library = config_of(folder), cpu_library()
    products = load_quantised_products(
        "int8", config, packed(folder, tmp_path / "packed"), CpuQuantisedOps(library), kv_dtype
    )
    ops = CpuOps(library)
    whole = QuantisedDecoder(
        config, products, ops, make_whole=lambda weights: CpuDecoder(library, weights, 2)
    )
    sessions = [
        PagedSession(decoder, ops, block_size=16) for decoder in (whole, Decoder(config, products, ops))
    ]
    results = []
    for session in sessions:
        first, second = session.add(tokens_of(3)), session.add(tokens_of(4))
        results.append([session.step([(first, 9)]), session.step([(first, 31), (second, NUM_TOKENS)])])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_a_model_of_other_sizes_and_a_cut_file_are_refused(tmp_path: Path) -> None:
    folder = tiny_folder("qwen3", tmp_path / "model")
    other = tiny_folder("qwen3", tmp_path / "other", num_hidden_layers=3)
    wider = tiny_folder("qwen3", tmp_path / "wider", vocab_size=VOCAB_SIZE + 1)
    file, ops = packed(folder, tmp_path / "packed"), TorchOps()
    with pytest.raises(ModelError, match=r"lacks model.layers.2"):
        quantised(other, file, ops, ReferenceQuantisedOps())
    with pytest.raises(ModelError, match=r"embedding is not 129 x 64"):
        quantised(wider, file, ops, ReferenceQuantisedOps())
    weights = tmp_path / "packed" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"buffer"):
        quantised(folder, PackedFile(tmp_path / "packed"), ops, ReferenceQuantisedOps())
    with pytest.raises(ModelError, match=r"cannot be read"):
        PackedFile(tmp_path)


def test_memory_that_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError("64 bytes of the host cannot be had")

    monkeypatch.setattr(packed_file, "own_pages", refused)
    with pytest.raises(ModelError, match=r"cannot be read: 64 bytes of the host cannot be had"):
        packed(tiny_folder("llama_tied", tmp_path / "model"), tmp_path / "packed")


def test_weights_that_cannot_be_quantised_are_named(tmp_path: Path) -> None:
    folder = tiny_folder("qwen3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight holds"):
        packed(folder, tmp_path / "packed")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 0.0
    save_file({**tensors, "model.extra.weight": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"no place in this architecture, such as model.extra"):
        packed(folder, tmp_path / "again")


def test_sizes_that_groups_do_not_divide_are_told(tmp_path: Path) -> None:
    _, model = tiny_model("qwen3", 7)
    reason = f"intermediate_size is 48, no multiple of the {GROUP} inputs of a group"
    with pytest.raises(NotPackable, match=reason):
        check_packable(config_of(save(model, tmp_path)))
