"""Ask a running server, without asyncio.

pageturner serve                                        # in another terminal
python -m pageturner.service.examples.sync_client [HOST:PORT|unix:PATH]
"""

from __future__ import annotations

import sys

from pageturner.service.client import DEFAULT_TARGET, FinishedEvent, SyncClient, TokenEvent


def main(target: str = DEFAULT_TARGET) -> None:
    with SyncClient(target) as client:
        client.wait_until_serving(timeout_seconds=60)
        print(f"{client.model().name} at {target}")

        # As it comes. A conversation is a list of mappings, or of ChatMessage.
        question = [{"role": "user", "content": "Why is the sky blue?"}]
        for event in client.chat(question, max_tokens=32, temperature=0.0):
            if isinstance(event, TokenEvent):
                print(event.text, end="", flush=True)
            elif isinstance(event, FinishedEvent):
                print(f"\n{event.usage.num_output_tokens} tokens, decided by {event.policies['queue']}")

        # At once, and three of it: they share the prompt's blocks.
        answer = client.generate("Once upon a time", max_tokens=16, n=3, seed=1)
        for choice in answer.choices:
            print(f"{choice.index}: {choice.text!r} ({choice.reason.value})")


if __name__ == "__main__":
    main(*sys.argv[1:])
