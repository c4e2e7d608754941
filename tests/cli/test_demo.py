"""The demo over real HTTP and the real engine, with a tiny model; its play with the handbook's real size is `slow`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from headstart.cli import demo
from headstart.cli.demo import Answer, Cost, DemoTurn, _Server, saved, script, sentence
from headstart.errors import HeadstartError


def play(*arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    result = subprocess.run(
        [sys.executable, "-m", "headstart", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=840,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return (json.loads(result.stdout) if "--json" in arguments else {}), result.stdout


def check(data: dict[str, Any]) -> None:
    """What every play must show."""
    for turn in data["turns"]:
        assert turn["prompt"] == turn["cached"] + turn["computed"]
        assert turn["restored"] <= turn["cached"]
        # A cold request spells earlier replies as the tokenizer would.
        assert abs(turn["cold"]["computed"] - turn["prompt"]) <= 0.01 * turn["prompt"]
        assert 0 < turn["ttft_ms"] <= turn["wall_ms"]
        assert 0 < turn["cold"]["ttft_ms"] <= turn["cold"]["wall_ms"]
    begins, *rest = data["turns"]
    assert begins["computed"] > 1400
    assert {turn["user"] for turn in rest} == {"A", "B"}
    assert all(turn["computed"] < 120 for turn in rest)
    *_, again, restarted = rest
    assert again["kind"] == "regenerates"
    assert again["computed"] <= 8
    assert "kill -9" in restarted["kind"]
    assert restarted["restored"] == restarted["cached"] > 1400
    assert data["saved"]["tokens"] == sum(turn["cold"]["computed"] - turn["computed"] for turn in data["turns"]) > 0


def test_data_whatever_the_users_own_settings_are(tiny_model: Path) -> None:
    own = {"HEADSTART_API_KEY": "secret", "HEADSTART_NO_DISK": "1", "HEADSTART_SLOTS": "0"}
    data, _ = play(str(tiny_model), "--json", "--turns", "2", **own)
    assert [turn["kind"] for turn in data["turns"]][:-1] == ["begins", "asks", "begins", "edits turn 2", "regenerates"]
    check(data)


@pytest.mark.slow
def test_it_leaves_no_server_when_it_is_terminated(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "headstart", "demo", str(tiny_model)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        assert any(line.startswith("warm: ") for line in process.stderr)
        servers = psutil.Process(process.pid).children()
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert servers
    assert not any(server.is_running() for server in servers)


def table_of(shown: str) -> list[list[str]]:
    """The cells of its rows, one list a turn; what goes on in the next line of a cell is left out."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    return [row for row in rows if row[0]]


@pytest.mark.slow
def test_table_of_a_play_ends_in_one_sentence(tiny_model: Path) -> None:
    _, shown = play(str(tiny_model), "--turns", "1")
    assert len(table_of(shown)) == 4
    assert re.search(
        r"\nOf [\d,]+ prompt tokens headstart computed [\d,]+ and saved .* took [\d.]+ s instead of [\d.]+ s\.\n$", shown
    )


class _Script(_Server):
    """In place of a server: nothing is started."""

    def start(self) -> None:
        self.model = "tiny"


def test_table_ends_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def request(port: int, body: dict[str, Any]) -> Answer:
        cold = body.get("cache_prompt") is False
        return Answer("reply", Cost(1000, 0, 0, 1000, 2000.0, 2100.0) if cold else Cost(1000, 900, 400, 100, 250.0, 300.0))

    monkeypatch.setattr(demo, "_Server", _Script)
    monkeypatch.setattr(demo, "request", request)
    monkeypatch.setattr(demo, "PAUSE", 0.0)
    monkeypatch.setenv("COLUMNS", "120")
    demo.run(turns=1)
    shown = capsys.readouterr().out
    assert [(row[0], row[2:]) for row in table_of(shown)] == [("A", ["1000", "900", "100", "0.25 s", "1000", "2.00 s"])] * 4
    assert [row[1] for row in table_of(shown)][:3] == ["begins", "edits turn 1", "regenerates"]
    assert shown.splitlines()[-1] == (
        "Of 4,000 prompt tokens headstart computed 400 and saved 3,600 (90%): "
        "the first tokens of 4 replies took 1.0 s instead of 8.0 s."
    )


def test_a_server_that_does_not_start_is_said_and_put_away(tmp_path: Path) -> None:
    with (
        pytest.raises(HeadstartError, match=r"did not start: headstart: .*nowhere"),
        _Server("nowhere", str(tmp_path)) as server,
    ):
        server.start()  # a pipe that stays open is a ResourceWarning, and that an error


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_play_with_the_bundled_model() -> None:
    data, _ = play("--json")
    assert len(data["turns"]) == 16
    check(data)
    assert data["saved"]["ms"] > 0


def test_the_script_is_the_story() -> None:
    bodies: list[dict[str, Any]] = []

    def ask(body: dict[str, Any]) -> Answer:
        bodies.append(body)
        return Answer(f"reply {len(bodies)}", Cost(1, 0, 0, 1, 1.0, 1.0))

    turns = list(script(ask, lambda: bodies.append({"killed": True}), 10))
    killed = bodies.index({"killed": True})
    assert killed == len(bodies) - 2
    del bodies[killed]
    assert [turn.user for turn in turns].count("B") == 3
    assert [turn.kind for turn in turns if turn.user == "A"] == [
        *("begins", *["asks"] * 9, "edits turn 6", "regenerates", "asks, after kill -9 and a new start"),
    ]
    tenth = [body for body, turn in zip(bodies, turns, strict=True) if turn.user == "A"][9]
    assert len(tenth["messages"]) == 20
    *_, edit, again, last = bodies
    assert last["messages"][:20] == tenth["messages"]
    assert len(last["messages"]) == 22
    assert edit["messages"][:-1] == tenth["messages"][:11]
    assert edit["messages"][-1] != tenth["messages"][11]
    assert again["messages"] == edit["messages"]
    assert len({json.dumps(body["messages"][0]) for body in bodies}) == 1


def test_the_sentence_adds_up() -> None:
    warm, cold = Cost(1000, 900, 400, 100, 500.0, 700.0), Cost(1000, 0, 0, 1000, 4000.0, 4200.0)
    turns = [DemoTurn("A", "asks", {}, warm, cold)] * 2
    assert saved(turns)["tokens"] == 1800
    assert sentence(turns) == (
        "Of 2,000 prompt tokens headstart computed 200 and saved 1,800 (90%): "
        "the first tokens of 2 replies took 1.0 s instead of 8.0 s."
    )
