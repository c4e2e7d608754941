"""A server that is killed, started again, and goes on where it was: the real engine and real files.

By default of a tiny model; of the bundled one it is `slow`.
"""

from __future__ import annotations

import random
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness import ask as ask_runtime
from harness import user
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.interfaces.sampling import GREEDY
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers import upkeep, write_behind
from headstart.tiers.disk import Disk
from killed import Load, Messages, check_objects, known_objects, post, text
from live import wait_until
from process import SHARED, serving

OPTIONS = (*SHARED, "--port", "0")


def address(line: str) -> str:
    return next(word.removeprefix("url=") for word in line.split() if word.startswith("url="))


@pytest.fixture(params=["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(f"{request.param}_model")
    return found


@pytest.mark.slow  # by default a server is killed under load
@pytest.mark.parametrize("reuse", ["exact", "fast"])
def test_killed_and_started_again(tmp_path: Path, model: Path, reuse: str) -> None:
    options = (str(model), *OPTIONS, "--cache-dir", str(tmp_path), "--reuse", reuse)
    chat: Messages = [{"role": "system", "content": text(1, 400)}, {"role": "user", "content": "Say something."}]
    with serving(*options) as server:
        url = address(server.line("listening"))
        first = post(url, chat)
        blocks = first["usage"]["prompt_tokens"] // 64
        wait_until(lambda: known_objects(tmp_path) >= blocks, 60)
        server.end(signal.SIGKILL)
    reply = first["choices"][0]["message"]["content"]
    chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]
    with serving(*options) as server:
        url = address(server.line("listening"))
        second = post(url, chat)
        assert server.end() == 0
    new = second["usage"]["prompt_tokens"] - first["usage"]["prompt_tokens"]
    assert second["headstart"]["computed"] <= new + 64
    assert second["headstart"]["tiers"]["disk"] >= first["usage"]["prompt_tokens"] - 64


def test_a_restart_changes_no_bit(tmp_path: Path, model: Path) -> None:
    settings = Settings(str(model), ctx=1024, slots=1, memory_budget=64 << 20, reuse="exact", cache_dir=tmp_path)
    chat: list[dict[str, Any]] = [{"role": "system", "content": text(2, 300)}, {"role": "user", "content": "Say something."}]
    logits = []
    for folder in (tmp_path, tmp_path, None):
        chosen = Settings(**_with(settings, cache_dir=folder))
        with Runtime(lambda: LlamaEngine.load(settings.engine_options(), block_size=64), chosen) as rt:
            answer = ask_runtime(rt, chat, sampling=GREEDY, max_tokens=4, keep_logits=True)
            logits.append(answer)
    kept, restored, cold = logits
    assert restored.report.tiers["disk"] >= 256
    assert cold.report.cached == 0
    assert all(one.logits is not None for one in logits)
    assert kept.logits.tobytes() == restored.logits.tobytes() == cold.logits.tobytes()  # type: ignore[union-attr]


def _with(settings: Settings, **changes: Any) -> dict[str, Any]:
    import dataclasses

    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)} | changes


@pytest.mark.parametrize("kill", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 50))])
def test_killed_under_load(tmp_path: Path, tiny_model: Path, kill: int) -> None:
    """Whatever the kill interrupts, nothing that was stored is lost, and what comes back is the answer: exact mode against a
    server that has no disk.
    """
    dice = random.Random(kill)
    options = (str(tiny_model), *OPTIONS, "--threads", "1", "--reuse", "exact")
    with serving(*options, "--cache-dir", str(tmp_path)) as server:
        load = Load(address(server.line("listening")), kill)
        time.sleep(dice.uniform(0.3, 1.5))
        server.end(signal.SIGKILL)
        load.join()
    intact = check_objects(tmp_path)
    with serving(*options, "--cache-dir", str(tmp_path)) as server, serving(*options, "--no-disk") as cold:
        urls = [address(one.line("listening")) for one in (server, cold)]
        restored = 0
        for chat in [*load.sent[:3], *load.sent[-3:]]:
            warm, fresh = (post(url, chat, logprobs=True, top_logprobs=5) for url in urls)
            assert warm["choices"] == fresh["choices"]
            restored += warm["headstart"]["tiers"].get("disk", 0)
        with closing(Disk(tmp_path, 1 << 40)) as disk:
            assert disk.catalog.keys() >= intact
        assert server.end() == 0
    assert not list((tmp_path / "tmp").iterdir())
    assert len(intact) < 4 or restored


def test_stopped_with_rows_that_were_nowhere_else(tmp_path: Path, tiny_model: Path) -> None:
    """SIGTERM right behind a reply: what only the slot held is on disk when the process is gone."""
    options = (str(tiny_model), *OPTIONS, "--threads", "1", "--cache-dir", str(tmp_path))
    chat: Messages = [{"role": "user", "content": text(5, 400)}]
    with serving(*options) as server:
        first = post(address(server.line("listening")), chat)
        assert server.end(signal.SIGTERM) == 0
    chat += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}, {"role": "user", "content": "Go on."}]
    with serving(*options) as server:
        second = post(address(server.line("listening")), chat)
        assert second["headstart"]["tiers"]["disk"] >= first["usage"]["prompt_tokens"] - 64
        assert server.end() == 0


@pytest.mark.slow  # by default two processes share a folder in test_disk_processes
def test_two_servers_share_a_folder(tmp_path: Path, tiny_model: Path) -> None:
    """What one of them has computed, the other finds, while both are running."""
    options = (str(tiny_model), *OPTIONS, "--threads", "1", "--reuse", "exact", "--cache-dir", str(tmp_path))
    with serving(*options) as one, serving(*options) as other:
        urls = [address(server.line("listening")) for server in (one, other)]
        for first, second in (urls, urls[::-1]):
            until = time.monotonic() + 60
            while True:
                chat: Messages = [{"role": "user", "content": text(time.monotonic_ns(), 400)}]
                computed = post(first, chat)
                time.sleep(0.5)
                found = post(second, chat)
                assert found["choices"][0]["message"] == computed["choices"][0]["message"]
                if found["headstart"]["tiers"].get("disk", 0) >= computed["usage"]["prompt_tokens"] - 64:
                    break
                assert time.monotonic() < until, found["headstart"]
        assert [one.end(), other.end()] == [0, 0]


@pytest.mark.parametrize("traits", [{}, {"sliceable": False}])
def test_a_chat_goes_on_before_the_catalogue_has_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traits: dict[str, Any]
) -> None:
    """A server begins with a folder that takes long to read. It serves at once, and finds what a request needs."""
    settings = Settings(reuse="exact", memory_budget=1 << 22, cache_dir=tmp_path)
    question = user(text(1, 60))

    def served() -> tuple[dict[str, int], str, int]:
        engine = FakeEngine(slots=2, ctx=2048, block_size=8, seed=0, **traits)
        with Runtime(lambda: engine, settings) as runtime:
            found = ask_runtime(runtime, [question], max_tokens=4)
            listed = len(runtime.cache.index)
        return found.report.tiers, found.text, listed

    first, reply, _ = served()
    assert first == {}
    monkeypatch.setattr(upkeep, "AT_ONCE", -1)
    monkeypatch.setattr(write_behind, "BACKLOG", 0)
    tiers, again, listed = served()
    assert tiers["disk"] >= 8 * 20
    assert again == reply
    assert listed > 0
