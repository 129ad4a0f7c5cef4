"""An answer that outlives its server: kill the first one while it is written, and it goes on at the next.

pageturner serve --port 50051                           # in another terminal
pageturner serve --port 50052                           # in a third
python -m pageturner.service.examples.resumed_stream [HOST:PORT ...]
"""

from __future__ import annotations

import sys

from pageturner.service.client import FinishedEvent, Retried, Retry, SyncClient, TokenEvent


def tell(retried: Retried) -> None:
    what = "goes on" if retried.is_resumed else "is asked"
    print(f"\n[{type(retried.error).__name__}: {retried.target} {what} in {retried.wait_seconds:.1f} s]")


def main(*targets: str) -> None:
    # Eight attempts in a row by default; a server that is started anew may take longer.
    retry = Retry(max_attempts=20)
    with SyncClient(targets or ("localhost:50051", "localhost:50052"), retry=retry, on_retry=tell) as client:
        # With a seed or without one, the tokens are those that the first server would have sent.
        with client.stream("Once upon a time", max_tokens=400, temperature=0.8, ignore_eos=True) as events:
            for event in events:
                if isinstance(event, TokenEvent):
                    print(event.text, end="", flush=True)
                elif isinstance(event, FinishedEvent):
                    usage = event.usage
        print(f"\n{usage.num_output_tokens} tokens, {events.num_resumes} resumes")
        print(f"{usage.num_resumed_tokens} of them were brought along to the server that ended it")


if __name__ == "__main__":
    main(*sys.argv[1:])
