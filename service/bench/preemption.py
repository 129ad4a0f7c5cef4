"""`pageturner bench preemption`: a pool far too small, and the same tokens as in one that fits all requests.

One server with an ample pool writes down what every request answers; then, for each reclaim policy, a
server with a tiny pool answers the same requests at once. Where the model is batch-invariant the streams
must be equal. Elsewhere they are compared teacher-forced: up to the first difference both runs saw the
same tokens, so there both candidates must be nearly as likely, in both runs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pageturner.service.client import Client
from pageturner.service.client.server_process import running_server
from pageturner.service.core.outputs import SampledToken
from pageturner.service.errors import PageturnerError

TOLERANCE = 0.25
"""Largest difference of two log-probabilities that bfloat16 may turn around: a few times its rounding of
logits near 16, whose neighbours are 0.125 apart."""

NUM_ALTERNATIVES = 20

Stream = tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class PreemptionLoad:
    """Requests come at once; prompts are seeded token ids. temperature: 0 is greedy, which is all that can
    be compared teacher-forced."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One reclaim policy on the tiny pool, beside the ample one.

    num_compatible: streams that are equal, or part between two tokens whose log-probabilities lie within
    TOLERANCE. largest_gap: the largest such difference seen at a first difference.
    """

    reclaim: str
    num_streams: int
    num_equal: int
    num_compatible: int
    largest_gap: float
    num_swaps: int
    num_recomputes: int
    num_tail_reclaims: int
    num_blocks_left: int


def compare_policies(
    workload: PreemptionLoad,
    reclaims: Sequence[str],
    num_blocks: int,
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> tuple[Comparison, ...]:
    """arguments: further flags of every server, such as --dtype. say: told of each server, of which there is
    one more than policies. Raises PageturnerError if one fails."""
    num_ample = workload.num_requests * (2 + (workload.prompt_tokens + workload.output_tokens) // 16)
    with running_server([*arguments, f"--num-blocks={num_ample}"]) as server:
        expected, _ = asyncio.run(_answers(server.target, workload))
    say(f"an ample pool: {len(expected)} streams")
    results = []
    for reclaim in reclaims:
        flags = [*arguments, f"--num-blocks={num_blocks}", f"--reclaim-policy={reclaim}"]
        with running_server(flags) as server:
            streams, counts = asyncio.run(_answers(server.target, workload))
        gaps = [first_gap(a, b) for a, b in zip(expected, streams, strict=True)]
        results.append(
            Comparison(
                reclaim,
                num_streams=len(streams),
                num_equal=sum(gap is None for gap in gaps),
                num_compatible=sum(gap is None or gap <= TOLERANCE for gap in gaps),
                largest_gap=max((gap for gap in gaps if gap is not None), default=0.0),
                **counts,
            )
        )
        say(f"{reclaim}: {results[-1].num_equal} of {len(streams)} streams equal")
    return tuple(results)


def first_gap(one: Stream, other: Stream) -> float | None:
    """How far apart the tokens at the first difference are, in the worse of both runs; None without one."""
    for a, b in zip(one, other, strict=True):
        if a.token_id != b.token_id:
            return max(_distance(a, b.token_id), _distance(b, a.token_id))
    return None


def _distance(chosen: SampledToken, other: int) -> float:
    """|log p(chosen) - log p(other)| in the run that chose; endless if `other` is not even listed."""
    listed = {entry.token_id: entry.logprob for entry in chosen.top_logprobs}
    if chosen.logprob is None or other not in listed:
        return float("inf")
    return abs(chosen.logprob - listed[other])


async def _answers(target: str, workload: PreemptionLoad) -> tuple[list[Stream], Mapping[str, int]]:
    """Every stream's tokens, all requests sent at once, and the preemptions they saw."""
    async with Client(target) as client:
        vocab_size = (await client.models())[0].vocab_size
        rng = random.Random(workload.seed)
        prompts = [
            tuple(rng.randrange(100, vocab_size) for _ in range(workload.prompt_tokens))
            for _ in range(workload.num_requests)
        ]
        completions = await asyncio.gather(
            *(
                client.generate(
                    prompt,
                    max_tokens=workload.output_tokens,
                    ignore_eos=True,
                    temperature=workload.temperature,
                    seed=number,
                    logprobs=NUM_ALTERNATIVES,
                )
                for number, prompt in enumerate(prompts)
            )
        )
        load = await client.load()
    for completion in completions:
        num_tokens = len(completion.choices[0].tokens)
        if num_tokens != workload.output_tokens:
            raise PageturnerError(f"{completion.request_id} ended after {num_tokens} tokens")
    counts = {
        "num_swaps": sum(completion.timings.num_swaps for completion in completions),
        "num_recomputes": sum(completion.timings.num_recomputes for completion in completions),
        "num_tail_reclaims": sum(completion.timings.num_tail_reclaims for completion in completions),
        "num_blocks_left": load.num_blocks_used + load.num_host_blocks_used,
    }
    return [completion.choices[0].tokens for completion in completions], counts
