"""The view: what is read of the server every so often, laid out for the terminal at hand."""

from __future__ import annotations

import asyncio
from typing import ClassVar, Protocol

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from pageturner.service.client import RequestInfo
from pageturner.service.client.values import RequestOrder
from pageturner.service.top import panels
from pageturner.service.top.figures import Figures, History
from pageturner.service.top.readings import Away, Reading
from pageturner.service.top.request_table import Column, columns_that_fit, requests_title, room_of_first
from pageturner.service.top.screens import ConfirmScreen, RequestScreen
from pageturner.service.top.styles import Colouring
from pageturner.service.top.text import Glyphs

ORDERS: tuple[RequestOrder, ...] = ("schedule", "age", "blocks", "tokens", "preemptions")

INTERVALS = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between two readings, to choose from by + and -."""

LOW_LINES = 18
"""A terminal of fewer shows figures and requests alone."""

FIXED_LINES = 12
"""That everything but the map and the requests takes at most."""


class Source(Protocol):
    """A server, as the view asks it: `readings.Reader`, or a fake."""

    async def read(self, order: RequestOrder = "schedule") -> Reading | Away: ...
    async def abort(self, request_id: str) -> str: ...
    async def story(self, request_id: str) -> list[str]: ...


class RequestTable(DataTable[Text]):
    """The requests; Enter, or a click, opens one."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details, why")]


class TopApp(App[None]):
    """target: the server's address, for the eye. interval_seconds: between two readings."""

    TITLE = "pageturner top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: #12171c; overflow: hidden; }
    Static { height: auto; padding: 0 1; }
    Static.title { color: #8fa3b5; text-style: bold; padding: 1 1 0 1; }
    #notice, #policies { display: none; }
    DataTable { height: 1fr; min-height: 3; background: #12171c; padding: 0 1; }
    DataTable > .datatable--header { background: #12171c; color: #8fa3b5; text-style: none; }
    DataTable > .datatable--odd-row, DataTable > .datatable--even-row { background: #12171c; }
    DataTable > .datatable--cursor { background: #26323d; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("k", "end", "End it"),
        Binding("o", "reorder", "Order"),
        Binding("m", "recolour", "Colours"),
        Binding("space", "hold", "Hold"),
        Binding("plus", "pace(-1)", "Faster", show=False),
        Binding("minus", "pace(1)", "Slower", show=False),
        Binding("r", "refresh_now", "Now", show=False),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),  # a screen's own would copy text
    ]

    def __init__(self, source: Source, target: str, glyphs: Glyphs, interval_seconds: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._target = target
        self._glyphs = glyphs
        self._interval_seconds = interval_seconds
        self._order: RequestOrder = ORDERS[0]
        self._colouring: Colouring = "use"
        self._is_held = False
        self._history = History()
        self._reading: Reading | None = None
        self._away: Away | None = None
        self._figures = Figures()
        self._columns: tuple[Column, ...] = ()
        self._is_wanted = asyncio.Event()

    def compose(self) -> ComposeResult:
        yield Static(id="headline")
        yield Static(id="notice")
        yield Static(id="figures")
        yield Static(id="course")
        yield Static(id="blocks-title", classes="title")
        yield Static(id="blocks")
        yield Static(id="legend")
        yield Static(id="requests-title", classes="title")
        yield RequestTable(cursor_type="row", cursor_foreground_priority="renderable", id="requests")
        yield Static(id="policies")
        yield Footer()

    def on_mount(self) -> None:
        self._draw()
        self.query_one(RequestTable).focus()
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        while True:
            if not self._is_held:
                self.take(await self._source.read(self._order))
            self._is_wanted.clear()
            try:
                async with asyncio.timeout(None if self._is_held else self._interval_seconds):
                    await self._is_wanted.wait()
            except TimeoutError:
                continue

    def take(self, told: Reading | Away) -> None:
        """Show what was read. While the server is away, the last reading stays."""
        if isinstance(told, Away):
            self._away = told
        else:
            self._reading, self._away = told, None
            self._figures = self._history.add(told)
            if isinstance(self.screen, RequestScreen):
                self.screen.take(told)
        self._draw()

    def on_resize(self, _event: events.Resize) -> None:
        self._draw()

    # Drawing

    def _draw(self) -> None:
        # Widgets are found on the view's own screen, whichever lies over it.
        home = self.screen_stack[0]
        width = max(1, self.size.width - 2)
        glyphs, reading = self._glyphs, self._reading

        def put(name: str, text: Text | str, *, is_shown: bool = True) -> None:
            widget = home.query_one(f"#{name}", Static)
            widget.display = is_shown and bool(text)
            widget.update(text)

        put("headline", panels.headline(self._target, reading, self._away, self._is_held, glyphs))
        if reading is None:
            return
        put("notice", panels.notice(reading, glyphs))
        # The requests need a few lines of any terminal; of a low one the rest goes first.
        is_low = self.size.height < LOW_LINES
        figures = panels.figures_panel(reading, self._figures, width, glyphs)
        put("figures", Text("\n").join(figures.split()[: max(1, self.size.height - 7)]))
        put("course", panels.course_panel(self._figures, width, glyphs), is_shown=not is_low)
        height = max(1, min(12, (self.size.height - FIXED_LINES) // 3))
        size, blocks = panels.blocks_panel(reading.blocks, width, height, self._colouring, glyphs)
        title = panels.blocks_title(reading.blocks, self._colouring, size)
        put("blocks-title", title, is_shown=not is_low)
        put("blocks", blocks, is_shown=not is_low)
        put("legend", panels.blocks_legend(reading.blocks, glyphs), is_shown=not is_low)
        put("requests-title", requests_title(reading, self._order), is_shown=not is_low)
        put("policies", panels.policies_panel(reading.policies, glyphs), is_shown=not is_low)
        self._draw_requests(home.query_one(RequestTable), reading, width)

    def _draw_requests(self, table: DataTable[Text], reading: Reading, width: int) -> None:
        """The rows anew, the cursor on the request that it was on."""
        chosen, scroll_y = self._chosen_number(table), table.scroll_y
        columns = columns_that_fit(width)
        if columns != self._columns:
            self._columns = columns
            table.clear(columns=True)
            for column in columns:
                table.add_column(Text(column.name, justify="right" if column.is_number else "left"))
        else:
            table.clear()
        for place, request in enumerate(reading.requests.requests):
            table.add_row(*self._cells(request), key=str(request.number))
            if request.number == chosen:
                table.move_cursor(row=place, animate=False, scroll=False)
        table.scroll_to(y=scroll_y, animate=False, force=True)

    def _cells(self, request: RequestInfo) -> list[Text]:
        cells = []
        for column in self._columns:
            cell = column.value(request, self._glyphs)
            if column.is_number:
                cell.justify = "right"
            elif column is self._columns[0]:
                cell.truncate(room_of_first(self._columns, self.size.width - 4), overflow="ellipsis")
            cells.append(cell)
        return cells

    def _chosen_number(self, table: DataTable[Text]) -> int | None:
        if not table.row_count:
            return None
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        return None if key is None else int(key)

    def _chosen(self) -> RequestInfo | None:
        if self._reading is None:
            return None
        number = self._chosen_number(self.screen_stack[0].query_one(RequestTable))
        found = [request for request in self._reading.requests.requests if request.number == number]
        return found[0] if found else None

    # Keys

    def on_data_table_row_selected(self, _event: DataTable.RowSelected) -> None:
        self.action_open()

    def action_open(self) -> None:
        """The chosen request in full."""
        request = self._chosen()
        if request is not None:
            self.push_screen(RequestScreen(request, self._source, self._glyphs), self._end_if_named)

    def action_end(self) -> None:
        """End the chosen request, once that was confirmed."""
        request = self._chosen()
        if request is not None:
            self._end_if_named(request.request_id)

    def _end_if_named(self, request_id: str | None) -> None:
        if request_id is None:
            return

        def end(is_sure: bool | None) -> None:
            if is_sure:
                self.run_worker(self._end(request_id))

        self.push_screen(ConfirmScreen(request_id), end)

    async def _end(self, request_id: str) -> None:
        self.notify(f"{request_id}: {await self._source.abort(request_id)}", markup=False)
        self._is_wanted.set()

    def action_reorder(self) -> None:
        """The next order of the requests."""
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self._is_wanted.set()

    def action_recolour(self) -> None:
        """Colours by use, or by owner."""
        self._colouring = "owner" if self._colouring == "use" else "use"
        self._draw()

    def action_hold(self) -> None:
        """Keep what is shown, or go on."""
        self._is_held = not self._is_held
        self._is_wanted.set()
        self._draw()

    def action_pace(self, step: int) -> None:
        """More or fewer readings."""
        nearest = min(INTERVALS, key=lambda one: abs(one - self._interval_seconds))
        place = min(max(INTERVALS.index(nearest) + step, 0), len(INTERVALS) - 1)
        self._interval_seconds = INTERVALS[place]
        self.notify(f"every {self._interval_seconds:g} s")
        self._is_wanted.set()

    def action_refresh_now(self) -> None:
        """Read at once."""
        self._is_wanted.set()
