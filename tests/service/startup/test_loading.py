"""What loading adds to the parts it loads."""

from __future__ import annotations

import torch
from support.lazy_streams import lazy_copies

from pageturner.kernels.torch_ops import TorchOps
from pageturner.service.model import backend
from pageturner.service.startup import loading


def test_what_is_measured_has_finished() -> None:
    done: list[str] = []
    device = backend.Backend(
        torch.device("cpu"),
        lambda heads, dtype: TorchOps(),
        lazy_copies(),
        synchronize=lambda: done.append("waited"),
    )
    loading._finished(done.append, device)("enqueued")
    assert done == ["enqueued", "waited"]
