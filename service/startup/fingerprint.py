"""What this server's tokens hang on: weights, tokenizer, arithmetic, and the code that does it."""

from __future__ import annotations

from hashlib import sha256

import torch

from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.model.artifacts import ModelArtifacts
from pageturner.service.model.cpu_features import cpu_identity, has_bfloat16, read_cpuinfo
from pageturner.service.model.kv_dtypes import name_of
from pageturner.service.startup.identity import code_key, short, weights_key
from pageturner.service.startup.loading import LoadedModel


def describe_fingerprint(model: LoadedModel) -> Fingerprint:
    """The fingerprint of answers that this model gives.

    Its parts change with anything that may change a bit of the logits, or the choice of a token from them. A
    block's size is none of them: no kernel whose promise is kept adds in an order that depends on it.
    """
    # Quantised products have the same bits on any number of ranks; sums of others are cut where ranks are.
    ranks = {}
    if model.ranks is not None and model.artifacts.packed is None:
        ranks["ranks"] = str(model.ranks.leader.size)
    return Fingerprint.of_parts(
        {
            "weights": weights_key(model.artifacts),
            "tokenizer": tokenizer_key(model.artifacts),
            "products": model.products.name,
            "kv": name_of(model.model.kv_dtype),
            "kernels": model.ops.name,
            "deterministic": "yes" if model.deterministic else "no",
            "machine": machine_key(model, read_cpuinfo()),
            "code": code_key(),
            **ranks,
        },
        is_exact=model.deterministic,
    )


def tokenizer_key(artifacts: ModelArtifacts) -> str:
    """Changes with the text of any token, and with the tokens that end an answer."""
    # Its files where it has them: writing a tokenizer out takes ten times as long as reading them.
    files = [artifacts.folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    if artifacts.tokenizer is None:
        texts = [""]
    elif files[0].exists():
        texts = [sha256(file.read_bytes()).hexdigest() for file in files if file.exists()]
    else:
        texts = [artifacts.tokenizer.to_str()]
    return short(*texts, str(artifacts.eos_token_ids))


def machine_key(model: LoadedModel, cpuinfo: str) -> str:
    """What of the machine the bits may depend on: the instructions that kernels and torch were chosen for.

    Libraries for products of plain numbers choose by the processor's model and share work by the threads.
    Quantised products have the same bits on all machines, but attention multiplies pairs of bfloat16 where
    the processor has instructions for them. cpuinfo: of Linux.
    """
    torch_name = f"torch-{torch.__version__}"
    if model.backend.device.type != "cpu":
        return short(torch_name, torch.cuda.get_device_name(model.backend.device))
    quantised = model.backend.quantised
    if model.artifacts.packed is not None and quantised is not None:
        pairs = "bfloat16" if has_bfloat16(cpuinfo) else ""
        return short(torch_name, torch.backends.cpu.get_cpu_capability(), quantised.ops.name, pairs)
    return short(torch_name, cpu_identity(cpuinfo), str(torch.get_num_threads()))
