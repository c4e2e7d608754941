"""What was fetched is copied into cells on another thread, and published in order."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import Answer, ask, check, submit, user
from headstart.config import Settings
from headstart.interfaces.tokens import Bytes, as_tokens
from headstart.prefix_cache.entry import Entry
from headstart.serving import landing
from headstart.serving.landing import SMALL, Copier, Landing, Landings
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers.disk import Label
from headstart.tiers.memory import Cell
from headstart.tiers.shared_tier import Arrival
from live import wait_until
from sharing import stored

PROMPT = [user("A prompt of some blocks. " * 8)]


def flight(number: int, size: int) -> Landing:
    label = Label(bytes([number]) * 32, b"", b"", 0, (1,), True, 0.0, "kv", 0.0, b"")
    entry = Entry(label.key, b"", as_tokens((1,)), 0)
    return Landing(entry, Cell("kv", number), Arrival(label, np.zeros(size, np.uint8), ""), Future())


def test_objects_land_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "ALOFT", 20)
    aloft, flights = Landings(), [flight(number, 10) for number in range(3)]
    for one in flights:
        aloft.add(one)
    assert (len(aloft), aloft.size, aloft.crowded) == (3, 30, True)
    flights[1].copied.set_result(None)
    assert not list(aloft.landed())
    flights[0].copied.set_result(None)
    assert list(aloft.landed()) == flights[:2]
    assert (len(aloft), aloft.size, aloft.crowded) == (1, 10, False)
    threading.Timer(0.01, flights[2].copied.set_result, [None]).start()
    assert list(aloft.landed(wait=True)) == flights[2:]


@pytest.mark.parametrize("size", [SMALL, SMALL + 1])
def test_a_copy_is_made(size: int) -> None:
    woken = threading.Event()
    copier, cell = Copier(woken.set), np.zeros(SMALL + 2, np.uint8)
    done = copier.copy(np.ones(size, np.uint8), cell)
    assert done.done() or size > SMALL
    done.result()
    copier.close()
    assert cell.sum() == size
    assert woken.is_set() == (size > SMALL)


def start(folder: Path, key_file: Path) -> Runtime:
    (folder / "store").mkdir(exist_ok=True)
    options: dict[str, Any] = {"shared": f"file://{folder}/store", "shared_key_file": key_file}
    engine = {"slots": 2, "ctx": 512, "block_size": 8, "delay": 0.05}
    return Runtime(lambda: FakeEngine(**engine), Settings(reuse="exact", **options))


def answer(rt: Runtime) -> Answer:
    return ask(rt, PROMPT, max_tokens=2, keep_logits=True)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small copies are made on the thread too."""
    monkeypatch.setattr(landing, "SMALL", 0)


def test_what_another_thread_has_copied_is_as_good(tmp_path: Path, key_file: Path, patient: None, always: None) -> None:
    with start(tmp_path, key_file) as one, start(tmp_path, key_file) as other:
        first = answer(one)
        stored(one)
        second = answer(other)
        assert first.logits is not None
        assert second.logits is not None
        assert second.logits.tobytes() == first.logits.tobytes()
        assert second.report.tiers["shared"] == second.report.prompt - second.report.computed > 0
        check(other)


def test_a_request_ends_while_its_blocks_are_copied(
    tmp_path: Path, key_file: Path, patient: None, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    copy = Copier._copy

    def late(self: Copier, payload: Bytes, into: Bytes) -> None:
        begun.set()
        go_on.wait()
        copy(self, payload, into)

    with start(tmp_path, key_file) as one, start(tmp_path, key_file) as other:
        answer(one)
        stored(one)
        monkeypatch.setattr(Copier, "_copy", late)
        pending = submit(other, PROMPT, max_tokens=2)
        assert begun.wait(20)
        pending.handle.cancel()
        go_on.set()
        wait_until(lambda: not other.scheduler.queued)
        again = answer(other)
        assert again.report.computed < again.report.prompt
        assert other.scheduler.shared_fetch._aloft == 0
        check(other)
