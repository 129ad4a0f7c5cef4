"""The engine's `StopCondition`: tokens of each sequence to text, ended by stop strings."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.core.outputs import TextDelta
from pageturner.service.core.request import NewRequest
from pageturner.service.engine.incremental_decoder import IncrementalDecoder, NoText
from pageturner.service.engine.special_stops import NO_SPECIAL_STOPS, SpecialStops
from pageturner.service.engine.stop_strings import StopMatcher
from pageturner.service.engine.tokenizer import Tokenizer


class TextOutput:
    """Implements `core.outputs.StopCondition` for one tokenizer.

    The text of a sequence is what its tokens add to the prompt's: a token may complete a character
    that the prompt began, and keeps the space that divides it from the prompt. Only a text that has a form
    completes nothing: the form begins with its first character. Stops are sought in the new text only; one
    that spells a special token is met by that token too. Without a tokenizer (a model of token ids) all text
    is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._sequences: dict[int, _Sequence] = {}

    def __len__(self) -> int:
        """Sequences started and not finished."""
        return len(self._sequences)

    def start(self, seq_id: int, request: NewRequest) -> None:
        """Begin a sequence, with the stops of its request."""
        assert seq_id not in self._sequences, f"sequence {seq_id} was started twice"
        params = request.params
        decoder: IncrementalDecoder = NoText()
        special = NO_SPECIAL_STOPS
        if self._tokenizer is not None:
            decoder = self._tokenizer.incremental_decoder(
                request.prompt_token_ids, begins_anew=params.structured_output is not None
            )
            special = SpecialStops.of(params.stop, self._tokenizer.controls)
        matcher = special.matcher(params.stop, include_stop=params.include_stop)
        is_plain = not params.stop
        self._sequences[seq_id] = _Sequence(decoder, matcher, special, params.include_stop, is_plain)

    def append(self, seq_id: int, token_id: int, *, may_stop: bool, is_stop_token: bool) -> TextDelta:
        """The text that this token adds, and the stop string that it completes, if any."""
        sequence = self._sequences[seq_id]
        if sequence.is_plain and not is_stop_token:
            return TextDelta(sequence.decoder.append(token_id))
        if is_stop_token and not sequence.include_stop:
            return TextDelta("")
        text = sequence.decoder.append(token_id) + sequence.special.stand_ins.get(token_id, "")
        delta = sequence.matcher.feed(text, may_stop=may_stop)
        return sequence.special.shown(delta, include_stop=sequence.include_stop)

    def finish(self, seq_id: int) -> str:
        """What was withheld. A character that never became whole shows as U+FFFD; it completes no stop."""
        sequence = self._sequences.pop(seq_id)
        rest = sequence.matcher.feed(sequence.decoder.finish(), may_stop=False).text
        return sequence.special.hide(rest + sequence.matcher.finish())


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence's way from tokens to text."""

    decoder: IncrementalDecoder
    matcher: StopMatcher
    special: SpecialStops
    include_stop: bool
    is_plain: bool
    """Without stop strings: text is shown as it comes."""
