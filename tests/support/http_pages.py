"""HTTP as a scraper, a probe or somebody hostile speaks it: a socket, bytes, what came back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Page:
    """An answer, its header names in lower case."""

    status: int
    headers: dict[str, str]
    body: str


async def ask(port: int, data: bytes) -> bytes:
    """Everything that the server says to these bytes until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        return await reader.read()
    finally:
        writer.close()


async def get(port: int, target: str, *, method: str = "GET", **headers: str) -> Page:
    """One request on a connection of its own."""
    lines = [f"{method} {target} HTTP/1.1", "connection: close"]
    named = {"host": "127.0.0.1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines += [f"{name}: {value}" for name, value in named.items()]
    head, _, body = (await ask(port, "\r\n".join([*lines, "", ""]).encode())).partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    pairs = (field.partition(": ") for field in fields)
    return Page(int(status.split()[1]), {name.lower(): value for name, _, value in pairs}, body.decode())
