"""Scores of real models: those of one plain forward in float32, however the tokens are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.model_folders import save_chat_model
from transformers import AutoModelForCausalLM

from pageturner.service.client.values import Choice
from pageturner.service.core.outputs import SampledToken
from pageturner.service.errors import DeadlineExceeded, InvalidArgument
from pageturner.service.llm import LLM

TOLERANCE = 2e-4
"""Of a log-probability in float32, whose products add in another order than torch's."""

PROMPT = tuple(3 + 7 * i % 400 for i in range(45))
CONTINUATIONS = ((5, 9, 11), (5,), (5, 9, 12, 40, 41, 42), (300, 9), (7, 7, 7, 7, 7, 7, 7, 7, 7, 7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def make(folder: Path) -> Callable[..., LLM]:
    def make(**sections: Any) -> LLM:
        model = {
            "source": str(folder),
            "device": "cpu",
            "num_threads": 1,
            "dtype": "float32",
            "quantization": "none",
            "deterministic": True,
        }
        cache = {"num_blocks": 64, "swap_space": 0} | sections.pop("cache", {})
        return LLM(model, cache=cache, **sections)

    return make


@pytest.fixture(scope="module")
def llm(make: Callable[..., LLM]) -> Iterator[LLM]:
    with make() as llm:
        yield llm


@pytest.fixture(scope="module")
def cramped(make: Callable[..., LLM]) -> Iterator[LLM]:
    """Small chunks, few rows scored at a time, few blocks, and no prefix cache."""
    scheduler = {"max_num_batched_tokens": 16, "max_scored_rows": 5, "max_num_seqs": 4}
    cache = {"num_blocks": 20, "block_size": 4, "enable_prefix_caching": False}
    with make(scheduler=scheduler, cache=cache) as llm:
        yield llm


@pytest.fixture(scope="module")
def logprobs_of(folder: Path) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Log-probabilities [tokens, vocabulary] by `transformers`, row i of what follows token i."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def logprobs_of(token_ids: tuple[int, ...]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return logits.double().log_softmax(-1)

    return logprobs_of


def check_scored(tokens: tuple[SampledToken, ...], rows: torch.Tensor, num_top: int) -> None:
    """Each token's log-probability, and the likeliest, are those of its row."""
    assert len(tokens) == len(rows)
    for token, row in zip(tokens, rows, strict=True):
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=TOLERANCE)
        best = row.topk(num_top).values.tolist() if num_top else []
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(best, abs=TOLERANCE)
        for top in token.top_logprobs:
            assert top.logprob == pytest.approx(row[top.token_id].item(), abs=TOLERANCE)


def test_continuations_have_the_likelihoods_of_a_plain_forward(
    llm: LLM, logprobs_of: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    answer = llm.score(PROMPT, CONTINUATIONS, logprobs=3)
    for continuation, score in zip(CONTINUATIONS, answer.scores, strict=True):
        rows = logprobs_of(PROMPT + continuation)[len(PROMPT) - 1 : -1]
        assert tuple(token.token_id for token in score.tokens) == continuation
        check_scored(score.tokens, rows, 3)
        assert score.logprob == pytest.approx(sum(token.logprob or 0.0 for token in score.tokens))
        assert score.is_greedy == all(
            row.argmax().item() == token_id for row, token_id in zip(rows, continuation, strict=True)
        )
    assert (answer.usage.num_prompt_tokens, answer.usage.num_output_tokens) == (len(PROMPT), 22)
    assert llm.load().num_blocks_used == 0


def test_what_greedy_decoding_gives_is_greedy(llm: LLM) -> None:
    (completion,) = llm.generate([PROMPT], max_tokens=6, temperature=0.0, ignore_eos=True)
    greedy = tuple(token.token_id for token in completion.choices[0].tokens)
    other = (*greedy[:-1], (greedy[-1] + 1) % 400)
    answer = llm.score(PROMPT, [greedy, other])
    assert [score.is_greedy for score in answer.scores] == [True, False]
    assert answer.scores[0].tokens[0].top_logprobs == ()


def test_scores_are_the_same_bits_in_a_cramped_pool(llm: LLM, cramped: LLM) -> None:
    expected = llm.score(PROMPT, CONTINUATIONS, logprobs=2).scores
    assert cramped.score(PROMPT, CONTINUATIONS, logprobs=2).scores == expected
    alone = [
        llm.score(PROMPT, [each], logprobs=2, bypass_prefix_cache=True).scores[0] for each in CONTINUATIONS
    ]
    assert tuple(alone) == expected


def test_the_prefix_cache_serves_a_prompt_that_is_scored_behind(llm: LLM) -> None:
    prompt = tuple(reversed(PROMPT))
    first = llm.score(prompt, CONTINUATIONS)
    second = llm.score(prompt, CONTINUATIONS)
    assert second.scores == first.scores
    assert (first.usage.num_cached_prompt_tokens, second.usage.num_cached_prompt_tokens) == (0, 32)


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_is_scored_though_its_blocks_are_cached(
    llm: LLM, n: int, logprobs_of: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    rows = logprobs_of(PROMPT)[:-1]
    options: Any = {"max_tokens": 3, "temperature": 1.0, "seed": 4, "n": n}
    (plain,) = llm.generate([PROMPT], **options)
    for _ in range(2):
        (completion,) = llm.generate([PROMPT], prompt_logprobs=4, **options)
        check_scored(completion.prompt_logprobs, rows, 4)
        assert tuple(token.token_id for token in completion.prompt_logprobs) == PROMPT[1:]
        assert completion.usage.num_cached_prompt_tokens == 0  # none saved its computation
        assert [choice.tokens for choice in completion.choices] == [choice.tokens for choice in plain.choices]
    assert plain.prompt_logprobs == ()


def test_prompt_logprobs_are_the_same_bits_in_a_cramped_pool(llm: LLM, cramped: LLM) -> None:
    prompts = [PROMPT, PROMPT[:20], tuple(reversed(PROMPT))]
    options: Any = {"max_tokens": 8, "temperature": 0.0, "prompt_logprobs": 2, "ignore_eos": True}
    expected = [completion.prompt_logprobs for completion in llm.generate(prompts, **options)]
    assert [completion.prompt_logprobs for completion in cramped.generate(prompts, **options)] == expected


def test_a_prompt_of_one_token_has_no_logprobs(llm: LLM) -> None:
    (completion,) = llm.generate([(5,)], prompt_logprobs=1, max_tokens=1)
    assert completion.prompt_logprobs == ()


def sampled(llm: LLM, **options: Any) -> tuple[Choice, ...]:
    given = {"max_tokens": 6, "temperature": 1.3, "seed": 9, "ignore_eos": True} | options
    return llm.generate([PROMPT], **given)[0].choices


def test_a_choice_is_the_same_whatever_n_and_best_of_are(llm: LLM) -> None:
    eight = sampled(llm, n=8, logprobs=0)
    for n in (1, 3):
        assert sampled(llm, n=n, logprobs=0) == eight[:n]
    best = sampled(llm, n=8, best_of=8, logprobs=0)
    assert best == eight


@pytest.mark.parametrize("n", [1, 3])
def test_the_likeliest_of_many_are_returned_the_best_first(llm: LLM, cramped: LLM, n: int) -> None:
    every = sampled(llm, n=8, logprobs=0)
    for choice in every:
        total = sum(token.logprob or 0.0 for token in choice.tokens)
        assert choice.cumulative_logprob == pytest.approx(total)
    ranked = sorted(every, key=lambda choice: -(choice.cumulative_logprob or 0.0))[:n]
    best = sampled(llm, n=n, best_of=8)
    assert [choice.index for choice in best] == list(range(n))
    assert [choice.text for choice in best] == [choice.text for choice in ranked]
    assert [choice.cumulative_logprob for choice in best] == [choice.cumulative_logprob for choice in ranked]
    assert all(token.logprob is None for choice in best for token in choice.tokens)
    assert sampled(cramped, n=1, best_of=4) == sampled(llm, n=1, best_of=4)


def test_usage_counts_every_choice_that_was_sampled(llm: LLM) -> None:
    (completion,) = llm.generate([PROMPT], best_of=4, max_tokens=5, seed=1, ignore_eos=True)
    assert completion.usage.num_output_tokens == 20


@pytest.mark.parametrize(
    ("continuations", "options", "field"),
    [
        ([], {}, "continuations"),
        ([(5,), ()], {}, "continuations[1].token_ids.ids"),
        (["a", ""], {}, "continuations[1].text"),
        ([(5,), (5, 100_000)], {}, "continuations[1].token_ids.ids[1]"),
        ([(5,) * 2040], {}, "continuations[0]"),
        ([(5,)] * 1025, {}, "continuations"),
        ([(5,)], {"logprobs": 21}, "logprobs"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_its_name(
    llm: LLM, continuations: list[Any], options: Any, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        llm.score(PROMPT, continuations, **options)
    assert refused.value.field == field


def test_a_continuation_that_never_fits_the_pool_is_refused(cramped: LLM) -> None:
    with pytest.raises(InvalidArgument, match=r"continuations\[1\].*never fit") as refused:
        cramped.score(PROMPT, [(5,), (5,) * 60])
    assert refused.value.field == "continuations[1]"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"best_of": 2, "n": 3}, "sampling.best_of"),
        ({"best_of": 17}, "sampling.best_of"),
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs"),
    ],
)
def test_options_out_of_range_are_refused_by_their_names(llm: LLM, options: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        llm.generate([PROMPT], **options)
    assert refused.value.field == field


def test_a_text_is_scored_as_its_own_tokens(llm: LLM) -> None:
    by_text = llm.score("the quick", [" brown fox", " fox"])
    ids = [llm.tokenize(text, add_special_tokens=False) for text in (" brown fox", " fox")]
    assert by_text.scores == llm.score(llm.tokenize("the quick"), ids).scores


def test_a_deadline_ends_a_score(llm: LLM) -> None:
    with pytest.raises(DeadlineExceeded):
        llm.score(PROMPT, [(5,) * 100] * 400, timeout_seconds=1e-3)
    assert llm.score(PROMPT, [(5,)]).scores


@pytest.fixture(scope="module")
def quantised() -> Iterator[tuple[LLM, LLM]]:
    """The embedded model in one call a step, whole prompts and few rows at a time."""
    model = {"source": "embedded", "device": "cpu", "quantization": "file"}
    cache = {"num_blocks": 64, "swap_space": 0}
    scheduler = {"max_num_batched_tokens": 9, "max_num_seqs": 4, "max_scored_rows": 4}
    with LLM(model, cache=cache) as whole, LLM(model, cache=cache, scheduler=scheduler) as pieces:
        yield whole, pieces


def test_quantised_scores_have_the_same_bits_in_pieces(quantised: tuple[LLM, LLM]) -> None:
    whole, pieces = quantised
    prompt, continuations = "The capital of France is", [" Paris", " Rome, of course", " a city"]
    answer = whole.score(prompt, continuations, logprobs=2)
    assert pieces.score(prompt, continuations, logprobs=2).scores == answer.scores
    assert [score.is_greedy for score in answer.scores] == [True, False, False]
    options: Any = {"prompt_logprobs": 3, "max_tokens": 2, "temperature": 0.0}
    told = [llm.generate([f"{prompt} Paris"], **options)[0].prompt_logprobs for llm in quantised]
    assert told[0] == told[1]
    assert told[0][-1].logprob == answer.scores[0].logprob
