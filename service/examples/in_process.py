"""The engine in this process: a list of prompts, batched together, on a small KV cache.

python -m pageturner.service.examples.in_process [MODEL]
"""

from __future__ import annotations

import sys

from pageturner.service.client import TokenEvent
from pageturner.service.llm import LLM

PROMPTS = ["Once upon a time", "The sea is", "def fibonacci(n):", "In the year 1969"]


def main(model: str = "embedded") -> None:
    # What a section of the configuration may hold, as a mapping: `pageturner config` lists it.
    with LLM(model, cache={"num_blocks": 96}, policies={"victim": "last-arrived"}) as llm:
        for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, max_tokens=16, seed=1), strict=True):
            print(f"{prompt!r} -> {answer.text!r}")

        for event in llm.stream([{"role": "user", "content": "Say hi."}], max_tokens=16):
            if isinstance(event, TokenEvent):
                print(event.text, end="", flush=True)

        load = llm.load()
        print(
            f"\n{load.num_steps_total} steps, {load.num_prefix_hit_tokens_total} prompt tokens from the cache"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
