"""One thing of a request that must be refused by name, of each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pageturner.v1 import generation_pb2 as pb

PLACEHOLDER = "?SURROGATE?"
"""What stands for bytes that are no UTF-8, which Python's protobuf lets no text hold."""

LONE_SURROGATE = b"?\xed\xa0\x80ROGATE?"
"""Of the same length, so that the message around it stays whole."""

HUGE = (1 << 32) - 1
NO_NUMBER = (math.nan, math.inf, -math.inf)
BAD_FORMS: Sequence[tuple[str, Any]] = (
    *(("json_schema", text) for text in (
        "", "{", "[]", "0", '{"type": "nope"}', '{"$ref": "http://example.com/x"}', '{"$ref": "#/none"}',
        "[" * 20_000, '{"not": ' * 500 + "{}" + "}" * 500, "x" * 100_000,
        '{"type": "string", "pattern": "("}',
    )),
    *(("regex", text) for text in (
        "", "(", "a{9,1}", "(?=a)b", "[z-a]", "x" * 100_000, "a{1000}{1000}{1000}",
    )),
    *(("grammar", text) for text in (
        "", "end: x", "start: start", "start: nope", "(" * 50_000,
    )),
    ("json_object", False),
)  # fmt: skip


@dataclass
class Draft:
    """A message that is being made. bad: what was spoilt. choices: the texts that a choice must be one of."""

    message: Any
    bad: str = ""
    choices: list[str] = field(default_factory=list)

    @property
    def sampling(self) -> pb.SamplingParams:
        """Of a request to generate."""
        sampling: pb.SamplingParams = self.message.sampling
        return sampling


Spoil = Callable[[Draft, Random], None]
"""Makes a good message one that must be refused."""


def _number(name: str, *values: float) -> Spoil:
    def spoil(draft: Draft, random: Random) -> None:
        setattr(draft.sampling, name, random.choice(values))

    return spoil


def _no_prompt(draft: Draft, random: Random) -> None:
    draft.message.ClearField("prompt")


def _empty_prompt(draft: Draft, random: Random) -> None:
    if random.random() < 0.5:
        draft.message.prompt.text = ""
    else:
        draft.message.prompt.token_ids.Clear()
        draft.message.prompt.token_ids.SetInParent()


def _unknown_token(draft: Draft, random: Random) -> None:
    draft.message.prompt.token_ids.ids.append(HUGE)


def _long_prompt(draft: Draft, random: Random) -> None:
    draft.message.prompt.token_ids.ids[:] = [1] * 100_000


def _lone_surrogate(draft: Draft, random: Random) -> None:
    if random.random() < 0.5:
        draft.message.prompt.text = PLACEHOLDER
    else:
        draft.message.request_id = PLACEHOLDER


def _unknown_adapter(draft: Draft, random: Random) -> None:
    draft.message.adapter = random.choice(("nope", "../sql", "x" * 100_000, "\0", "é"))


def _unknown_model(draft: Draft, random: Random) -> None:
    draft.message.model = random.choice(("nope", "é" * 1000))


def _no_adapter_s_text(draft: Draft, random: Random) -> None:
    draft.message.adapter = PLACEHOLDER


COMMON: dict[str, Spoil] = {
    "no prompt": _no_prompt,
    "an empty prompt": _empty_prompt,
    "a token that is none": _unknown_token,
    "a prompt far too long": _long_prompt,
    "a text that is no UTF-8": _lone_surrogate,
    "an adapter's name that is no UTF-8": _no_adapter_s_text,
    "an unknown adapter": _unknown_adapter,
    "an unknown model": _unknown_model,
}


def _beams(**fields: Sequence[Any]) -> Spoil:
    def spoil(draft: Draft, random: Random) -> None:
        for name in ("best_of", "temperature", "top_p", "frequency_penalty"):
            draft.sampling.ClearField(name)
        draft.sampling.n = 1
        search = draft.sampling.beam_search
        search.Clear()
        search.width = 2
        for name, values in fields.items():
            setattr(search, name, random.choice(values))

    return spoil


def _beams_beside(name: str, value: float) -> Spoil:
    def spoil(draft: Draft, random: Random) -> None:
        _beams()(draft, random)
        setattr(draft.sampling, name, value)

    return spoil


def _too_few_of(draft: Draft, random: Random) -> None:
    draft.sampling.ClearField("beam_search")
    draft.sampling.n, draft.sampling.best_of = 3, random.choice((0, 1, 2))


def _bad_bias(draft: Draft, random: Random) -> None:
    draft.sampling.ClearField("beam_search")
    if random.random() < 0.3:
        draft.sampling.logit_bias.update(dict.fromkeys(range(1025), 1.0))
    else:
        draft.sampling.logit_bias[random.choice((1, HUGE))] = random.choice((*NO_NUMBER, 101.0))


def _bad_stop(draft: Draft, random: Random) -> None:
    draft.sampling.ClearField("beam_search")
    draft.sampling.stop[:] = random.choice((["a"] * 17, [""], ["x" * 1025]))


def _bad_stop_token(draft: Draft, random: Random) -> None:
    draft.sampling.stop_token_ids[:] = random.choice(([HUGE], [1] * 1025))


def _bad_form(draft: Draft, random: Random) -> None:
    name, value = random.choice(BAD_FORMS)
    setattr(draft.sampling.structured_output, name, value)


def _bad_choices(draft: Draft, random: Random) -> None:
    texts = random.choice(([], [""], ["a", ""], ["a"] * 1025, ["x" * 70_000]))
    form = draft.sampling.structured_output
    form.Clear()
    form.choice.SetInParent()
    form.choice.texts[:] = texts


def _endless_form(draft: Draft, random: Random) -> None:
    """A form ends by an end token, and none is left."""
    draft.sampling.structured_output.regex = "a+"
    draft.sampling.ignore_eos = True


def _no_form(draft: Draft, random: Random) -> None:
    draft.sampling.structured_output.Clear()
    draft.sampling.structured_output.SetInParent()


SAMPLING: dict[str, Spoil] = {
    "temperature": _number("temperature", *NO_NUMBER, -1.0, 100.5),
    "top_p": _number("top_p", *NO_NUMBER, -0.1, 1.1),
    "min_p": _number("min_p", *NO_NUMBER, -0.1, 1.1),
    "repetition_penalty": _number("repetition_penalty", *NO_NUMBER, 0.0, -1.0, 11.0),
    "presence_penalty": _number("presence_penalty", *NO_NUMBER, 2.5),
    "frequency_penalty": _number("frequency_penalty", *NO_NUMBER, -2.5),
    "n": _number("n", 0, 1000, HUGE),
    "best_of": _number("best_of", 1000, HUGE),
    "best_of below n": _too_few_of,
    "max_tokens": _number("max_tokens", 0, 1_000_000, HUGE),
    "min_tokens": _number("min_tokens", 1_000_000, HUGE),
    "logprobs": _number("logprobs", 21, HUGE),
    "prompt_logprobs": _number("prompt_logprobs", 21, HUGE),
    "max_draft_tokens": _number("max_draft_tokens", 65, HUGE),
    "width": _beams(width=(0, 1, 1000, HUGE)),
    "length_penalty": _beams(length_penalty=(*NO_NUMBER, 11.0, -1e308)),
    "early_stopping": _beams(early_stopping=(9, -1)),
    "beams beside a penalty": _beams_beside("frequency_penalty", 1.0),
    "beams beside top_p": _beams_beside("top_p", 0.5),
    "beams beside best_of": _beams_beside("best_of", 2),
    "beams beside heat": _beams_beside("temperature", 0.5),
    "logit_bias": _bad_bias,
    "stop": _bad_stop,
    "stop_token_ids": _bad_stop_token,
    "a bad form": _bad_form,
    "bad choices": _bad_choices,
    "no form": _no_form,
    "a form beside ignore_eos": _endless_form,
}


def _continuations(*texts: str, ids: Sequence[int] | None = None, count: int = 1) -> Spoil:
    def spoil(draft: Draft, random: Random) -> None:
        del draft.message.continuations[:]
        for _ in range(count):
            for text in texts:
                draft.message.continuations.add(text=text)
            if ids is not None:
                draft.message.continuations.add().token_ids.ids[:] = ids

    return spoil


def _formless_continuation(draft: Draft, random: Random) -> None:
    draft.message.continuations.add()


def _too_many_likeliest(draft: Draft, random: Random) -> None:
    draft.message.logprobs = random.choice((21, HUGE))


SCORING: dict[str, Spoil] = {
    "no continuation": _continuations(),
    "10,000 continuations": _continuations("a", count=10_000),
    "an empty continuation": _continuations("a", ""),
    "a continuation without tokens": _continuations(ids=()),
    "a continuation's token that is none": _continuations(ids=(1, HUGE)),
    "a continuation far too long": _continuations(ids=(1,) * 5000),
    "too many tokens": _continuations(ids=(1,) * 100, count=1000),
    "a continuation of no UTF-8": _continuations(PLACEHOLDER),
    "a continuation of no form": _formless_continuation,
    "logprobs": _too_many_likeliest,
}
