"""One thread loads the engine, computes with it and closes it, and what goes wrong there reaches the caller."""

from __future__ import annotations

import _thread
import errno
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import ask, user
from headstart.config import Settings
from headstart.errors import ConfigError, ModelError
from headstart.interfaces.engine import Engine
from headstart.serving.engine_thread import EngineThread
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine

FROM_ANY_THREAD = {"check_grammar", "forget_grammars", "fail_next"}


class Watched(FakeEngine):
    """Notes which threads made it and called its methods, and whether it was closed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.threads = {threading.current_thread().name}
        self.called: set[str] = set()
        self.closed = 0
        for name in dir(FakeEngine):
            if not name.startswith("_") and callable(method := getattr(self, name)) and name not in FROM_ANY_THREAD:
                setattr(self, name, functools.partial(self._note, name, method))

    def _note(self, name: str, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.called.add(name)
        self.closed += name == "close"
        return method(*args, **options)


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "headstart-engine"}


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """What a test starts has ended with it. Others may run: those of servers that files of tests share."""
    before = engine_threads()
    yield
    assert engine_threads() <= before


@pytest.mark.parametrize("sliceable", [True, False])
def test_an_engine_sees_one_thread_from_load_to_close(tmp_path: Path, sliceable: bool) -> None:
    settings = Settings(memory_budget=1 << 20, cache_dir=tmp_path)
    with Runtime(functools.partial(Watched, slots=1, sliceable=sliceable), settings) as runtime:
        engine = runtime.engine
        assert isinstance(engine, Watched)
        for prompt in ("one " * 30, "two " * 30, "one " * 30 + "three"):
            ask(runtime, [user(prompt)], max_tokens=4)
        runtime.erase(0)
    assert engine.threads == {"headstart-engine"}
    moved = {"export_kv", "import_kv"} if sliceable else {"export_kv", "export_checkpoint", "import_checkpoint"}
    assert engine.called >= moved | {"prefill", "decode", "sampler", "sample", "truncate", "close"}
    assert engine.closed == 1
    runtime.close()
    assert engine.closed == 1


@pytest.mark.parametrize("error", [ModelError("no such file"), ConfigError("no memory"), RuntimeError("a fault")])
def test_a_failed_load_reaches_the_caller(error: Exception) -> None:
    def make() -> Engine:
        raise error

    with pytest.raises(type(error)) as caught:
        Runtime(make)
    assert caught.value is error


def test_an_engine_that_cannot_be_used_is_closed_where_it_was_loaded() -> None:
    engine = EngineThread(functools.partial(Watched, canonical=False))
    with pytest.raises(ConfigError, match="Exact reuse cannot be proved"):
        Runtime(engine, Settings(reuse="exact"))
    assert isinstance(engine.engine, Watched)
    assert engine.engine.closed == 1
    assert engine.engine.threads == {"headstart-engine"}


def test_a_refused_model_leaves_nothing_to_close_at_exit() -> None:
    program = """
from headstart.config import Settings
from headstart.errors import ConfigError
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
def make():
    engine = FakeEngine(canonical=False)
    engine.close_at_exit = True
    return engine
try:
    Runtime(make, Settings(reuse="exact"))
except ConfigError:
    print("refused")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("refused\n", "", 0)


def test_an_interrupted_load_ends_with_the_model_freed() -> None:
    made: list[Watched] = []

    def make() -> Engine:
        _thread.interrupt_main()
        time.sleep(0.2)
        made.append(Watched())
        return made[0]

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            Runtime(make)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert made[0].closed == 1


def test_errors_at_the_close_reach_the_caller() -> None:
    thread = EngineThread(FakeEngine)

    def fail() -> None:
        raise RuntimeError("cannot be freed")

    thread.engine.close = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="cannot be freed"):
        thread.close()


def test_closing_goes_on_where_the_threads_of_the_system_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.stat

    def refuse(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith("/proc/"):
            raise PermissionError(errno.EACCES, "not allowed", str(path))
        return stat(path, *args, **options)

    thread = EngineThread(Watched)
    engine = thread.engine
    engine.close_at_exit = True
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        thread.close()
    assert isinstance(engine, Watched)
    assert engine.closed == 1
