"""`pageturner bench beams`: what a beam search costs beside as many samples, and beside one greedy answer.

One server, in turns, the same prompts and as many tokens of each answer. A search of width w computes w rows
a token as w samples do; what it takes beyond them is the choice among all beams' candidates, tables forked
and freed, and blocks copied. Two more searches show what ends and forms add: one that a thousand tokens may
end, which are kept from it by min_tokens, and one whose answers are bound to a form.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pageturner.service.bench.beam_sharing import INSTRUCTIONS
from pageturner.service.client import BeamSearch, Client, OutputForm, StructuredOutput
from pageturner.service.client.server_process import running_server

NUM_STOPS = 1024
SENTENCES = StructuredOutput(OutputForm.REGEX, "([A-Z][a-z ,]+[.] )+")


@dataclass(frozen=True, slots=True)
class BeamLoad:
    """num_requests at once, each of output_tokens, by a search or samples of this width."""

    num_requests: int
    width: int
    output_tokens: int

    def contenders(self) -> dict[str, dict[str, Any]]:
        """Options of each kind of request, by name; the first two are what searches are compared with."""
        common = {"max_tokens": self.output_tokens, "min_tokens": self.output_tokens}
        search = common | {"beam_search": BeamSearch(self.width)}
        return {
            "one": common | {"temperature": 0.0, "ignore_eos": True},
            "samples": common | {"n": self.width, "temperature": 1.0, "seed": 1, "ignore_eos": True},
            "beams": search | {"ignore_eos": True},
            "stops": search | {"ignore_eos": True, "stop_token_ids": range(NUM_STOPS)},
            "form": search | {"structured_output": SENTENCES},
        }

    def prompts(self) -> list[str]:
        """As many, of Alpaca's kind."""
        texts = [text for text, _ in INSTRUCTIONS]
        return [
            f"{number}. {texts[number % len(texts)]}" if number >= len(texts) else texts[number]
            for number in range(self.num_requests)
        ]


@dataclass(frozen=True, slots=True)
class BeamContender:
    """rows: sequences of each request. seconds: of each round."""

    name: str
    rows: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class BeamResult:
    """saved: the share of the blocks of unshared tables that searches do without. num_copies: blocks copied
    for each token of each search."""

    load: BeamLoad
    contenders: tuple[BeamContender, ...]
    saved: float
    num_copies: float

    def rate(self, contender: BeamContender) -> float:
        """Tokens that it computes a second, those of answers that lose included."""
        return contender.rows * self.load.num_requests * self.load.output_tokens / contender.median

    def ratio(self, name: str, other: str) -> float:
        """Tokens/s of one over those of the other."""
        rates = {contender.name: self.rate(contender) for contender in self.contenders}
        return rates[name] / rates[other]


def measure_beams(
    load: BeamLoad, rounds: int, arguments: Sequence[str], say: Callable[[str], None]
) -> BeamResult:
    """arguments: flags of the server. Raises PageturnerError if a request fails."""
    with running_server(arguments) as server:
        return asyncio.run(_measure(server.target, load, rounds, say))


async def _measure(target: str, load: BeamLoad, rounds: int, say: Callable[[str], None]) -> BeamResult:
    contenders = load.contenders()
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    async with Client(target) as client:
        for options in contenders.values():
            await _answers(client, load, options)  # prompts are cached then, and the form is compiled
        before = await client.load()
        await _answers(client, load, contenders["beams"])
        after = await client.load()
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                started = time.perf_counter()
                await _answers(client, load, contenders[name])
                seconds[name].append(time.perf_counter() - started)
            say(f"round {number + 1}: {', '.join(f'{name} {seconds[name][-1]:.2f} s' for name in names)}")
    entries = after.num_beam_table_entries_total - before.num_beam_table_entries_total
    blocks = after.num_beam_blocks_total - before.num_beam_blocks_total
    copies = after.num_copied_blocks_total - before.num_copied_blocks_total
    return BeamResult(
        load,
        tuple(
            BeamContender(name, 1 if name == "one" else load.width, tuple(each))
            for name, each in seconds.items()
        ),
        1 - blocks / entries,
        copies / (load.num_requests * load.output_tokens),
    )


async def _answers(client: Client, load: BeamLoad, options: dict[str, Any]) -> None:
    await asyncio.gather(*(client.generate(prompt, **options) for prompt in load.prompts()))
