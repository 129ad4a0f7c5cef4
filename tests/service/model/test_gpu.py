"""The model's parts on a GPU, where there is one; on the emulator, the same tests of a tiny model.

On a GPU the embedded model takes the tokens that the CPU chose, and must find each as likely.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cuda_cases import RUNTIMES, gpu_launcher
from support.decode_graphs import BLOCK_SIZE, build
from support.ops import cpu_cache_dir
from support.paged_sessions import PagedSession
from support.random_models import VOCAB_SIZE

from pageturner.kernels.cuda.ops import CudaOps
from pageturner.kernels.interface import PagedOps
from pageturner.kernels.selection import select_ops
from pageturner.service.model.build import build_model
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.graphs import DecodeGraphs, TorchGraphs
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions
from pageturner.service.model.runner import Runner

PROMPT = (19556, 905, 30, 1812, 314, 260, 3575, 282, 4649, 47)
NUM_TOKENS = 48
TOLERANCE = 0.25
"""Of logits between 10 and 30, in bfloat16: how far behind the CPU's choice may be on the GPU."""


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_swaps_beside_the_computation_lose_nothing(tmp_path: Path, runtime: str) -> None:
    """One sequence goes to the host and comes back while another decodes; a third never moves."""
    pair = build(tmp_path, on_gpu=runtime == "gpu")
    session, tokens = pair.session, [7 * i % VOCAB_SIZE for i in range(160)]
    moved, stays, busy = (session.add(tokens) for _ in range(3))
    session.step([(moved, 100), (stays, 100), (busy, 40)])
    for _ in range(3):
        session.swap_out(moved)
        for _ in range(4):
            session.step([(busy, 1)])
        session.swap_in(moved)
        session.step([(busy, 1)])
        both = session.step([(moved, 5), (stays, 5)])
        assert not bool(both.isnan().any())
        pair.assert_equal(both[0], both[1])


@pytest.mark.gpu
def test_the_embedded_model_finds_the_cpus_tokens_as_likely() -> None:
    """Teacher-forced: a prompt in chunks, then decode steps by graphs, each beside a sequence of its own."""
    device = gpu_launcher().runtime.device
    expected = _on(torch.device("cpu"))
    found = _on(device)
    assert isinstance(found.ops, CudaOps)
    graphs = DecodeGraphs(found.model, found.session.kv_cache, found.ops, TorchGraphs(device), (1, 2, 4), 64)
    assert graphs.capture() is None
    runner = Runner(found.model, found.session.kv_cache, graphs)

    tokens = list(PROMPT)
    chosen, forced, others = (side.session.add(tokens) for side in (expected, found, found))
    others.tokens += [1] * NUM_TOKENS
    logits = expected.session.finish(chosen, 4)[-1]
    ours = found.session.finish(forced, 4)[-1]
    found.session.step([(others, len(PROMPT))])
    num_equal = 0
    for _ in range(NUM_TOKENS):
        token = int(logits.argmax())
        num_equal += int(ours.argmax()) == token
        assert float(ours.max() - ours[token]) < TOLERANCE
        chosen.tokens.append(token)
        forced.tokens.append(token)
        logits = expected.session.step([(chosen, 1)])[0]
        ours = runner.forward(found.session.output([(others, 1), (forced, 1)]))[1].cpu()
    assert num_equal > 0.9 * NUM_TOKENS


@pytest.mark.gpu
def test_a_refused_capture_leaves_torch_as_it_was() -> None:
    device = gpu_launcher().runtime.device
    ones = torch.ones(64, 64, device=device)
    current = torch.cuda.current_stream(device)

    def reads_on_the_host() -> torch.Tensor:
        product = ones @ ones
        return product if float(product.sum()) > 0 else ones

    graphs = TorchGraphs(device)
    graphs.warm_up(reads_on_the_host)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graphs.capture(reads_on_the_host)
    assert torch.cuda.current_stream(device) == current
    torch.cuda.empty_cache()  # torch asserts that no capture is under way
    replay, product = TorchGraphs(device).capture(lambda: ones @ ones)
    replay()
    assert bool((product == 64).all())


class _Side:
    """The embedded model on one device."""

    def __init__(self, model: CausalModel, ops: PagedOps) -> None:
        self.model, self.ops = model, ops
        self.session = PagedSession(model, ops, block_size=BLOCK_SIZE)


def _on(device: torch.device) -> _Side:
    options = ModelOptions(dtype="bfloat16")
    artifacts = load_artifacts(options, cpu_cache_dir())

    def choose(head_dim: int) -> PagedOps:
        return select_ops(
            device,
            torch.bfloat16,
            head_dim=head_dim,
            block_size=BLOCK_SIZE,
            deterministic=False,
            cache_dir=cpu_cache_dir(),
        )

    built = build_model(artifacts, options, BLOCK_SIZE, lambda heads: choose(heads.head_dim), device)
    return _Side(built.model, built.ops)
