"""`headstart explain`: asks a running server why a request computed what it computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

import typer

from headstart.cli.look import plain
from headstart.cli.server import ServerAddress, asks_server
from headstart.errors import ConfigError
from headstart.paths import is_file
from headstart.units import count, show_time

if TYPE_CHECKING:
    from rich.text import Text

EPILOG = """
**Examples**

`headstart explain` — the latest request

`headstart explain req_5f0c…` — the one with that `x-request-id`

`headstart explain first.json second.json` — two request bodies: what the second would recompute after the first

It finds the server by the variables that `serve` reads, like `HEADSTART_PORT`. docs/explain.md explains the answer.
"""


@asks_server
def explain(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REQUEST_ID | A.json B.json]", help="A request, or two bodies.", show_default="the latest"),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The latest request.")] = False,
    *,
    server: ServerAddress,
    salt: Annotated[str, typer.Option(metavar="TEXT", help="The `cache_salt` of the request.")] = "",
    user: Annotated[str, typer.Option(metavar="ID", help="The user of the request, under `--isolate user`.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Explains why a request recomputed tokens: the first difference to an earlier one, its cost, and how to avoid it.

    It compares only the prompts, and only with your own earlier requests.
    """
    given = targets or []
    if len(given) > 2 or (last and given):
        raise ConfigError("Give one request id, or two files, or nothing for the latest request.")
    if len(given) == 1 and (given[0].endswith(".json") or is_file(given[0])):
        raise ConfigError(f"Give two files, the earlier request first: there is nothing to compare {given[0]} with.")
    if len(given) == 2:
        answer = server.ask("/headstart/explain", dict(zip("ab", map(_body, given), strict=True)))
    else:
        name = "/" + quote(given[0], safe="") if given else ""
        query = urlencode({name: value for name, value in (("cache_salt", salt), ("user", user)) if value})
        answer = server.ask(f"/headstart/explain{name}?{query}")
    if "explanation" not in answer:
        raise ConfigError(f"The server at {server.url} is not headstart; give --url.")
    if as_json:
        typer.echo(json.dumps(answer, indent=1, ensure_ascii=False))
        return
    from rich.console import Console

    Console(soft_wrap=True).print(explain_page(answer))


def _body(name: str) -> dict[str, Any]:
    try:
        body = json.loads(Path(name).read_text("utf-8"))
    except RecursionError as error:
        raise ConfigError(f"Cannot read a request from {name}: it is nested too deeply.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read a request from {name}: {getattr(error, 'strerror', error)}.") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{name} is not the body of a request: it must be a JSON object with messages.")
    return body


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def explain_page(answer: dict[str, Any]) -> Text:
    """An answer of the server, for people. It has nothing that a terminal obeys."""
    from rich.text import Text

    page = Text()

    def line(topic: str, text: str | Text, style: str = "") -> None:
        page.append(f"{topic:9}", "bold").append_text(text if isinstance(text, Text) else Text(plain(text), style)).append("\n")

    prompt = count(answer["prompt"], "token")
    if "id" in answer:
        line("request", f"{answer['id'] or 'without an id'}, {answer['seconds_ago']:.0f} s ago")
        tiers = {"live": answer["live"], **answer["tiers"]}
        parts = ", ".join(f"{tier} {tokens:,}" for tier, tokens in tiers.items() if tokens)
        reused = f"{answer['cached']:,} reused" + (f" ({parts})" if parts else "")
        line("prompt", f"{prompt}: {reused}, {answer['computed']:,} computed, --reuse {answer['mode']}")
    else:
        line("prompt", f"{prompt}; the first {answer['shared']:,} are the same as in the earlier one")
    found = answer["explanation"]
    if found is None:
        line("cause", "none: only new text was computed")
        return page
    line("cause", f"{found['cause']}: {found['what']}", "yellow")
    line("called", f"{answer['anthropic']['type']} (Anthropic), {_word(answer['responses'])} (OpenAI)")
    if found["where"] is not None:
        line("place", _place(found))
        before = _shown(found["before"])
        line("", Text("… ").append(before, "dim").append("▼"))
        line("current", Text("… ").append(before, "dim").append(_shown(found["current"]), "green"))
        line("previous", Text("… ").append(before, "dim").append(_shown(found["previous"]), "red"))
    seconds = f", {show_time(found['seconds'])}" if found["seconds"] else ""
    line("cost", f"about {count(found['recomputed'], 'token')} computed again{seconds}")
    line("hint", found["hint"])
    return page


def _word(responses: dict[str, Any]) -> str:
    return str(responses.get("reason", responses["type"]))


def _place(found: dict[str, Any]) -> str:
    part = {"tools": "the tools", "template": "what the template adds", "system": "the system prompt", "messages": ""}
    named = part[found["where"]]
    if found["message"] is not None:
        named = f"message {found['message']}" + (f" ({named})" if named else "")
    return f"{named or 'the text'}, character {found['character']:,}, token {found['token']:,}"


def _shown(text: str) -> str:
    """A text on one line; invisible characters are written as in JSON, or as in Python."""
    return plain(json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"'))
