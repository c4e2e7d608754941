"""Demo: conversations over real HTTP, with and without reuse, and what was computed for them.

First the conversations run with reuse (warm). The server is killed and started again before the last turn. Then every request
is repeated with `cache_prompt: false` (cold).
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headstart.errors import HeadstartError

CTX = 4096
REPLY = 24
"""Most tokens of a reply."""

DemoMessage = dict[str, str]

QUESTIONS = (
    "Hello! When are you open?",
    "And how much is a membership for a student?",
    "How many tools can I take home at once?",
    "May I keep a cordless drill for two weeks?",
    "What do I have to do before I use the angle grinder?",
    "I am late with a ladder by three opening days. What will it cost?",
    "Can you bring the floor sander to my home?",
    "My nephew is nine and would like to mend a radio with me. Is that possible?",
    "What happens if I break something?",
    "Thank you. Where can I hand in a hammer on a Sunday?",
)
OTHER_QUESTIONS = ("Do you take old tools as gifts?", "What about paint?", "How do I become a volunteer?")
EDITED = "I am late with the trailer by five opening days. What will it cost?"
EDITED_TURN = 5  # of QUESTIONS, or the last one if there are fewer
LAST_QUESTION = "One more thing: is there a fee if I cancel?"
PAUSE = 2.0
"""Seconds between a reply and the kill."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of one request: tokens of its prompt, and milliseconds that its client measured."""

    prompt: int
    cached: int
    restored: int
    computed: int
    ttft_ms: float
    wall_ms: float


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    cost: Cost


@dataclass(slots=True)
class DemoTurn:
    """A request of the demo. `kind` is what the user did."""

    user: str
    kind: str
    body: dict[str, Any]
    warm: Cost
    cold: Cost | None = None


Ask = Callable[[dict[str, Any]], Answer]


def run(model: str = "demo", *, turns: int = len(QUESTIONS), as_json: bool = False) -> None:
    """Runs the demo and prints a table, or data.

    Args:
        turns: how many questions the first user asks.

    Raises:
        ConfigError: the model cannot be used.
    """
    from headstart.engines import registry
    from headstart.engines.options import EngineOptions

    registry.check(EngineOptions(model))
    notes = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="headstart-demo-") as folder, _Server(model, folder) as server:
        with notes.status("starting the server"):
            server.start()

        def ask(body: dict[str, Any]) -> Answer:
            return request(server.port, body)

        def restart() -> None:
            time.sleep(PAUSE)
            server.kill()
            server.start()

        ask({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})  # warms up, so that the first turn is fair
        played: list[DemoTurn] = []
        plays = _play(ask, restart, turns, played)
        if notes.is_terminal and not as_json:
            with Live(table(played), console=notes, refresh_per_second=2, transient=True) as live:
                for _ in plays:
                    live.update(table(played))
        else:
            for line in plays:
                notes.print(line, highlight=False)
    if as_json:
        print(json.dumps({"model": server.model, "turns": [_data(turn) for turn in played], "saved": saved(played)}))
        return
    out = Console()
    out.print(table(played))
    out.print(sentence(played), highlight=False, soft_wrap=True)


def _play(ask: Ask, restart: Callable[[], None], count: int, played: list[DemoTurn]) -> Iterator[str]:
    """Runs all turns, warm and cold. Yields a line after every answer."""
    for turn in script(ask, restart, count):
        played.append(turn)
        yield _line(turn, "warm", turn.warm)
    for turn in played:
        turn.cold = ask({**turn.body, "cache_prompt": False}).cost
        yield _line(turn, "cold", turn.cold)


def _line(turn: DemoTurn, how: str, cost: Cost) -> str:
    return (
        f"{how}: {turn.user} {turn.kind}, {cost.computed} of {cost.prompt} tokens, first token after {_seconds(cost.ttft_ms)}"
    )


def script(ask: Ask, restart: Callable[[], None], count: int) -> Iterator[DemoTurn]:
    """The conversations. Each turn is asked when the iterator reaches it. `restart` kills and restarts the server."""
    system = {"role": "system", "content": files("headstart").joinpath("data/handbook.txt").read_text("utf-8")}

    def say(user: str, kind: str, chat: list[DemoMessage], **options: Any) -> DemoTurn:
        body = {"messages": list(chat), "max_tokens": REPLY, "temperature": 0, **options}
        answer = ask(body)
        chat.append({"role": "assistant", "content": answer.text})
        return DemoTurn(user, kind, body, answer.cost)

    first: list[DemoMessage] = [system]
    second: list[DemoMessage] = [system]
    others = iter(OTHER_QUESTIONS)
    for number, question in enumerate(QUESTIONS[:count]):
        first.append({"role": "user", "content": question})
        yield say("A", "asks" if number else "begins", first)
        if number % 3 == 1 and (other := next(others, None)):
            second.append({"role": "user", "content": other})
            yield say("B", "asks" if len(second) > 2 else "begins", second)
    asked = min(EDITED_TURN, count - 1)
    edited = [*first[: 1 + 2 * asked], {"role": "user", "content": EDITED}]
    yield say("A", f"edits turn {asked + 1}", edited)
    again = edited[:-1]
    yield say("A", "regenerates", again, temperature=0.8, seed=1)
    restart()
    first.append({"role": "user", "content": LAST_QUESTION})
    yield say("A", "asks, after kill -9 and a new start", first)


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Server:
    """`headstart serve` in its own process, on a free port, without the user's environment settings."""

    def __init__(self, model: str, folder: str) -> None:
        self._command = [sys.executable, "-m", "headstart", "serve", model, "--ctx", str(CTX), "--memory-budget", "1GiB"]
        self._command += ["--port", "0", "--cache-dir", folder, "--log-format", "json"]
        others = {name for name in os.environ if name.startswith("HEADSTART_")} - {"HEADSTART_STATE_DIR"}
        self._environment = {name: value for name, value in os.environ.items() if name not in others}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.port = 0
        self.model = ""

    def start(self) -> None:
        """Starts the server, and returns when it listens. Raises HeadstartError if it ends before that."""
        self._process = process = subprocess.Popen(
            self._command, env=self._environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        assert process.stderr is not None
        line = ""
        for line in process.stderr:
            event = json.loads(line) if line.startswith("{") else {}
            self.model = event.get("model", self.model)
            if event.get("event") == "listening":
                self.port = urlsplit(event["url"]).port or 0
                self._reader = threading.Thread(target=process.stderr.read, daemon=True)  # else a full pipe would block it
                self._reader.start()
                return
        raise HeadstartError(f"The demo's server did not start: {line.strip() or process.wait()}")

    def kill(self) -> None:
        """Kills the server as `kill -9` does. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        if self._reader is not None:
            self._reader.join()
        assert process.stderr is not None
        process.stderr.close()

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def request(port: int, body: dict[str, Any]) -> Answer:
    """Sends a chat request and reads its stream. Raises HeadstartError if it fails."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    begun = time.perf_counter()
    first: float | None = None
    text, account = "", {}
    try:
        sent = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
        connection.request("POST", "/v1/chat/completions", sent, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise HeadstartError(f"The server answered {response.status}: {response.read().decode('utf-8', 'replace')}")
        for line in response:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise HeadstartError(event["error"]["message"])
            for choice in event["choices"]:
                if delta := choice["delta"].get("content"):
                    first = first or time.perf_counter() - begun
                    text += delta
            if event.get("usage"):
                account = {**event["headstart"], "prompt": event["usage"]["prompt_tokens"]}
    finally:
        connection.close()
    wall = time.perf_counter() - begun
    counts = {name: int(account[name]) for name in ("prompt", "cached", "restored", "computed")}
    return Answer(text, Cost(**counts, ttft_ms=round(1e3 * (first or wall), 1), wall_ms=round(1e3 * wall, 1)))


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def table(turns: Sequence[DemoTurn]) -> Table:
    """The table of results, one row a turn."""
    shown = Table(
        title="Two users, one long system prompt: every request with reuse, then again without (cold)",
        caption="prompt tokens; time until the first token of the reply arrived",
    )
    shown.add_column("user")
    shown.add_column("does", max_width=24)
    for name in ("prompt", "cached", "computed", "first token", "cold: computed", "cold: first token"):
        shown.add_column(name, justify="right")
    for turn in turns:
        cold = (str(turn.cold.computed), _seconds(turn.cold.ttft_ms)) if turn.cold else ("…", "…")
        warm = turn.warm
        shown.add_row(
            turn.user, turn.kind, str(warm.prompt), str(warm.cached), str(warm.computed), _seconds(warm.ttft_ms), *cold
        )
    return shown


def saved(turns: Sequence[DemoTurn]) -> dict[str, float]:
    """Sums over all turns: prompt tokens, and milliseconds until the first token."""
    cold = [turn.cold for turn in turns if turn.cold]
    warm = [turn.warm for turn in turns if turn.cold]
    computed, computed_cold = sum(cost.computed for cost in warm), sum(cost.computed for cost in cold)
    waited, waited_cold = sum(cost.ttft_ms for cost in warm), sum(cost.ttft_ms for cost in cold)
    return {
        "prompt_tokens": sum(cost.prompt for cost in warm),
        "computed": computed,
        "computed_cold": computed_cold,
        "tokens": computed_cold - computed,
        "ttft_ms": round(waited, 1),
        "ttft_cold_ms": round(waited_cold, 1),
        "ms": round(waited_cold - waited, 1),
    }


def sentence(turns: Sequence[DemoTurn]) -> str:
    """The savings in one sentence."""
    sums = saved(turns)
    return (
        f"Of {sums['computed_cold']:,.0f} prompt tokens headstart computed {sums['computed']:,.0f} and saved "
        f"{sums['tokens']:,.0f} ({sums['tokens'] / sums['computed_cold']:.0%}): the first tokens of {len(turns)} replies "
        f"took {sums['ttft_ms'] / 1e3:.1f} s instead of {sums['ttft_cold_ms'] / 1e3:.1f} s."
    )


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.2f} s"


def _data(turn: DemoTurn) -> dict[str, Any]:
    cold = asdict(turn.cold) if turn.cold else {}
    return {
        "user": turn.user,
        "kind": turn.kind,
        **asdict(turn.warm),
        "cold": {name: cold[name] for name in ("computed", "ttft_ms", "wall_ms")},
    }
