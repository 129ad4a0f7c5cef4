"""Requests for searches, samples, forms, adapters and scores, some of which must be refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from chaos.spoiling import COMMON, LONE_SURROGATE, PLACEHOLDER, SAMPLING, SCORING, Draft, Spoil
from pageturner.v1 import generation_pb2 as pb

ADAPTER = "sql"
"""That the server of the site has loaded."""

MOST_TOKENS = 24
"""Of a choice, so that many requests end in a second or two."""

BAD_SHARE = 0.4
"""Of requests that hold one thing that must be refused."""

FORMS: Sequence[tuple[str, Any]] = (
    ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    ("json_schema", json.dumps({"enum": [f"word {number}" for number in range(200)]})),
    ("json_schema", '{"$defs": {"t": {"type": "array", "items": {"$ref": "#"}}}, "$ref": "#/$defs/t"}'),
    ("json_schema", "true"),
    ("json_object", True),
    ("regex", "(a|b)*c?"),
    ("regex", "é{1,9}|🙂+"),
    ("grammar", 'start: "(" start ")" | "x"'),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """method: of GenerationService. body: the message's bytes. bad: what must be refused, or nothing.

    choices: the texts that a choice may have, where it must be one of a few. num_choices: of an answer; of
    Score, the continuations.
    """

    method: str
    body: bytes
    bad: str = ""
    choices: frozenset[str] = frozenset()
    num_choices: int = 0
    is_of_a_form: bool = False


def asked(request_id: str, random: Random) -> Asked:
    """One of all kinds. Of those that hold something bad, one thing each."""
    if random.random() < 0.3:
        return _scoring(request_id, random)
    method = random.choice(("Generate", "GenerateStream"))
    kind = pb.GenerateRequest if method == "Generate" else pb.GenerateStreamRequest
    draft = Draft(kind(request_id=request_id, prompt=_prompt(random)))
    draft.message.adapter = random.choice(("", "", ADAPTER))
    _fill(draft, random)
    _spoil_at_times(draft, COMMON | SAMPLING, random)
    return _sealed(method, draft, draft.sampling.n or 1)


def _scoring(request_id: str, random: Random) -> Asked:
    draft = Draft(pb.ScoreRequest(request_id=request_id, prompt=_prompt(random)))
    draft.message.adapter = random.choice(("", "", ADAPTER))
    for _ in range(random.choice((1, 2, 5, 40))):
        draft.message.continuations.add().token_ids.ids[:] = _tokens(random, random.choice((1, 2, 9)))
    if random.random() < 0.2:
        draft.message.continuations.add(text=random.choice((" é", " 🙂", "\0", "a" * 40)))
    draft.message.logprobs = random.choice((0, 1, 20))
    _spoil_at_times(draft, COMMON | SCORING, random)
    return _sealed("Score", draft, len(draft.message.continuations))


def _spoil_at_times(draft: Draft, ways: dict[str, Spoil], random: Random) -> None:
    if random.random() < BAD_SHARE:
        draft.bad = random.choice(sorted(ways))
        ways[draft.bad](draft, random)


def _sealed(method: str, draft: Draft, num_choices: int) -> Asked:
    body = draft.message.SerializeToString().replace(PLACEHOLDER.encode(), LONE_SURROGATE)
    is_formed = method != "Score" and draft.sampling.HasField("structured_output")
    return Asked(method, body, draft.bad, frozenset(draft.choices), num_choices, is_formed)


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(1, 400) for _ in range(count)]


def _prompt(random: Random) -> pb.Prompt:
    shared = list(range(1, 41))
    ids = shared[: random.choice((0, 15, 16, 40))] + _tokens(random, random.choice((1, 3, 30)))
    return pb.Prompt(token_ids=pb.TokenIds(ids=ids))


def _fill(draft: Draft, random: Random) -> None:
    """Sampling parameters that go together."""
    sampling = draft.sampling
    sampling.max_tokens = random.randint(1, MOST_TOKENS)
    sampling.seed = random.randrange(1 << 63)
    sampling.ignore_eos = random.random() < 0.3
    sampling.n = random.choice((1, 1, 2, 4))
    if random.random() < 0.4:
        sampling.logprobs = random.choice((0, 1, 20))
    if random.random() < 0.3:
        sampling.prompt_logprobs = random.choice((0, 1, 20))
    if random.random() < 0.3:
        sampling.max_draft_tokens = random.choice((0, 1, 64))
    way = random.choice(("beams", "best", "draw"))
    if way == "beams":
        sampling.beam_search.width = random.choice((2, 3, 5)) + sampling.n - 1
        sampling.beam_search.length_penalty = random.choice((-10.0, 0.0, 1.0, 10.0))
        sampling.beam_search.early_stopping = random.choice((0, 1, 2, 3))  # type: ignore[assignment] # any is
    else:
        if way == "best":
            sampling.best_of = sampling.n + random.choice((0, 1, 3))
        sampling.temperature = random.choice((0.0, 1.0, 100.0))
        sampling.top_p = random.choice((0.0, 0.5, 1.0))
        sampling.frequency_penalty = random.choice((-2.0, 0.0, 2.0))
    if sampling.ignore_eos:
        return
    if random.random() < 0.4:
        name, value = random.choice(FORMS)
        setattr(sampling.structured_output, name, value)
    elif random.random() < 0.4:
        draft.choices = random.choice((["yes", "no"], ["a", "ab", "abc"], ["é", "🙂"]))
        sampling.structured_output.choice.texts[:] = draft.choices
