"""A whole model folder that can be chatted with: random weights, a real tokenizer, a chat template."""

from __future__ import annotations

from pathlib import Path

from support.random_models import save, tiny_model
from support.tiny_tokenizers import byte_level_bpe

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def save_chat_model(folder: Path) -> Path:
    """A random llama of 4,096 positions with a tokenizer of its own; returns the folder."""
    tokenizer = byte_level_bpe()
    _, tiny = tiny_model("llama", seed=0, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=4096)
    save(tiny, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
