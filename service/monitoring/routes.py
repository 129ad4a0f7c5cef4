"""Which path shows what: handlers that read and change nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

TEXT = "text/plain; charset=utf-8"
_METHODS = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request for a page. headers: by lower-case name; query: the last value of each name."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An answer, whole. headers: beside those of every answer."""

    body: bytes
    content_type: str = TEXT
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_text(cls, text: str, status: int = 200) -> HttpResponse:
        """A line for people and probes."""
        return cls(f"{text}\n".encode(), status=status)


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class Router:
    """Path -> handler. Only GET and HEAD are answered, so that nothing can be changed here."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def add(self, path: str, handler: Handler) -> None:
        """path: whole, such as /metrics. Once each."""
        assert path.startswith("/"), path
        assert path not in self._handlers, f"{path} has a handler"
        self._handlers[path] = handler

    async def answer(self, method: str, target: str, headers: Mapping[str, str]) -> HttpResponse:
        """target: as the request line has it. What a handler raises is the caller's."""
        if method not in _METHODS:
            return HttpResponse(b"only GET and HEAD\n", status=405, headers={"allow": ", ".join(_METHODS)})
        try:
            url = urlsplit(target)
            query = dict(parse_qsl(url.query, max_num_fields=100))
        except ValueError:
            return HttpResponse.of_text("not a target", 400)
        handler = self._handlers.get(url.path)
        if handler is None:
            return HttpResponse.of_text(f"nothing here; there is {' '.join(sorted(self._handlers))}", 404)
        return await handler(HttpRequest(url.path, query, headers))
