"""A server that stops at any moment, and one whose engine fails: every client gets an end, and nothing leaks into the log."""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from effort import SLOW
from process import serving
from stopping import FAULT, hanging, leaks, loaded, shared, stop

STOPS = 200
FAULTS = 50 if SLOW else 15
QUICK = (2, 5)
"""These of the stops are run by default: in both forms, with one signal and two, and while the model loads."""
EXITS = {1: (0,), 2: (0, 130)}
"""Exit codes after so many signals; a second one may come when the end is near anyhow."""

LATE = 15.0
"""Seconds, far more than a server on a busy machine needs beyond its time for stopping, and far less than for a reply."""


@pytest.mark.parametrize("number", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in range(STOPS)])
def test_stopped_at_any_moment_under_load(tmp_path: Path, tiny_model: Path, number: int) -> None:
    """One signal or two; after some time, while replies run, while the model loads; in both forms; with and without a disk;
    with a shared store, with one that hangs, and without."""
    dice = random.Random(number)
    signals = 2 if number % 3 == 2 else 1
    loading = 30.0 if number % 10 == 5 else 0.0
    drain = dice.choice([0, 0.5, 1.5, 8])
    options = ["--log-format", ("console", "json")[number % 2], "--drain-seconds", str(drain)]
    options += ["--no-disk"] if dice.random() < 0.3 else ["--cache-dir", str(tmp_path / "cache")]
    with ExitStack() as stack:
        if number % 4 == 2:
            options += shared(tmp_path, tmp_path.as_uri())
        elif number % 8 == 1:
            options += shared(tmp_path, stack.enter_context(hanging()))
        server, tally, threads = stack.enter_context(loaded(tiny_model, tmp_path, number, *options, loading=loading))
        time.sleep(dice.uniform(0.0, 1.5))
        code, seconds = stop(server, dice, twice=signals == 2)
        for thread in threads:
            thread.join(60)
        log = "".join(server.rest())
    print(json.dumps({"code": code, "seconds": round(seconds, 2), "signals": signals, "ends": tally.ends, "options": options}))
    assert not tally.bad
    assert not leaks(log)
    assert "Traceback" not in log
    assert code in EXITS[signals], log
    assert seconds < drain + LATE
    said = [line for line in log.splitlines() if '"stopping"' in line or " stopping " in line]
    assert len(said) == 1, log
    assert "stopped" in log.splitlines()[-1], log


@pytest.mark.parametrize("form", [pytest.param("console", marks=pytest.mark.slow), "json"])
def test_unhandled_exceptions_of_an_engine_leave_no_client_without_an_end(tmp_path: Path, tiny_model: Path, form: str) -> None:
    """They quote prompts, as foreign exceptions may."""
    options = ("--log-format", form, "--cache-dir", str(tmp_path / "cache"), "--drain-seconds", "2")
    with loaded(tiny_model, tmp_path, 1, *options, faults=0.01) as (server, tally, threads):
        server.lines_until(FAULT, FAULTS)
        code, _ = stop(server, random.Random(1), twice=False)
        for thread in threads:
            thread.join(60)
        log = "".join(server.rest())
    print(json.dumps({"code": code, "faults": log.count(FAULT), "ends": tally.ends}))
    assert not tally.bad
    assert tally.ends["refused 500"] + tally.ends["stream failed"] > FAULTS // 3
    assert not leaks(log)
    assert "injected" not in log
    assert 'File "' not in log, "tracebacks are in headstart's own form"
    assert code == 0


def test_the_real_engine_stops_in_the_middle_of_a_reply(tmp_path: Path, tiny_model: Path) -> None:
    options = ("--port", "0", "--ctx", "8192", "--cache-dir", str(tmp_path), "--drain-seconds", "1")
    with serving(str(tiny_model), *options) as server:
        url = server.address()
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            code, _ = stop(server, random.Random(2), twice=False)
            found = [line for line in lines if line.startswith("data: ")]
        log = "".join(server.rest())
    assert code == 0
    assert found[-1] == "data: [DONE]"
    assert json.loads(found[-2][6:])["error"]["code"] == "unavailable"
    assert "Traceback" not in log
    assert "finish=shutdown" in log
