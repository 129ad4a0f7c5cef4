"""The chains of blocks of the live choices: what a record tells of prompts and of a step's tokens."""

from __future__ import annotations

from collections.abc import Iterable

from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishReason,
    SampledSequence,
    SchedulerOutput,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest, Request, Sequence
from pageturner.service.flight.pseudonyms import Chain, Namer
from pageturner.service.flight.recorded_error import error_name
from pageturner.service.flight.records import RowResult


class LiveChains:
    """requests: those that live already."""

    def __init__(self, namer: Namer, requests: Iterable[Request]) -> None:
        self._namer = namer
        self._chains = {request.request_id: self._chains_of(request) for request in requests}

    def prompt_chain(self, new: NewRequest) -> Chain:
        return self._namer.start(new.prompt_token_ids, adapter=new.adapter, salt=new.cache_salt)

    def add(self, new: NewRequest, prompt_chain: Chain) -> None:
        """A request was accepted: each choice continues its prompt."""
        forks = [prompt_chain.fork() for _ in range(new.params.n - 1)]
        self._chains[new.request_id] = [prompt_chain, *forks]

    def drop(self, request_id: str) -> None:
        self._chains.pop(request_id, None)

    def names_of(self, sequence: Sequence) -> tuple[int, ...]:
        """The names of all full blocks of an unfinished sequence."""
        return tuple(self._chains[sequence.request.request_id][sequence.index].names)

    def take(
        self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...], events: tuple[Event, ...]
    ) -> tuple[RowResult, ...]:
        """Continue the chains by a step's tokens; a request that ended with it is not to be dropped before.

        Returns the results that are not the common one: a token taken, no block completed, no end.
        """
        names: dict[tuple[str, int], list[int]] = {}
        stopped: set[tuple[str, int]] = set()
        num_common = 0
        chains, block_size, append = self._chains, self._namer.block_size, self._namer.append
        for event in events:
            if isinstance(event, TokenEvent):
                chain, tokens = chains[event.request_id][event.index], event.tokens
                if len(tokens) == 1 and len(chain.tail) + 1 < block_size:
                    chain.tail.append(tokens[0].token_id)
                    num_common += 1
                else:
                    names[event.request_id, event.index] = [append(chain, t.token_id) for t in tokens]
            elif isinstance(event, ChoiceFinishedEvent) and event.reason is FinishReason.STOP:
                stopped.add((event.request_id, event.index))
        if num_common == len(sampled) and not stopped:
            return ()
        choices = [(part.request_id, row.index) for part in output.scheduled for row in part.samples]
        results = []
        for row, (choice, result) in enumerate(zip(choices, sampled, strict=True)):
            completed = names.get(choice) or [0] * len(result.tokens)
            noted = RowResult(row, tuple(completed), choice in stopped, error_name(result.error))
            if noted != RowResult(row, (0,)):
                results.append(noted)
        return tuple(results)

    def _chains_of(self, request: Request) -> list[Chain]:
        """Nobody asks for those of ended choices."""
        new = request.new
        return [
            Chain(b"")
            if sequence.is_finished
            else self._namer.start(sequence.tokens, adapter=new.adapter, salt=new.cache_salt)
            for sequence in request.sequences
        ]
