"""OpenVINO GenAI's pipeline as a server: `python openvino_server.py MODEL PORT SEQUENCES`, in its own Python.

Speaks as much of OpenAI's completions as the comparison asks for, token ids in and out; no text is made,
which favours it. One thread steps the pipeline, as in the servers that are built on it. Imports nothing of
Pageturner: it runs in an environment that has none of it.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

Deliver = Callable[["list[int] | None"], None]
"""Takes the tokens of a step, or None at the end."""


class Stepper(threading.Thread):
    """Owns the pipeline: adds what was asked for, steps while anything is unfinished, hands out tokens."""

    def __init__(self, pipeline: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self._pipeline = pipeline
        self._loop = loop
        self._asked: queue.SimpleQueue[tuple[list[int], int, Deliver]] = queue.SimpleQueue()
        self._running: list[tuple[Any, Deliver]] = []
        self._num_added = 0

    def ask(self, token_ids: list[int], max_tokens: int, deliver: Deliver) -> None:
        """deliver is called on the event loop."""
        self._asked.put((token_ids, max_tokens, deliver))

    def run(self) -> None:
        while True:
            if not self._running:
                self._add(*self._asked.get())
            while not self._asked.empty():
                self._add(*self._asked.get())
            self._pipeline.step()
            told = [(deliver, *_read(handle)) for handle, deliver in self._running]
            self._running = [
                pair for pair, (_, _, is_over) in zip(self._running, told, strict=True) if not is_over
            ]
            self._loop.call_soon_threadsafe(_hand_out, told)

    def _add(self, token_ids: list[int], max_tokens: int, deliver: Deliver) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        prompt = ov.Tensor(np.array([token_ids], dtype=np.int64))
        self._running.append((self._pipeline.add_request(self._num_added, prompt, config), deliver))
        self._num_added += 1


def _read(handle: Any) -> tuple[list[int], bool]:
    """The tokens since the last time, and whether they were the last."""
    token_ids: list[int] = []
    is_over = False
    while handle.can_read():
        for output in handle.read().values():
            token_ids += output.generated_ids
            is_over = is_over or output.finish_reason != genai.GenerationFinishReason.NONE
    return token_ids, is_over


def _hand_out(told: list[tuple[Deliver, list[int], bool]]) -> None:
    for deliver, token_ids, is_over in told:
        if token_ids:
            deliver(token_ids)
        if is_over:
            deliver(None)


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
    stepper = Stepper(genai.ContinuousBatchingPipeline(model, scheduling, "CPU"), asyncio.get_running_loop())
    stepper.start()
    server = await asyncio.start_server(partial(answer, stepper), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
