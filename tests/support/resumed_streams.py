"""Streams that are cut and go on elsewhere: the whole way but for the network, on a fake model that talks.

A request is a message of the wire; it goes through `from_wire`, `InputProcessor`, the real scheduler with its
block traffic and the real text output, and comes back as messages. The client's side is its `PartialAnswer`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from pageturner.policies import registry
from pageturner.policies.interfaces import PolicySet
from pageturner.policies.views import Rates
from pageturner.service.client.partial_answer import PartialAnswer
from pageturner.service.client.values import Completion, CompletionBuilder
from pageturner.service.core.clock import ManualClock
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import (
    BlockCopies,
    ChoiceFinishedEvent,
    FinishedEvent,
    SampledSequence,
    SampledToken,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
    TokenEvent,
    TokenLogprob,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.engine.adapter_options import AdapterOptions
from pageturner.service.engine.adapter_reports import NoAdapters
from pageturner.service.engine.adapters import Adapters
from pageturner.service.engine.api import AcceptedEvent, ModelInfo, StreamEvent
from pageturner.service.engine.engine import Engine
from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.engine.input_processor import InputProcessor, as_it_began
from pageturner.service.engine.metrics import Metrics
from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.prompt_limits import InputLimits
from pageturner.service.engine.prompts import PromptReader
from pageturner.service.engine.step_computation import DirectSteps
from pageturner.service.engine.structured_outputs import NO_GRAMMARS, StructuredOutputs
from pageturner.service.engine.text_output import TextOutput
from pageturner.service.engine.thread_messages import EngineOutput, Submit, SubmitRefused
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.identity import ANONYMOUS
from pageturner.service.rpc import convert, from_wire
from pageturner.v1 import generation_pb2 as pb
from support.fake_model import FakeModel
from support.scripted import recording_logger
from support.tiny_tokenizers import byte_level_bpe

TOKENIZER = Tokenizer(byte_level_bpe())
END = 1
"""<|end|>, which ends an answer and shows no text."""
SPOKEN = (66, 67, 66, 67, 222, 338, 100, 258, 248, 224, 335, END)
"""What the model says: a, b, a space, parts of characters of two to four bytes, and now and then its end."""
MAX_MODEL_LEN = 48
POLICIES = registry.default_policies()
MODEL = ModelInfo(
    "spoken", "here", "Fake", "fake", "float32", True, 421, MAX_MODEL_LEN, 2, 1, 3, 0, (END,), False
)
FINGERPRINT = Fingerprint.of_parts({"weights": "w", "tokenizer": "t", "kernels": "fake"}, is_exact=True)


class SpokenModel(FakeModel):
    """Each token hashes what is read through the block table, and the history where penalties want it."""

    def apply(self, copies: BlockCopies) -> None:
        self.kv_cache.apply(copies)

    def forward(self, output: SchedulerOutput) -> SchedulerOutput:
        return output

    def note_sampled(self, sampled: tuple[SampledSequence, ...]) -> None:
        """Nothing: it knows what it sampled."""

    def sample(self, logits: SchedulerOutput, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        return self.compute(output)

    def _sample(self, sequence: ScheduledSequence, row: SampleRow) -> SampledSequence:
        digest = hashlib.blake2b(np.ascontiguousarray(self._read(sequence, 0, sequence.end)).tobytes())
        history = sorted(row.output_token_ids) if row.params.needs_history else ()
        digest.update(f"{row.seed}/{row.index}/{sequence.end}/{history}".encode())
        number = int.from_bytes(digest.digest()[:8], "little")
        allowed = [token_id for token_id in SPOKEN if token_id not in row.banned_token_ids]
        token = SampledToken(allowed[number % len(allowed)])
        if (count := row.params.logprobs) is not None:
            top = tuple(TokenLogprob(2 + rank, -(number % 97) / 64 - rank) for rank in range(count))
            token = SampledToken(token.token_id, -(number % 89) / 64, top)
        return SampledSequence(row.seq_id, row.epoch, (token,))


@dataclass
class SpokenService:
    """One replica, stepped by hand; nothing of it outlives the streams that it was asked for."""

    num_blocks: int = 12
    block_size: int = 4
    num_host_blocks: int = 8
    depth: int = 0
    max_num_batched_tokens: int = 12
    policies: PolicySet = POLICIES
    fingerprint: Fingerprint = FINGERPRINT

    def __post_init__(self) -> None:
        self.text = TextOutput(TOKENIZER)
        model = SpokenModel(self.num_blocks, max(1, self.num_host_blocks), self.block_size)
        self.scheduler = Scheduler(
            SchedulerOptions(
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=6,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_n=4,
            ),
            CacheOptions(self.num_blocks, self.block_size, self.num_host_blocks),
            self.policies,
            self.text,
            Rates(),
            depth=self.depth,
            hash_key=b"test",
        )
        self.engine = Engine(
            self.scheduler,
            DirectSteps(model, model, model),
            clock=ManualClock(0.0),
            options=EngineOptions(),
            metrics=Metrics(),
            logger=recording_logger()[0],
            depth=self.depth,
        )
        limits = InputLimits.of_model(MAX_MODEL_LEN, TOKENIZER.max_token_chars)
        reader = PromptReader(TOKENIZER, MODEL, 1 << 20)
        self._inputs = InputProcessor(
            reader,
            MODEL,
            limits.generation,
            4,
            Random(0),
            self.fingerprint,
            StructuredOutputs(NO_GRAMMARS, ()),
            Adapters(NoAdapters("none here"), AdapterOptions(), recording_logger()[0]),
            shares_prefixes=True,
        )
        self._limits = limits.generation

    def accepted(self, request: pb.GenerateStreamRequest) -> NewRequest:
        """What the scheduler is given. Raises what the service would refuse it with."""
        name = request.request_id or "r"
        generation = as_it_began(
            from_wire.to_generation_request(request, name, None, self._limits, ANONYMOUS)
        )
        self._inputs.check(generation)
        return self._inputs.complete(generation, name, tuple(request.prompt.token_ids.ids), 0.0)

    def streams(self, *requests: pb.GenerateStreamRequest) -> list[list[pb.GenerateStreamResponse]]:
        """Each request's messages, all answered at once. Raises what refuses the first that is refused."""
        outputs: list[EngineOutput] = []
        for request in requests:
            outputs += self.engine.apply(Submit(self.accepted(request)))
        for output in outputs:
            if isinstance(output, SubmitRefused):
                raise output.error
        while self.engine.seconds_to_next_step() is not None:
            outputs += self.engine.step()
            self.scheduler.check_integrity()
        assert not len(self.text), "a text was never finished"
        assert self.scheduler.stats().num_blocks_used == 0, "a block was never given back"
        by_id: dict[str, list[pb.GenerateStreamResponse]] = {request.request_id: [] for request in requests}
        for output in outputs:
            if isinstance(output, FinishedEvent) and output.error is not None:
                raise output.error
            assert isinstance(output, (AcceptedEvent, TokenEvent, ChoiceFinishedEvent, FinishedEvent))
            by_id[output.request_id].append(convert.from_event(output))
        return [by_id[request.request_id] for request in requests]


def taken(answer: PartialAnswer, messages: Iterable[pb.GenerateStreamResponse]) -> list[StreamEvent]:
    """The events that a caller sees of these messages."""
    return [event for message in messages if (event := answer.take(message)) is not None]


def completion(events: Sequence[StreamEvent]) -> Completion:
    """The whole answer; asserts that it is told once, in order."""
    builder, ended = CompletionBuilder(), set[int]()
    for position, event in enumerate(events):
        assert isinstance(event, AcceptedEvent) == (position == 0), "an answer begins once"
        assert isinstance(event, FinishedEvent) == (position == len(events) - 1), "an answer ends once"
        if isinstance(event, TokenEvent):
            assert event.index not in ended, "text of a choice that had ended"
            assert event.tokens or event.text, "an event that says nothing"
        elif isinstance(event, ChoiceFinishedEvent):
            assert event.index not in ended, "a choice ended twice"
            ended.add(event.index)
        builder.add(event)
    return builder.build()


def request_of(name: str, prompt: Sequence[int], **sampling: object) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(
        request_id=name,
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)),
        sampling=pb.SamplingParams(**sampling),  # type: ignore[arg-type] # fields by name
    )
