"""`headstart explain`: why a request computed what it computed, asked of a running server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

import typer

from headstart.errors import ConfigError
from headstart.units import count

if TYPE_CHECKING:
    from urllib.request import BaseHandler

    from rich.text import Text

EPILOG = """
**Examples**

`headstart explain` — the latest request

`headstart explain req_5f0c…` — the one with that `x-request-id`

`headstart explain first.json second.json` — two request bodies: what the second would compute again after the first

docs/explain.md says how to read the answer.
"""

TIMEOUT = 60.0
"""Seconds to wait for an answer: two large bodies are rendered and tokenised for it."""


def explain(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="[REQUEST_ID | A.json B.json]", help="A request, or two bodies.", show_default="the latest"),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The latest request.")] = False,
    url: Annotated[str, typer.Option(envvar="HEADSTART_URL", metavar="URL", help="The server.")] = "http://127.0.0.1:8000",
    unix_socket: Annotated[
        Path | None,
        typer.Option(envvar="HEADSTART_UNIX_SOCKET", metavar="PATH", help="The server's Unix socket, in place of an address."),
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="HEADSTART_API_KEY", metavar="KEY", help="Key of the server, if it needs one.")
    ] = "",
    salt: Annotated[str, typer.Option(metavar="TEXT", help="The `cache_salt` that the request had.")] = "",
    user: Annotated[str, typer.Option(metavar="ID", help="The user that the request named, under `--isolate user`.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Says why a request computed what it computed: where it parts from an earlier one, what that cost, how to avoid it.

    Only what went into the prompt is compared, and only with earlier requests of your own.
    """
    given = targets or []
    if len(given) > 2 or (last and given):
        raise ConfigError("Give one request id, or two files, or nothing for the latest request.")
    if len(given) == 1 and (given[0].endswith(".json") or Path(given[0]).is_file()):
        raise ConfigError(f"Give two files, the earlier request first: there is nothing to compare {given[0]} with.")
    server, key = url.rstrip("/").removesuffix("/v1"), api_key.split(" ")[0]
    if "://" not in server:
        server = f"http://{server}"
    if len(given) == 2:
        pair = dict(zip("ab", map(_body, given), strict=True))
        answer = _ask(server, "/headstart/explain", key, pair, via=unix_socket)
    else:
        name = "/" + quote(given[0], safe="") if given else ""
        query = urlencode({name: value for name, value in (("cache_salt", salt), ("user", user)) if value})
        answer = _ask(server, f"/headstart/explain{name}?{query}", key, via=unix_socket)
    if as_json:
        typer.echo(json.dumps(answer, indent=1, ensure_ascii=False))
        return
    from rich.console import Console

    Console(soft_wrap=True).print(_page(answer))


def _body(name: str) -> dict[str, Any]:
    try:
        body = json.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read a request from {name}: {getattr(error, 'strerror', error)}.") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{name} is not the body of a request: it must be a JSON object with messages.")
    return body


def _ask(
    server: str, path: str, key: str, body: dict[str, Any] | None = None, *, via: Path | None = None
) -> dict[str, Any]:
    import urllib.error
    import urllib.request

    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = json.dumps(body).encode() if body is not None else None
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]  # a proxy knows no local server
    if via is not None:
        handlers.append(_through(via))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(urllib.request.Request(server + path, data, headers), timeout=TIMEOUT) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise ConfigError(_refusal(server, error.code, error.read())) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        where = f"{server} ({reason})" if via is None else f"the socket {via} ({reason})"
        raise ConfigError(
            f"No headstart server answers at {where}: start one with `headstart serve MODEL`, or give --url or --unix-socket."
        ) from None
    if not isinstance(answer, dict) or "explanation" not in answer:
        raise ConfigError(f"What answers at {server} is no headstart server; give --url.")
    return answer


def _through(path: Path) -> BaseHandler:
    """Sends requests to a Unix socket, whatever host they name; with TLS where their URL says https."""
    import http.client
    import socket
    import ssl
    import urllib.request

    class Plain(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(TIMEOUT)
            self.sock.connect(os.fsencode(path.expanduser()))

    class Secured(Plain):
        def connect(self) -> None:
            super().connect()
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)

    class Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
        def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Plain, request)

        def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(Secured, request)

    return Handler()


def _refusal(server: str, status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {status}"
    return f"{server} says: {message}"


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _page(answer: dict[str, Any]) -> Text:
    from rich.text import Text

    page = Text()

    def line(topic: str, said: str | Text, style: str = "") -> None:
        page.append(f"{topic:9}", "bold").append_text(said if isinstance(said, Text) else Text(said, style)).append("\n")

    prompt = count(answer["prompt"], "token")
    if "id" in answer:
        line("request", f"{answer['id'] or 'without an id'}, {answer['seconds_ago']:.0f} s ago")
        tiers = {"live": answer["live"], **answer["tiers"]}
        parts = ", ".join(f"{tier} {tokens:,}" for tier, tokens in tiers.items() if tokens)
        reused = f"{answer['cached']:,} reused" + (f" ({parts})" if parts else "")
        line("prompt", f"{prompt}: {reused}, {answer['computed']:,} computed, --reuse {answer['mode']}")
    else:
        line("prompt", f"{prompt}, of which the first {answer['shared']:,} are those of the earlier one")
    found = answer["explanation"]
    if found is None:
        line("cause", "none: nothing was computed but what the request newly brought")
        return page
    line("cause", f"{found['cause']}: {found['what']}", "yellow")
    line("called", f"{answer['anthropic']['type']} (Anthropic), {_word(answer['responses'])} (OpenAI)")
    if found["where"] is not None:
        line("place", _place(found))
        before = _shown(found["before"])
        line("", Text("… ").append(before, "dim").append("▼"))
        line("now", Text("… ").append(before, "dim").append(_shown(found["ours"]), "green"))
        line("before", Text("… ").append(before, "dim").append(_shown(found["theirs"]), "red"))
    seconds = f", {found['seconds']:,.3g} s" if found["seconds"] else ""
    line("cost", f"about {count(found['missed'], 'token')} computed again{seconds}")
    line("avoid", found["mend"])
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
    """On one line: what cannot be seen is written as in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')
