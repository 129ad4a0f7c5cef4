"""A real headless Chromium, driven over its debugging pipe: pages, what they say, pictures of them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_SECONDS = 20.0

_START = """
import os, sys
reads, writes, program, *flags = sys.argv[1:]
reads, writes = os.dup(int(reads)), os.dup(int(writes))  # copies first, lest one is overwritten
os.dup2(reads, 3)
os.dup2(writes, 4)
os.set_inheritable(3, True)  # a copy onto itself is none
os.set_inheritable(4, True)
os.execv(program, [program, *flags])
"""
"""As --remote-debugging-pipe wants it: the browser reads 3 and writes 4."""


def find_browser() -> str | None:
    """The program, if there is one on this machine."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """One tab. complaints: what its console and its security policy said, uncaught errors included."""

    def __init__(self, browser: _Pipe, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []

    async def send(self, method: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol; its result."""
        return await self._browser.send(method, parameters, self._session)

    async def open(self, url: str, width: int, height: int, *, scheme: str = "dark") -> None:
        """Load a page into a window of this size."""
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.send("Emulation.setEmulatedMedia", features=[feature])
        await self.send("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page. Raises AssertionError where it throws."""
        told = await self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true. Raises AssertionError after a while."""
        end = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while not await self._holds(script):
            assert asyncio.get_running_loop().time() < end, f"never: {script}; complaints: {self.complaints}"
            await asyncio.sleep(0.05)

    async def _holds(self, script: str) -> bool:
        """Not while the page is on its way, and has no such element or no context yet."""
        try:
            return bool(await self.run(f"Boolean({script})"))
        except AssertionError:
            return False

    async def picture(self) -> bytes:
        """A PNG of all of it."""
        told = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(told["data"])


class _Pipe:
    """Messages end with a zero byte, in both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self.pages: dict[str, Page] = {}

    async def send(self, method: str, parameters: dict[str, Any], session: str = "") -> Any:
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        answer = self._answers[self._next_id] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await answer

    async def listen(self) -> None:
        """Until the browser ends."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    self._settle(message)
                elif (page := self.pages.get(message.get("sessionId", ""))) is not None:
                    page.complaints += _complaints(message)

    def _settle(self, message: dict[str, Any]) -> None:
        answer = self._answers.pop(message["id"])
        if answer.done():
            return
        if "error" in message:
            answer.set_exception(AssertionError(message["error"]))
        else:
            answer.set_result(message["result"])


def _complaints(message: dict[str, Any]) -> list[str]:
    told = message.get("params", {})
    match message["method"]:
        case "Runtime.exceptionThrown":
            return [json.dumps(told["exceptionDetails"])]
        case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
            return [json.dumps(told["args"])]
        case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
            return [told["entry"]["text"]]
    return []


@asynccontextmanager
async def browsing(program: str) -> AsyncIterator[Page]:
    """An empty tab of a browser of its own."""
    to_browser, from_parent = os.pipe()
    to_parent, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="pageturner-browser-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _START, str(to_browser), str(from_browser), program),
            "--headless",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            f"--user-data-dir={profile}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(to_browser, from_browser),
        )
        os.close(to_browser)
        os.close(from_browser)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 26)
        reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(to_parent, "rb", 0)
        )
        writing, protocol = await loop.connect_write_pipe(
            lambda: asyncio.streams.FlowControlMixin(), os.fdopen(from_parent, "wb", 0)
        )
        pipe = _Pipe(reader, asyncio.StreamWriter(writing, protocol, None, loop))
        listening = asyncio.create_task(pipe.listen())
        try:
            target = await pipe.send("Target.createTarget", {"url": "about:blank"})
            attached = await pipe.send(
                "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
            )
            page = pipe.pages[attached["sessionId"]] = Page(pipe, attached["sessionId"])
            yield page
        finally:
            with suppress(AssertionError, TimeoutError, OSError):
                await pipe.send("Browser.close", {})
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await process.wait()
            listening.cancel()
            writing.close()
            reading.close()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
