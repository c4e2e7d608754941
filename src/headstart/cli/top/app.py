"""App: the screen of `headstart top`, with textual. It shows states that a feed sends, and asks for explanations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Protocol

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from headstart.cli.explain import explain_page
from headstart.cli.look import LOOKS, plain
from headstart.cli.top.feed import Trouble, Update
from headstart.cli.top.savings import NOTHING, Savings
from headstart.cli.top.state import TopState
from headstart.cli.top.text import (
    BAR,
    CLOCK,
    joined,
    legend,
    request_line,
    requests_head,
    savings_lines,
    slot_line,
    tree_head,
    tree_line,
)
from headstart.cli.top.tree import lines, stretches
from headstart.errors import HeadstartError

WIDE = 120
"""Columns from which on panels stand beside each other."""
ROOMY = 90
"""Columns of the list of requests from which on it has wide bars."""


class UpdateSource(Protocol):
    """Where updates come from: a `Feed`, or a script of a test."""

    def run(self, emit: Callable[[Update], None], stopped: threading.Event) -> None: ...


class Updated(Message):
    """An update has come."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update = update


class Explained(Message):
    """The answer to a question for a request."""

    def __init__(self, page: Text) -> None:
        super().__init__()
        self.page = page


class ExplainScreen(ModalScreen[None]):
    """Why a request computed its tokens."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss(None)", "Back")]

    def __init__(self, page: Text) -> None:
        super().__init__()
        self._page = page

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="explain") as box:
            box.border_title = "explain"
            yield Static(self._page)
        yield Footer()


class Panel(VerticalScroll):
    """A part of the screen with a title, and text that scrolls."""

    def __init__(self, title: str, name: str) -> None:
        super().__init__(id=name)
        self.border_title = title
        self._shown = Static(id=f"{name}-text")

    def compose(self) -> ComposeResult:
        yield self._shown

    def show(self, text: Text) -> None:
        self._shown.update(text)


class Requests(OptionList):
    """The latest requests."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "Explain the request")]


class TopApp(App[None]):
    """The screen.

    Args:
        place: the server's address, for the first line.
        ask: returns the server's explanation of the request with an id, or raises HeadstartError.
    """

    TITLE = "headstart top"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012  (textual declares it for instances)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("tab", "app.focus_next", "Next panel"),
        Binding("m", "enlarge", "Enlarge"),
    ]
    CSS = """
    Screen { layout: vertical; }
    #status { height: auto; max-height: 3; padding: 0 1; background: $panel; }
    #status.-trouble { background: ORANGE; color: #ffffff; }
    #legend { height: 1; padding: 0 1; color: $text-muted; }
    #panels { layout: vertical; height: 1fr; }
    Panel, #requests-panel { border-top: solid $primary; border-title-color: $text; padding: 0 1; scrollbar-size-vertical: 1; }
    Panel:focus, #requests-panel:focus-within { border-top: heavy $accent; }
    Panel > Static, #head, #requests { text-wrap: nowrap; text-overflow: ellipsis; }
    #slots { height: auto; max-height: 25%; }
    #savings { height: auto; max-height: 35%; }
    #tree { height: 1fr; }
    #requests-panel { height: 1fr; }
    #head { height: 1; color: $text-muted; }
    #requests { height: 1fr; border: none; padding: 0; background: transparent; scrollbar-size-vertical: 1; }
    .-wide #panels { layout: grid; grid-size: 2 2; grid-columns: 2fr 3fr; grid-rows: auto 1fr; }
    .-wide #slots, .-wide #savings { height: auto; max-height: 100%; min-height: 8; }
    #explain { border: round $accent; padding: 0 1; margin: 1 2; background: $surface; }
    ExplainScreen { align: center middle; }
    """.replace("ORANGE", LOOKS["computed"].light)

    def __init__(self, source: UpdateSource, place: str, ask: Callable[[str], dict[str, Any]]) -> None:
        super().__init__()
        self._source = source
        self._place = plain(place)
        self._ask = ask
        self._stopped = threading.Event()
        self._state = TopState()
        self._sums = NOTHING

    def compose(self) -> ComposeResult:
        yield Static(f"{self._place}: connecting", id="status", markup=False)
        with Container(id="panels"):
            yield Panel("slots", "slots")
            yield Panel("saved since the server's start", "savings")
            yield Panel("stored", "tree")
            with Container(id="requests-panel") as box:
                box.border_title = "requests, the latest first"
                yield Static(id="head")
                yield Requests(id="requests", markup=False)
        yield Static(legend(), id="legend")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#requests").focus()
        threading.Thread(target=self._source.run, args=(self._send, self._stopped), daemon=True).start()

    def on_unmount(self) -> None:
        self._stopped.set()

    def _send(self, update: Update) -> None:
        """For the feed's thread."""
        self._post(Updated(update))

    def _post(self, message: Message) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.post_message(message)

    # ── what comes ───────────────────────────────────────────────────────────────────────────────────────────────────

    @on(Updated)
    def _take(self, message: Updated) -> None:
        update, status = message.update, self.query_one("#status", Static)
        if isinstance(update, Trouble):
            status.update(Text(f"{plain(update.text)}. Trying again. The screen shows what was known."))
            status.add_class("-trouble")
            return
        if isinstance(update, Savings):
            self._sums = update
            self._show_savings()
            return
        before, self._state = self._state, update
        status.update(Text(f"{self._place}  {time.strftime(CLOCK, time.localtime(update.time))}"))
        status.remove_class("-trouble")
        self.query_one("#slots", Panel).show(joined([slot_line(slot, update.requests) for slot in update.slots]))
        if update.entries is not before.entries or update.evicted_next != before.evicted_next:
            panel = self.query_one("#tree", Panel)
            panel.border_title = f"stored: {tree_head(update)}"
            panel.show(joined([tree_line(line, update.time) for line in lines(stretches(update))]))
        if update.requests is not before.requests:
            self._show_requests()
        self._show_savings()

    def _show_savings(self) -> None:
        self.query_one("#savings", Panel).show(savings_lines(self._sums, self._state.tiers))

    def _show_requests(self) -> None:
        rows = sorted(self._state.requests.values(), key=lambda row: -row.number)
        shown = self.query_one(Requests)
        width = BAR if shown.size.width >= ROOMY else BAR // 2
        chosen = shown.highlighted_option if shown.highlighted else None  # the first one stays the first one
        self.query_one("#head", Static).update(requests_head(width))
        shown.set_options(Option(request_line(row, width), id=str(row.number)) for row in rows)
        if rows:
            number = int(chosen.id) if chosen is not None and chosen.id is not None else -1
            shown.highlighted = next((at for at, row in enumerate(rows) if row.number == number), 0)

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_requests)

    # ── what the user does ───────────────────────────────────────────────────────────────────────────────────────────

    @on(OptionList.OptionSelected)
    def _explain(self, event: OptionList.OptionSelected) -> None:
        row = self._state.requests.get(int(event.option_id or -1))
        if row is not None:
            threading.Thread(target=self._ask_for, args=(row.id,), daemon=True).start()

    def _ask_for(self, request: str) -> None:
        """On a thread of its own: the server may be slow."""
        try:
            self._post(Explained(explain_page(self._ask(request))))
        except HeadstartError as error:
            self._post(Explained(Text(plain(error.with_flags))))
        except (KeyError, TypeError, ValueError):
            self._post(Explained(Text("The server's answer is none that this headstart knows.")))

    @on(Explained)
    def _show_explanation(self, message: Explained) -> None:
        self.push_screen(ExplainScreen(message.page))

    def action_enlarge(self) -> None:
        """The panel with the focus fills the screen, or no longer does."""
        if self.screen.maximized is not None:
            self.screen.minimize()
        elif self.focused is not None:
            self.screen.maximize(self.focused)
