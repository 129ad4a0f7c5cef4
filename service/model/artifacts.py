"""What a model consists of on disk, whatever it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers


@dataclass(frozen=True, slots=True)
class ModelArtifacts:
    """A model on this machine, ready to be read. Holds paths, small values and the tokenizer, no weights.

    source: as the operator named it. name: short, for clients. folder: config.json, safetensors and
    tokenizer files, after any conversion; `transformers` can load it too.
    config: config.json as it stands. dtype: `float32` or `bfloat16`, what `auto` came to.
    weight_files: safetensors shards, none of a GGUF file whose weights are packed. packed: the folder of
    weights that are quantised and packed (see `packed_file`), None where they are plain numbers. gguf: the
    file that they came from. generation: generation_config.json, empty if there is none.
    tokenizer: None for a model that only takes token ids. chat_template: Jinja source, with special_tokens
    as its variables. named_templates: others that the model has, such as "tool_use".
    special_tokens: texts by name, and a tuple of them under `additional_special_tokens`.
    eos_token_ids: every token that ends an answer. add_bos: prompts given as text start with bos_token;
    tokenizer.json's own post-processor may put it there already. notes: what an operator should know of
    the files, one line each.
    """

    source: str
    name: str
    folder: Path
    config: Mapping[str, object]
    dtype: str
    weight_files: tuple[Path, ...]
    generation: Mapping[str, object]
    tokenizer: tokenizers.Tokenizer | None = field(compare=False)
    chat_template: str | None
    special_tokens: Mapping[str, str | tuple[str, ...]]
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    notes: tuple[str, ...] = ()
    packed: Path | None = None
    gguf: Path | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)

    @property
    def bos_token(self) -> str | None:
        """What texts start with if add_bos."""
        text = self.special_tokens.get("bos_token")
        return text if isinstance(text, str) else None

    @property
    def architecture(self) -> str:
        """The class named in config.json, e.g. LlamaForCausalLM, else its model_type."""
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else str(self.config.get("model_type", ""))
