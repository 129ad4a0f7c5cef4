"""What a model consists of on disk, whatever it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelArtifacts:
    """A model on this machine, ready to be read. Holds paths and small values, no weights.

    source: as the operator named it. name: short, for clients. folder: config.json, safetensors and
    tokenizer files, after any conversion; `transformers` can load it too.
    config: config.json as it stands. dtype: `float32` or `bfloat16`, what `auto` came to.
    weight_files: safetensors shards. generation: generation_config.json, empty if there is none.
    tokenizer_file: tokenizer.json, None for a model that only takes token ids.
    chat_template: Jinja source, with bos_token and eos_token as its variables.
    eos_token_ids: every token that ends an answer. add_bos: prompts given as text start with bos_token;
    tokenizer.json's own post-processor may put it there already.
    """

    source: str
    name: str
    folder: Path
    config: Mapping[str, object]
    dtype: str
    weight_files: tuple[Path, ...]
    generation: Mapping[str, object]
    tokenizer_file: Path | None
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool

    @property
    def architecture(self) -> str:
        """The class named in config.json, e.g. LlamaForCausalLM, else its model_type."""
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else str(self.config.get("model_type", ""))
