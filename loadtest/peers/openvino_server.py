"""OpenVINO GenAI's pipeline as a server: `python openvino_server.py MODEL PORT SEQUENCES`, in its own Python.

Speaks as much of OpenAI's completions as the comparison asks for, token ids in and out; no text is made,
which favours it. Imports nothing of
Pageturner: it runs in an environment that has none of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

Deliver = Callable[["list[int] | None"], None]
"""Takes the tokens of a step, or None at the end."""

_TURNS = 6
"""Of the event loop after each step: what a new connection takes to be accepted, read and asked."""


class Stepper:
    """Owns the pipeline: adds what was asked for, steps while anything is unfinished, hands out tokens."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._running: list[tuple[Any, Deliver]] = []
        self._asked = asyncio.Event()
        self._num_added = 0

    def ask(self, token_ids: list[int], max_tokens: int, deliver: Deliver) -> None:
        """Have them continued from the next step on; deliver is called after each."""
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        prompt = ov.Tensor(np.array([token_ids], dtype=np.int64))
        self._running.append((self._pipeline.add_request(self._num_added, prompt, config), deliver))
        self._num_added += 1
        self._asked.set()

    async def run(self) -> None:
        """Step for ever, in turns with the connections: a step keeps the interpreter's lock, so that from a
        thread of its own it would leave them one operation a step."""
        while True:
            if not self._running:
                self._asked.clear()
                await self._asked.wait()
            self._pipeline.step()
            self._running = [
                (handle, deliver) for handle, deliver in self._running if _deliver(handle, deliver)
            ]
            for _ in range(_TURNS):
                await asyncio.sleep(0)


def _deliver(handle: Any, deliver: Deliver) -> bool:
    """Hand out the tokens since the last time; whether there are more to come."""
    while handle.can_read():
        for output in handle.read().values():
            if output.generated_ids:
                deliver(output.generated_ids)
            if output.finish_reason != genai.GenerationFinishReason.NONE:
                deliver(None)
                return False
    return True


async def answer(stepper: Stepper, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One POST and its stream of events; the connection's end is the body's."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = next(int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length:"))
    asked = json.loads(await reader.readexactly(length))
    tokens: asyncio.Queue[list[int] | None] = asyncio.Queue()
    stepper.ask(asked["prompt"], asked["max_tokens"], tokens.put_nowait)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    while (token_ids := await tokens.get()) is not None:
        writer.write(b"data: %s\n\n" % json.dumps({"choices": [{"token_ids": token_ids}]}).encode())
        await writer.drain()
    writer.write(b"data: [DONE]\n\n")
    writer.close()


async def serve(model: str, port: int, num_sequences: int) -> None:
    """Load the model, then serve until the process is ended."""
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_seqs = max(scheduling.max_num_seqs, num_sequences)
    stepper = Stepper(genai.ContinuousBatchingPipeline(model, scheduling, "CPU"))
    async with await asyncio.start_server(partial(answer, stepper), "127.0.0.1", port):
        await stepper.run()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
