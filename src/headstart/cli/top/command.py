"""`headstart top`: shows in a terminal what a server does."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from headstart.cli.server import ServerAddress, asks_server
from headstart.errors import ConfigError

EPILOG = """
**Examples**

`headstart top` — the server on this machine

`headstart top --url https://llm.example.com --api-key-file key` — any other, over the network

Keys: Tab goes to the next panel, Enter explains the chosen request, `m` enlarges a panel, `q` ends it.
"""


@asks_server
def top(
    *,
    server: ServerAddress,
    salt: Annotated[str, typer.Option(metavar="TEXT", help="The `cache_salt` of your requests.")] = "",
    user: Annotated[str, typer.Option(metavar="ID", help="The user of your requests, under `--isolate user`.")] = "",
) -> None:
    """Shows a running server in this terminal: slots, what is stored, the latest requests, and what reuse has saved.

    It needs the package textual: `pip install '.[top]'` in a clone of headstart. The server needs nothing.
    """
    if find_spec("textual") is None:
        raise ConfigError("`headstart top` needs textual: pip install 'headstart[top]'.")
    server.check()
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("`headstart top` needs a terminal; GET /headstart/events has the same as data (docs/events.md).")
    from headstart.cli.top.app import TopApp
    from headstart.cli.top.feed import Feed

    owner = {"cache_salt": salt, "user": user}
    query = urlencode({name: value for name, value in owner.items() if value})

    def ask(request: str) -> dict[str, Any]:
        return server.ask(f"/headstart/explain/{quote(request, safe='')}?{query}")

    TopApp(Feed(server, owner), server.place, ask).run()
