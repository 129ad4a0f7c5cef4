"""What loading adds to the parts it loads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from support.lazy_streams import lazy_copies
from support.scripted import recording_logger
from support.tiny_tokenizers import byte_level_bpe

from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.model import backend
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.startup import loading, parts


def test_what_is_measured_has_finished() -> None:
    done: list[str] = []
    device = backend.Backend(
        torch.device("cpu"),
        lambda heads, dtype: TorchOps(),
        lazy_copies(),
        synchronize=lambda: done.append("waited"),
    )
    parts.finished(done.append, device)("enqueued")
    assert done == ["enqueued", "waited"]


def artifacts(tokenizer: tokenizers.Tokenizer | None, *ends: int) -> ModelArtifacts:
    return ModelArtifacts(
        "source", "name", Path(), {}, "float32", (), {}, tokenizer, None, {}, ends, False, ("a note",)
    )


@pytest.mark.fault("1")
def test_end_tokens_and_a_tokenizer_beyond_the_embeddings_are_said_at_start() -> None:
    rows = byte_level_bpe().get_vocab_size() - 1
    found = artifacts(byte_level_bpe(), 3, rows, rows + 7)
    tokenizer = loading.load_tokenizer(found)
    logger, lines = recording_logger()
    loading.report_model_files(found, rows, tokenizer, logger)
    reasons = [str(line["reason"]) for line in lines]
    assert reasons[0] == "a note"
    assert f"end tokens [{rows}, {rows + 7}] are beyond" in reasons[1]
    assert f"the tokenizer's ids go up to {rows}" in reasons[2]
    loaded: Any = SimpleNamespace(
        artifacts=found,
        tokenizer=tokenizer,
        limits=SchedulerOptions(),
        products=SimpleNamespace(name="float32"),
        deterministic=False,
        model=SimpleNamespace(
            vocab_size=rows, backend="lean", num_layers=1, total_kv_heads=1, head_dim=1, num_parameters=1
        ),
    )
    assert loading.describe_model(loaded).eos_token_ids == (3,)


@pytest.mark.fault("27")
def test_a_cache_folder_that_cannot_be_made_or_written_is_known(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert loading.make_folder(tmp_path / "new" / "folder")
    assert loading.make_folder(tmp_path / "new" / "folder")
    assert not loading.make_folder(tmp_path / "file" / "folder")
    assert not loading.make_folder(Path("/proc/pageturner"))
