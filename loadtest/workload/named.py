"""Workloads by name, each a stated shape. Tokens are those of no particular tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.loadtest.workload.lengths import Distribution, Lengths, Lognormal, Quantiles
from pageturner.loadtest.workload.load import ONE_TURN, SystemPrompts

_SHARES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class NamedWorkload:
    """Fields of LoadtestWorkload by their names, and what they stand for. correlation: of the normal numbers
    of the copula, not of the lengths."""

    summary: str
    prompt_lengths: Distribution
    output_lengths: Distribution
    correlation: float = 0.0
    turns: Distribution = ONE_TURN
    think_seconds: float = 0.0
    system_prompts: SystemPrompts | None = None


NAMED: dict[str, NamedWorkload] = {
    "random": NamedWorkload("prompts and answers of one length", Lengths(128, 128), Lengths(128, 128)),
    # ShareGPT, as `vllm bench serve` filters it: 4 to 1,023 prompt tokens. Means 228 and 215 (the data: 235
    # and 215); the correlation of the logarithms is -0.46. Its conversations have 2 2 2 3 6 10 14 17 26
    # messages at the inner shares, and so half as many requests.
    "chat": NamedWorkload(
        "ShareGPT's lengths and turns; long questions get short answers",
        Quantiles(_SHARES, (4, 5, 8, 10, 20, 106, 388, 657, 809, 958, 1023)),
        Quantiles(_SHARES, (4, 4, 8, 11, 27, 138, 339, 531, 697, 931, 1500)),
        correlation=-0.484,
        turns=Quantiles(_SHARES, (1, 1, 1, 1, 2, 3, 5, 7, 9, 13, 20)),
        think_seconds=2.0,
    ),
    "summarise": NamedWorkload(
        "an article in, a paragraph out", Lognormal(1500, 0.5), Lognormal(120, 0.3), correlation=0.3
    ),
    # The medians of a code completion service, 1,500 and 13 tokens: Patel et al., Splitwise, 2024, figure 3.
    "code": NamedWorkload(
        "completion in an editor: much context, a few tokens", Lognormal(1500, 0.8), Lognormal(13, 1.0)
    ),
    "agents": NamedWorkload(
        "loops of tool calls: long instructions, short turns, results at once",
        Lognormal(180, 0.9),
        Lognormal(60, 0.6),
        turns=Lengths(4, 12),
        think_seconds=0.3,
        system_prompts=SystemPrompts(4, Lengths(1500, 2500)),
    ),
    "shared-prefix": NamedWorkload(
        "one long system prompt before short questions",
        Lognormal(64, 0.5),
        Lognormal(64, 0.5),
        system_prompts=SystemPrompts(1, Lengths(1024, 1024)),
    ),
    "long-context": NamedWorkload(
        "questions about long documents", Lognormal(6000, 0.3), Lognormal(256, 0.4)
    ),
}
