"""Has the grammars of requests compiled before they are queued, in threads beside the event loop."""

from __future__ import annotations

from pageturner.service.core.request import ResumedChoice
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.structured_output import FIELD, StructuredOutput
from pageturner.service.engine.work_queue import WorkQueue
from pageturner.service.errors import InvalidArgument, PageturnerError
from pageturner.service.grammars.compiler import CompiledGrammar
from pageturner.service.grammars.grammars import GrammarFigures, Grammars, Unavailable

NUM_THREADS = 2
"""Of which one tenant has one."""

MAX_WAITING_CHARACTERS = 1 << 22
"""Of all grammars that wait to be compiled."""

NO_FIGURES = GrammarFigures()
NO_GRAMMARS = Unavailable("this server has no grammars")


class StructuredOutputs:
    """Lives on the event loop. end_token_ids: the model's own."""

    def __init__(self, grammars: Grammars | Unavailable, end_token_ids: tuple[int, ...]) -> None:
        self._grammars = grammars
        self._end_token_ids = end_token_ids
        self._queue = WorkQueue(
            "pageturner-grammars", num_threads=NUM_THREADS, max_waiting=MAX_WAITING_CHARACTERS
        )

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidArgument for what can be refused at once."""
        if params.structured_output is None:
            return
        if isinstance(self._grammars, Unavailable):
            raise InvalidArgument(FIELD, self._grammars.reason)
        if not (params.stop_token_ids or self._end_token_ids):
            reason = "the model has no end token with which its text could end; give stop_token_ids"
            raise InvalidArgument(FIELD, reason)

    async def prepare(
        self, params: SamplingParams, resumed: tuple[ResumedChoice, ...], tenant: str
    ) -> CompiledGrammar | None:
        """The grammar of a request that `check` let through, to be held until it ends; None if it has none.

        resumed: what is known of its answer, which has to fit. Raises InvalidArgument, or QueueFull if too
        much waits to be compiled. tenant: who waits, and leaves room for others.
        """
        wanted, grammars = params.structured_output, self._grammars
        if wanted is None:
            return None
        assert isinstance(grammars, Grammars), "check refuses the others"
        found = grammars.find(wanted)
        if found is not None and not resumed:
            return found
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._end_token_ids)}
        size = wanted.num_characters + sum(len(choice.token_ids) for choice in resumed)

        def work() -> CompiledGrammar:
            grammar = found or grammars.compile(wanted)
            _check_resumed(grammar, wanted, resumed, ends)
            return grammar

        return await self._queue.run(size, work, tenant)

    @property
    def identity(self) -> str:
        """Of what decides which tokens a form allows; empty where no form is served."""
        return self._grammars.identity if isinstance(self._grammars, Grammars) else ""

    def figures(self) -> GrammarFigures:
        """Of this moment."""
        return self._grammars.figures() if isinstance(self._grammars, Grammars) else NO_FIGURES

    def fail_waiting(self, error: PageturnerError) -> None:
        """End the wait of what is not being compiled yet."""
        self._queue.fail_waiting(error)


def _check_resumed(
    grammar: CompiledGrammar, wanted: StructuredOutput, resumed: tuple[ResumedChoice, ...], ends: set[int]
) -> None:
    """Raise InvalidArgument for tokens that no answer of this form begins with."""
    for index, choice in enumerate(resumed):
        tokens = choice.token_ids[:-1] if set(choice.token_ids[-1:]) & ends else choice.token_ids
        num_fitting = grammar.start().count_fitting(tokens)
        if num_fitting < len(tokens):
            path = f"resume.choices[{index}].token_ids[{num_fitting}]"
            raise InvalidArgument(path, f"does not fit {wanted.field}")
