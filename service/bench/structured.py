"""`pageturner bench structured`: answers of a form beside answers of any, and what their masks cost.

One server, in turns: answers without a form, of a JSON schema and of a regular expression. Every one has the
same number of tokens, since neither form can end before. All are drawn with the same seeds at temperature 1.
Then the schema's answers are gone through once more in this process, mask by mask.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageturner.service.client import Client, Completion, OutputForm, StructuredOutput
from pageturner.service.client.server_process import running_server
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import PageturnerError
from pageturner.service.grammars.grammars import Grammars
from pageturner.service.grammars.options import GrammarOptions
from pageturner.service.model.loader import load_artifacts
from pageturner.service.model.options import ModelOptions
from pageturner.service.startup.grammars import make_grammars

SCHEMA: Mapping[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.com$"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "email", "tags"],
        "additionalProperties": False,
    },
}

FORMS: Mapping[str, StructuredOutput | None] = {
    "none": None,
    "json_schema": StructuredOutput(OutputForm.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": StructuredOutput(OutputForm.REGEX, "([A-Z][a-z ,]+[.] )+"),
}


@dataclass(frozen=True, slots=True)
class StructuredLoad:
    """num_requests at once, each answered by output_tokens."""

    num_requests: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class FormResult:
    """rates: output tokens/s of each round. wait_seconds: that steps waited for masks, of all rounds."""

    form: str
    rates: tuple[float, ...]
    wait_seconds: float

    @property
    def rate(self) -> float:
        """Their median."""
        return statistics.median(self.rates)


@dataclass(frozen=True, slots=True)
class MaskTimes:
    """Seconds in this process: of each mask of the schema's answers, tokens taken in included; of compiling
    the schema; of reading the vocabulary, which the first grammar of a server waits for."""

    masks: tuple[float, ...]
    compile_seconds: float
    vocabulary_seconds: float


@dataclass(frozen=True, slots=True)
class StructuredResult:
    load: StructuredLoad
    forms: tuple[FormResult, ...]
    times: MaskTimes

    def ratio(self, form: FormResult) -> float:
        """Tokens/s of a form over those without one."""
        return form.rate / self.forms[0].rate

    def overlapped(self, form: FormResult) -> float:
        """The share of the masks' time that no step waited for, by the mean mask of the schema."""
        num_masks = len(form.rates) * self.load.num_requests * self.load.output_tokens
        return max(0.0, 1 - form.wait_seconds / (num_masks * statistics.mean(self.times.masks)))


def measure_structured(
    load: StructuredLoad,
    rounds: int,
    model: ModelOptions,
    cache_dir: Path,
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> StructuredResult:
    """arguments: flags of the server. Raises PageturnerError if a request fails."""
    rates: dict[str, list[float]] = {name: [] for name in FORMS}
    waits = dict.fromkeys(FORMS, 0.0)

    async def measure(target: str) -> list[Completion]:
        answers: dict[str, list[Completion]] = {}
        async with Client(target) as client:
            for form in FORMS.values():
                await _answers(client, load, form)  # the first compiles
            for number in range(rounds):
                for name, form in (list(FORMS.items()) * 2)[number % 3 :][:3]:
                    before = (await client.load()).mask_wait_seconds_total
                    started = time.perf_counter()
                    answers[name] = await _answers(client, load, form)
                    rates[name].append(
                        load.num_requests * load.output_tokens / (time.perf_counter() - started)
                    )
                    waits[name] += (await client.load()).mask_wait_seconds_total - before
                say(f"round {number + 1}: {', '.join(f'{name} {rates[name][-1]:.0f}' for name in FORMS)}")
        return answers["json_schema"]

    with running_server(arguments) as server:
        answers = asyncio.run(measure(server.target))
    forms = tuple(FormResult(name, tuple(rates[name]), waits[name]) for name in FORMS)
    return StructuredResult(load, forms, _mask_times(answers, model, cache_dir))


async def _answers(client: Client, load: StructuredLoad, form: StructuredOutput | None) -> list[Completion]:
    options: dict[str, Any] = {"max_tokens": load.output_tokens, "temperature": 1.0}
    # Without a form nothing else holds an end token back.
    options |= {"ignore_eos": True} if form is None else {"structured_output": form}
    if form is not None and form.form is OutputForm.REGEX:
        options["min_tokens"] = load.output_tokens
    return await asyncio.gather(
        *(
            client.generate(f"List {number} people as JSON:", seed=number, **options)
            for number in range(load.num_requests)
        )
    )


def _mask_times(answers: Sequence[Completion], model: ModelOptions, cache_dir: Path) -> MaskTimes:
    artifacts = load_artifacts(model, cache_dir)
    if artifacts.tokenizer is None:
        raise PageturnerError("the model has no tokenizer, hence no text that could have a form")
    tokenizer = Tokenizer(artifacts.tokenizer)
    vocab_size = tokenizer.max_id + 1
    began = time.perf_counter()
    grammars = make_grammars(GrammarOptions(), tokenizer, vocab_size)
    assert isinstance(grammars, Grammars), "the model has a tokenizer, and this server llguidance"
    grammars.compile(StructuredOutput(OutputForm.JSON_OBJECT))
    vocabulary_seconds = time.perf_counter() - began
    form = FORMS["json_schema"]
    assert form is not None
    began = time.perf_counter()
    grammar = grammars.compile(form)
    compile_seconds = time.perf_counter() - began
    masks = []
    for answer in answers:
        place = grammar.start()
        for token in answer.choices[0].tokens:
            began = time.perf_counter()
            place.allowed()
            place.take((token.token_id,))
            masks.append(time.perf_counter() - began)
    return MaskTimes(tuple(masks), compile_seconds, vocabulary_seconds)
