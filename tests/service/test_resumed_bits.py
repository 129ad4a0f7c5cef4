"""Answers of real models that broke off: the KV of known tokens, made in chunks, has the bits of decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.model_folders import save_chat_model

from pageturner.service.client.values import Completion, CompletionBuilder
from pageturner.service.core.request import ResumedChoice
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import AcceptedEvent, GenerationRequest, Resumption
from pageturner.service.errors import InvalidArgument, NotResumable
from pageturner.service.llm import LLM

PROMPT = "The lighthouse keeper counted the ships that"
NUM_TOKENS = 40


def model_of(name: str, folder: Path) -> dict[str, Any]:
    if name == "embedded":
        return {"source": "embedded", "device": "cpu", "quantization": "file"}
    return {"source": str(folder), "device": "cpu", "dtype": "float32", "deterministic": True}


@pytest.fixture(scope="module", params=["tiny", "embedded"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of two, so that one never saw what the other computed. The chunks of one are far smaller."""
    folder = save_chat_model(tmp_path_factory.mktemp("tiny"))
    model = model_of(request.param, folder)
    cache: Any = {"num_blocks": 64, "swap_space": 0}
    scheduler: Any = {"max_num_seqs": 4, "max_num_batched_tokens": 7}
    with (
        LLM(model, cache=cache) as first,
        LLM(model, cache=cache | {"block_size": 32}, scheduler=scheduler) as second,
    ):
        assert first.model.deterministic
        yield first, second


def answer(llm: LLM, request: GenerationRequest) -> tuple[Completion, AcceptedEvent]:
    builder, accepted = CompletionBuilder(), None
    for event in llm._thread.stream(request):
        accepted = event if isinstance(event, AcceptedEvent) else accepted
        builder.add(event)
    assert accepted is not None
    return builder.build(), accepted


def resumption(accepted: AcceptedEvent, whole: Completion, count: int, **changes: Any) -> Resumption:
    choices = tuple(
        ResumedChoice(tuple(token.token_id for token in choice.tokens[:count])) for choice in whole.choices
    )
    return Resumption(accepted.seed, accepted.fingerprint, choices, accepted.max_tokens, **changes)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "n": 2}])
def test_a_resumed_answer_has_the_bits_that_would_have_come(
    llm: tuple[LLM, LLM], params: dict[str, Any]
) -> None:
    first, second = llm
    request = GenerationRequest(
        PROMPT, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, **params)
    )
    whole, accepted = answer(first, request)
    assert accepted.is_exact
    for count in (1, 17, NUM_TOKENS - 1):
        resume = resumption(accepted, whole, count)
        rest, _ = answer(second, GenerationRequest(PROMPT, request.params, resume=resume))
        for choice, other in zip(whole.choices, rest.choices, strict=True):
            assert choice.tokens[count:] == other.tokens, f"behind {count} tokens"
            assert choice.text.endswith(other.text)
        assert rest.usage.num_output_tokens == whole.usage.num_output_tokens
        assert rest.usage.num_resumed_tokens == count * len(whole.choices)


def test_what_no_answer_of_this_server_can_be_is_refused(llm: tuple[LLM, LLM]) -> None:
    request = GenerationRequest(PROMPT, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    whole, accepted = answer(llm[0], request)

    def refused(kind: Any, resume: Resumption, prompt: str = PROMPT) -> Any:
        with pytest.raises(kind) as caught:
            answer(llm[1], GenerationRequest(prompt, request.params, resume=resume))
        return caught.value

    given = resumption(accepted, whole, 2)
    assert refused(NotResumable, given, "Another prompt").differing == "prompt"
    other = given.fingerprint.replace("kernels=", "kernels=x")
    changed = Resumption(given.seed, other, given.choices, given.max_tokens)
    assert refused(NotResumable, changed).differing == "kernels"
    stranger = Resumption(given.seed, "nonsense", given.choices, given.max_tokens)
    assert refused(NotResumable, stranger).differing == "fingerprint"
    beyond = Resumption(given.seed, given.fingerprint, (ResumedChoice((1, 1 << 30)),), given.max_tokens)
    assert refused(InvalidArgument, beyond).field == "resume.choices[0].token_ids[1]"
