"""One request in full, and the question before it is ended."""

from __future__ import annotations

from typing import ClassVar, Protocol

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from pageturner.service.client import RequestInfo
from pageturner.service.top.readings import Reading
from pageturner.service.top.request_table import details
from pageturner.service.top.text import Glyphs


class Storyteller(Protocol):
    """Tells what happened to a request."""

    async def story(self, request_id: str) -> list[str]: ...


class RequestScreen(ModalScreen[str | None]):
    """All that is known of a request as it goes on, and why it waited. Returns the id of one to be ended."""

    DEFAULT_CSS = """
    RequestScreen { align: center middle; }
    RequestScreen > Vertical {
        width: 90%; max-width: 110; height: auto; max-height: 90%; padding: 1 2;
        background: #171d23; border: round #2fb9a5;
    }
    RequestScreen #facts { height: auto; }
    RequestScreen #why { height: auto; margin-top: 1; text-style: bold; }
    RequestScreen VerticalScroll { height: auto; max-height: 24; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter", "leave", "Back"),
        Binding("k", "end", "End it"),
        Binding("r", "retell", "Ask again why"),
    ]

    def __init__(self, request: RequestInfo, teller: Storyteller, glyphs: Glyphs) -> None:
        super().__init__()
        self._request = request
        self._teller = teller
        self._glyphs = glyphs
        self._is_live = True

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(id="facts")
            yield Static("Why, by the flight record", id="why")
            with VerticalScroll():
                yield Static("asking ...", id="story")
        yield Footer()

    def on_mount(self) -> None:
        self._show()
        self.action_retell()

    def take(self, reading: Reading) -> None:
        """Go on with what it is now; one that has ended stays as it was last."""
        wanted = self._request.number
        found = [request for request in reading.requests.requests if request.number == wanted]
        self._is_live = bool(found)
        if found:
            self._request = found[0]
        self._show()

    def _show(self) -> None:
        told = details(self._request, self._glyphs)
        width = max(len(name) for name, _ in told) + 2
        text = Text()
        for name, value in told:
            text.append(f"{name:<{width}}", "dim").append(f"{value}\n")
        if not self._is_live:
            text.append("it has ended, or is not among those listed", "#e0b83c")
        self.query_one("#facts", Static).update(text)

    def action_retell(self) -> None:
        """Ask for the flight record again."""
        self.run_worker(self._tell(), exclusive=True)

    async def _tell(self) -> None:
        lines = await self._teller.story(self._request.request_id)
        self.query_one("#story", Static).update(Text("\n".join(lines)))

    def action_leave(self) -> None:
        """Back to all requests."""
        self.dismiss(None)

    def action_end(self) -> None:
        """Back, to have it ended."""
        self.dismiss(self._request.request_id)


class ConfirmScreen(ModalScreen[bool]):
    """Whether a request is really to be ended."""

    DEFAULT_CSS = """
    ConfirmScreen { align: center middle; }
    ConfirmScreen > Static {
        width: auto; max-width: 90%; height: auto; padding: 1 2;
        background: #171d23; border: round #e0637a;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "End it"),
        Binding("n,escape,q", "answer(False)", "Leave it"),
    ]

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self._request_id = request_id

    def compose(self) -> ComposeResult:
        question = Text.assemble("End ", (self._request_id, "bold"), "? Its client is told. (y / n)")
        yield Static(question)

    def action_answer(self, is_sure: bool) -> None:
        """Back with the answer."""
        self.dismiss(is_sure)
