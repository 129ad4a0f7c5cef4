"""What the fingerprint of a server changes with."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from support.model_folders import save_chat_model

from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.errors import NotResumable
from pageturner.service.llm import LLM
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions
from pageturner.service.startup import identity
from pageturner.service.startup.fingerprint import machine_key, tokenizer_key
from pageturner.service.startup.identity import code_key, weights_key
from pageturner.service.startup.loading import LoadedModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


def artifacts_of(folder: Path, tmp_path: Path) -> ModelArtifacts:
    return load_artifacts(ModelOptions(source=str(folder), dtype="float32"), tmp_path)


def test_a_copy_of_a_model_has_its_keys_and_another_has_others(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    one, other = artifacts_of(folder, tmp_path), artifacts_of(copy, tmp_path)
    assert weights_key(one) == weights_key(other)
    assert tokenizer_key(one) == tokenizer_key(other)

    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert weights_key(artifacts_of(copy, tmp_path)) != weights_key(one)
    assert weights_key(replace(one, config={**one.config, "rope_theta": 1.0})) != weights_key(one)

    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|end|>", "<|fin|>"))
    assert tokenizer_key(artifacts_of(copy, tmp_path)) != tokenizer_key(one)
    assert tokenizer_key(replace(one, eos_token_ids=(7,))) != tokenizer_key(one)
    assert tokenizer_key(replace(one, tokenizer=None)) != tokenizer_key(one)


def test_a_processor_that_multiplies_pairs_is_another_machine_for_quantised_answers_too() -> None:
    """Ice Lake and Zen 4 run the same quantised products; attention adds in another order on the second."""
    quantised = SimpleNamespace(ops=SimpleNamespace(name="avx512_vnni"))
    backend = SimpleNamespace(device=torch.device("cpu"), quantised=quantised)
    artifacts = SimpleNamespace(packed=object())
    model = cast(LoadedModel, SimpleNamespace(backend=backend, artifacts=artifacts))
    without, with_pairs = ("flags : avx2 avx512f avx512_vnni" + more for more in ("", " avx512_bf16"))
    assert machine_key(model, without) == machine_key(model, without + " later_flag")
    assert machine_key(model, without) != machine_key(model, with_pairs)


def test_the_code_that_computes_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = code_key()
    assert code_key() == before
    source = tmp_path / "kernel.cpp"
    source.write_text("int one = 1;")
    monkeypatch.setattr(identity, "_sources", lambda: iter([source]))
    first = code_key()
    source.write_text("int one = 2;")
    assert len({before, first, code_key()}) == 3


def test_a_server_says_what_it_is_and_what_it_promises(folder: Path) -> None:
    options = {"source": str(folder), "device": "cpu", "dtype": "float32", "deterministic": True}
    with LLM(options, cache={"num_blocks": 32, "swap_space": 0}) as llm:
        info = llm.info()
    assert info.exact_resume
    assert [part.split("=")[0] for part in info.fingerprint.split(";")] == [
        *("weights", "tokenizer", "products", "kv", "kernels", "deterministic", "machine", "code")
    ]


def test_parts_are_compared_by_name() -> None:
    server = Fingerprint.of_parts({"weights": "1", "kernels": "a"}, is_exact=True)
    given = server.of_prompt([1, 2])
    server.check_server(given, allow_inexact=False)
    server.check_prompt(given, [1, 2])
    with pytest.raises(NotResumable, match="other tokens here"):
        server.check_prompt(given, [2, 1])
    other = Fingerprint.of_parts({"weights": "1", "kernels": "b"}, is_exact=True)
    with pytest.raises(NotResumable, match=r"kernels \(a, here b\)") as caught:
        other.check_server(given, allow_inexact=False)
    assert caught.value.differing == "kernels"
    other.check_server(given, allow_inexact=True)
    with pytest.raises(NotResumable, match="weights"):
        Fingerprint.of_parts({"weights": "2"}, is_exact=True).check_server(given, allow_inexact=True)
    loose = replace(server, is_exact=False)
    with pytest.raises(NotResumable, match="deterministic is off"):
        loose.check_server(given, allow_inexact=False)
    loose.check_server(given, allow_inexact=True)
    with pytest.raises(NotResumable, match="resumes no answers"):
        Fingerprint().check_server(given, allow_inexact=True)
    assert Fingerprint().of_prompt([1]) == ""


def test_an_answer_of_a_form_goes_on_where_the_same_code_obeys_it() -> None:
    server = Fingerprint("weights=1;code=2", is_exact=True)
    given = server.of_prompt([1, 2], "llguidance-1.9.1-20")
    server.check_server(given, allow_inexact=False)
    server.check_prompt(given, [1, 2], "llguidance-1.9.1-20")
    for mine in ("llguidance-1.7.0-20", ""):
        with pytest.raises(NotResumable, match="grammar") as caught:
            server.check_prompt(given, [1, 2], mine)
        assert caught.value.differing == "grammar"
        server.check_prompt(given, [1, 2], mine, allow_inexact=True)
