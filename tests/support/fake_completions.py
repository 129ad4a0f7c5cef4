"""A server of OpenAI's completions that generates nothing, in this process or as OpenVINO in another."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, cast

Pieces = Callable[[dict[str, Any]], Iterable[bytes]]
"""What is written, each piece by itself, for the body of a request: the head of the answer too."""

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def event(*token_ids: int, **more: object) -> bytes:
    return b"data: %s\n\n" % json.dumps({"choices": [{"token_ids": list(token_ids)}], **more}).encode()


def until_closed(*events: bytes) -> list[bytes]:
    """An answer whose end is that of the connection."""
    return [SSE + b"\r\n", *events, b"data: [DONE]\n\n"]


def chunked(*events: bytes, cut: int) -> list[bytes]:
    """The same in chunks of `cut` bytes, which know nothing of lines."""
    body = b"".join((*events, b"data: [DONE]\n\n"))
    chunks = [body[at : at + cut] for at in range(0, len(body), cut)]
    framed = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    return [SSE + b"Transfer-Encoding: chunked\r\n\r\n", *framed, b"0\r\n\r\n"]


@asynccontextmanager
async def serve_completions(pieces: Pieces) -> AsyncIterator[str]:
    """Its address; each answer is what `pieces` makes of the request."""
    answering: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(cast("asyncio.Task[None]", asyncio.current_task()))
        with closing(writer), suppress(ConnectionError, EOFError):  # a client may go away
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length:")[2].split()[0])
            for piece in pieces(json.loads(await reader.readexactly(length))):
                writer.write(piece)
                await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
        await asyncio.gather(*answering)
        await asyncio.sleep(0)  # in which their connections are lost


_FAKES = {
    "numpy": "int64 = int\ndef array(values, dtype):\n    return values\n",
    "openvino": "def Tensor(values):\n    return values\n",
    # A token a step and request; the pipeline cannot be built from a model named `broken`.
    "openvino_genai": """
import enum, types
class GenerationFinishReason(enum.Enum):
    NONE = 0
    LENGTH = 1
class GenerationConfig: pass
class SchedulerConfig:
    max_num_seqs = 256
class Handle:
    def __init__(self, prompt, config):
        self.left, self.unread = config.max_new_tokens, []
        assert config.ignore_eos and config.min_new_tokens == config.max_new_tokens and len(prompt) == 1
    def can_read(self):
        return bool(self.unread)
    def read(self):
        return {0: self.unread.pop(0)}
class ContinuousBatchingPipeline:
    def __init__(self, model, scheduling, device):
        if model == "broken":
            raise RuntimeError("no such model")
        self.handles = []
    def add_request(self, number, prompt, config):
        self.handles.append(Handle(prompt, config))
        return self.handles[-1]
    def step(self):
        for handle in self.handles:
            handle.left -= 1
            reason = GenerationFinishReason.NONE if handle.left else GenerationFinishReason.LENGTH
            handle.unread.append(types.SimpleNamespace(generated_ids=[7], finish_reason=reason))
        self.handles = [handle for handle in self.handles if handle.left]
""",
}


def fake_openvino_python(folder: Path) -> Path:
    """A Python in which OpenVINO is a fake: the real server beside it serves from it."""
    for name, source in _FAKES.items():
        (folder / f"{name}.py").write_text(source)
    python = folder / "python"
    # Drops -I, by which it would not find the fakes.
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={folder} exec {sys.executable} -P "$@"\n')
    python.chmod(0o755)
    return python
