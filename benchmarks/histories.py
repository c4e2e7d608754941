"""How clients change a history: each workload asks one server, and sends the server's own replies back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Protocol

from benchmarks.client import Messages
from benchmarks.workloads import text

TURN = 24
"""Words of a user's message."""


class Asks(Protocol):
    def ask(self, messages: Messages) -> str:
        """The reply."""

    def restart(self) -> None:
        """Kills the server and starts it again."""

    def think(self) -> None:
        """Waits as long as a quick reader does."""


History = Callable[[Asks], None]


def _message(role: str, content: str) -> Messages:
    return [{"role": role, "content": content}]


def _turn(server: Asks, chat: Messages, question: str) -> None:
    chat += _message("user", question)
    chat += _message("assistant", server.ask(chat))


def _talk(server: Asks, chat: Messages, seed: str, turns: int) -> None:
    for turn in range(turns):
        _turn(server, chat, text(f"{seed} {turn}", TURN))


def plain(server: Asks) -> None:
    """One chat of ten turns."""
    _talk(server, _message("system", text("plain", 120)), "plain", 10)


def users(server: Asks) -> None:
    """16 users in turn, three times, on 4 slots; all under one system prompt."""
    chats = [_message("system", text("users", 350)) for _ in range(16)]
    for turn in range(3):
        for user, chat in enumerate(chats):
            _turn(server, chat, text(f"users {turn} {user}", 60))


def line(server: Asks) -> None:
    """A line in the middle of the system prompt changes twice, and then is as at first."""
    for number, today in enumerate(("Monday", "Tuesday", "Wednesday", "Monday")):
        system = f"{text('line, before', 400)}\nToday is {today}.\n{text('line, after', 400)}"
        _talk(server, _message("system", system), f"line {number}", 1)


def document(server: Asks) -> None:
    """Four questions about one document, each in its own chat."""
    for number in range(4):
        _turn(server, _message("system", text("document", 60)), f"{text('document, body', 1000)} {text(f'{number}', 12)}")


def edit(server: Asks) -> None:
    """The third of six user's messages is edited. The chat continues from there, and then from the old branch."""
    old = _message("system", text("edit", 60))
    _talk(server, old, "edit", 6)
    new = copy.deepcopy(old[:5])
    _talk(server, new, "edit, another way", 3)
    _talk(server, old, "edit, back", 1)


def regenerate(server: Asks) -> None:
    """The third reply is regenerated three times."""
    chat = _message("system", text("regenerate", 120))
    _talk(server, chat, "regenerate", 3)
    for _ in range(3):
        server.ask(chat[:-1])


def restart(server: Asks) -> None:
    """The server is killed and restarted after the fourth turn. Two more turns follow."""
    chat = _message("system", text("restart", 120))
    _talk(server, chat, "restart", 4)
    server.restart()
    _talk(server, chat, "restarted", 2)


def reasoning(server: Asks) -> None:
    """Six turns with time to read. The first half of each reply is reasoning, which the template strips later."""
    chat = _message("system", text("reasoning", 120))
    for turn in range(6):
        if turn:
            server.think()
        chat += _message("user", text(f"reasoning {turn}", TURN))
        reply = server.ask(chat)
        half = len(reply) // 2
        chat += _message("assistant", f"{reply[:half]}\n</think>\n\n{reply[half:]}")


HISTORIES: dict[str, History] = {
    "plain chat": plain,
    "16 users, 4 slots": users,
    "a system line changed": line,
    "other questions": document,
    "a message edited": edit,
    "regenerate": regenerate,
    "killed and started again": restart,
}
"""With the model's own template."""
