"""What has come of a streamed answer so far, and the request that asks for the rest. Sends nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pageturner.service.client.from_wire import from_message
from pageturner.service.core.outputs import ChoiceFinishedEvent, FinishedEvent, ScoredTokensEvent, TokenEvent
from pageturner.service.engine.api import AcceptedEvent, StreamEvent
from pageturner.v1 import generation_pb2


@dataclass(slots=True)
class _Received:
    """Of one choice."""

    token_ids: list[int] = field(default_factory=list)
    num_characters: int = 0
    is_finished: bool = False
    sum_of_logprobs: float = 0.0


class PartialAnswer:
    """Takes the messages of one stream after another, and gives the events of an answer that never broke.

    request: as the caller stated it, who may have a part of the answer already (`resume`). allow_inexact: the
    rest may be asked for where other tokens could come than those that would have.
    """

    def __init__(self, request: generation_pb2.GenerateStreamRequest, *, allow_inexact: bool = False) -> None:
        self._request = request
        self._allow_inexact = allow_inexact or request.resume.allow_inexact
        self._accepted: AcceptedEvent | None = None
        self._received: list[_Received] = []
        # How much text the caller has of tokens alone is the tokenizer's to say, and is not known here.
        self._knows_text = all(choice.HasField("text_characters") for choice in request.resume.choices)
        self._num_scored = 1  # of the prompt, its first token included, which has no score
        self.num_accepted = 0
        """How often a server has taken the request, or what was missing."""

    @property
    def request_id(self) -> str:
        """The id in force; empty until a server has accepted the request, if its caller named none."""
        return self._request.request_id if self._accepted is None else self._accepted.request_id

    @property
    def has_begun(self) -> bool:
        """Whether a server has accepted the request."""
        return self._accepted is not None

    @property
    def num_resumes(self) -> int:
        """How often the answer broke off and went on."""
        return max(0, self.num_accepted - 1)

    @property
    def can_be_resumed(self) -> bool:
        """Whether the rest may be asked for: nothing of it has come yet, or a server said how to go on."""
        accepted = self._accepted
        if accepted is None:
            return True
        is_promised = accepted.is_exact or self._allow_inexact
        return bool(accepted.fingerprint) and is_promised and self._knows_text

    def take(self, message: generation_pb2.GenerateStreamResponse) -> StreamEvent | None:
        """The next event; None for one that the caller has had, or that this client does not know."""
        event = from_message(message)
        match event:
            case AcceptedEvent():
                self.num_accepted += 1
                if self._accepted is not None:
                    return None
                self._accepted = event
                self._received = self._known() or [
                    _Received() for _ in range(max(1, self._request.sampling.n))
                ]
            case TokenEvent() if self._received:
                choice = self._received[event.index]
                choice.token_ids.extend(token.token_id for token in event.tokens)
                choice.num_characters += len(event.text)
                for token in event.tokens:
                    choice.sum_of_logprobs += token.logprob or 0.0
            case ScoredTokensEvent():
                # Of an answer that broke off before its first token all of them come once more.
                tokens = event.tokens[max(0, self._num_scored - event.start) :]
                start, self._num_scored = self._num_scored, self._num_scored + len(tokens)
                return replace(event, start=start, tokens=tokens) if tokens else None
            case ChoiceFinishedEvent() if self._received:
                choice = self._received[event.index]
                choice.is_finished = True
                if self.num_resumes and self._request.sampling.HasField("logprobs"):
                    # A server that goes on with an answer does not know what came before.
                    event = replace(event, cumulative_logprob=choice.sum_of_logprobs)
            case FinishedEvent():
                pass
        return event

    def _known(self) -> list[_Received]:
        """What the caller had of each choice before."""
        return [
            _Received(list(choice.token_ids), choice.text_characters, choice.finished)
            for choice in self._request.resume.choices
        ]

    def next_request(self) -> generation_pb2.GenerateStreamRequest:
        """For the whole answer while nothing of it has come, then for what is missing."""
        accepted = self._accepted
        if accepted is None:
            return self._request
        request = generation_pb2.GenerateStreamRequest()
        request.CopyFrom(self._request)
        request.request_id = accepted.request_id
        request.resume.CopyFrom(
            generation_pb2.Resume(
                seed=accepted.seed,
                fingerprint=accepted.fingerprint,
                max_tokens=accepted.max_tokens,
                allow_inexact=self._allow_inexact,
                choices=[
                    generation_pb2.ReceivedChoice(
                        token_ids=choice.token_ids,
                        text_characters=choice.num_characters,
                        finished=choice.is_finished,
                    )
                    for choice in self._received
                ],
            )
        )
        return request
