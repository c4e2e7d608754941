"""`headstart replay` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from headstart.cli.main import app, main
from headstart.cli.replay import EPILOG
from headstart.replay import POLICIES, policies

Run = Callable[..., str]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten prompts of four blocks, of which two are common to all, twice over."""
    path = tmp_path / "chat.jsonl"
    ids = [[1, 2, 100 + number, 200 + number] for number in range(10)] * 2
    lines = (
        {"timestamp": 1000 * number, "input_length": 2049, "output_length": 5, "hash_ids": one}
        for number, one in enumerate(ids)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as end:
            main(["replay", *arguments])
        captured = capsys.readouterr()
        assert end.value.code == code, captured
        return captured.out + captured.err

    return run


def figures(out: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(one["policy"], one["budget"]): one for one in json.loads(out)["results"]}


def test_figures(replay: Run, trace: Path) -> None:
    out = replay(
        str(trace), "--budget", "50%", "--budget", "1GB", "--bytes-per-token", "1000", "--seconds-per-token", "0.01", "--json"
    )
    assert json.loads(out)["working_set"] == 22 * 512
    found = figures(out)
    assert {policy for policy, _ in found} == {*POLICIES, "optimum"}
    assert {budget for _, budget in found} == {11 * 512, 10**6}
    whole, half = found["optimum", 10**6], found["optimum", 11 * 512]
    assert whole["hit"] == (9 * 2 + 10 * 4) * 512
    assert whole["computed"] == 20 * 2049 - whole["hit"]
    assert whole["seconds"] == pytest.approx(whole["hit"] * 0.01)
    assert half["hit"] == (19 * 2 + 9) * 512, "the two in common, and nine that come again"
    assert half["gap_closed"] == 1.0
    assert found["lru", 11 * 512]["hit"] == 19 * 2 * 512
    assert found["lru", 11 * 512]["gap_closed"] == 0.0


def test_only_the_later_part_is_counted(replay: Run, trace: Path) -> None:
    found = figures(replay(str(trace), "--budget", "100%", "--behind", "0.5", "--policy", "lru", "--json"))
    assert found["lru", 22 * 512]["hit"] == 10 * 4 * 512
    assert found["lru", 22 * 512]["prompt"] == 10 * 2049


def test_the_table_has_the_policies_that_were_asked_for(replay: Run, trace: Path) -> None:
    out = replay(str(trace), "--budget", "50%", "--policy", "value")
    assert "value" in out
    assert "gdsf" not in out
    assert "chat: 20 requests" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "10x"), "write it like 4GiB or 10%"),
        (("--budget", "x%"), "write it like 4GiB or 10%"),
        (("--budget", "-5%"), "write it like 4GiB or 10%"),
        (("--budget", "inf%"), "write it like 4GiB or 10%"),
        (("--bytes-per-token", "inf"), "'--bytes-per-token': inf is not a finite number"),
        (("--every", "inf"), "'--every': inf is not a finite number"),
        (("--policy", "best"), "must be one of value"),
        (("--block-size", "100"), "multiple"),
    ],
)
def test_mistakes_are_one_line(replay: Run, trace: Path, arguments: tuple[str, ...], said: str) -> None:
    out = replay(str(trace), *arguments, code=2)
    assert said in out
    assert len(out.splitlines()) == 1


def test_what_is_no_trace_is_told_the_forms(replay: Run, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "hello"}\n')
    out = replay(str(other), code=2)
    assert f"{other} is not a trace: " in out
    assert "`headstart replay --help` names the forms" in out


def test_all_that_a_recorded_text_needs_is_said(replay: Run, tmp_path: Path) -> None:
    """Fault: the help named its `input` only, and the error was a KeyError."""
    needed = {"timestamp": 1, "input": "hello", "output": "Hello."}
    other = tmp_path / "other.jsonl"
    for name in needed:
        assert f"`{name}`" in EPILOG
        other.write_text(json.dumps({key: value for key, value in needed.items() if key != name}) + "\n")
        out = replay(str(other), code=2)
        lacks = name if name != "input" else "input_length"  # it is taken for Mooncake's form
        assert f"{other} is not a trace: it lacks '{lacks}'; " in out
    other.write_text(json.dumps(needed) + "\n")
    assert "1 request" in replay(str(other))


def test_the_help_names_every_policy() -> None:
    commands: Any = typer.main.get_command(app)
    (option,) = (one for one in commands.commands["replay"].params if one.name == "policy")
    *most, last = policies()
    assert f"{', '.join(most)} or {last}" in option.help


def test_without_a_trace_one_is_generated(replay: Run) -> None:
    assert "sample: 874 requests" in replay("--budget", "10%", "--policy", "lru", "--block-size", "64")


def test_a_fleet(replay: Run, trace: Path) -> None:
    out = replay(str(trace), "--fleet", "2", "--router", "exact", "--router", "round-robin", "--shared", "--json")
    found = json.loads(out)
    assert (found["replicas"], found["bound"]["computed"]) == (2, 20 * 2049 - (9 * 2 + 10 * 4) * 512)
    exact, turns = found["results"]
    assert (exact["router"], turns["router"], exact["shared"]) == ("exact", "round-robin", True)
    assert exact["memory"] == 2049, "a tenth of the working set is less than a prompt"
    assert found["bound"]["computed"] <= min(exact["computed"], turns["computed"])
    assert "requests" not in exact


def test_all_routers_of_a_fleet_in_a_table(replay: Run, trace: Path) -> None:
    out = replay(str(trace), "--fleet", "3", "--router", "all", "--budget", "50%", "--budget", "100%")
    assert all(out.count(f" {router} ") >= 2 for router in ("exact", "sticky", "power-of-two", "sglang"))
    assert "bound" in out
    assert "20 requests, 3 replicas" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--router", "exact"], "need --fleet"),
        (["--shared"], "need --fleet"),
        (["--fleet", "2", "--router", "best"], "--router must be one of exact, round-robin"),
        (["--fleet", "2", "--policy", "lru"], "not for a fleet"),
    ],
)
def test_options_of_a_fleet(replay: Run, arguments: list[str], message: str) -> None:
    assert message in replay(*arguments, code=2)
