"""The library over the fake engine; once over the real one."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pydantic
import pytest

import headstart
from headstart.serving.request import Event, Request
from headstart.serving.runtime import Handle, Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from headstart.tiers.disk import Disk
from process import run
from scripted import Scripted
from templates import TOOLS

CHAT = [{"role": "user", "content": "Tell me of the sea."}]
ENDLESS = {"temperature": 0.0, "logit_bias": {257: -1000.0, 258: -1000.0}}  # the fake model's end tokens


@pytest.fixture
def hs() -> Iterator[headstart.Headstart]:
    with headstart.Headstart(Runtime(lambda: FakeEngine(slots=2, ctx=512, delay=0.002))) as made:
        yield made


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def idle(hs: headstart.Headstart) -> bool:
    state = hs.runtime.snapshot()
    return state["running"] == state["waiting"] == 0


def test_a_continued_chat_computes_its_new_message_only(hs: headstart.Headstart) -> None:
    first = hs.chat(CHAT, max_tokens=10, temperature=0.0)
    assert first.report.computed == first.report.prompt
    assert len(first.tokens) == first.report.completion
    chat = [*CHAT, {"role": "assistant", "content": first.text}, {"role": "user", "content": "More."}]
    second = hs.chat(chat, max_tokens=10, temperature=0.0)
    new = second.report.prompt - first.report.prompt - len(first.text)
    assert second.report.computed <= new + 8


def test_what_the_progress_of_a_warm_up_raises_ends_it(hs: headstart.Headstart) -> None:
    """The caller waited for ever."""

    def progress(done: int, of: int) -> None:
        raise KeyError(done, of)

    with pytest.raises(KeyError):
        hs.warm([{"role": "system", "content": "A handbook. " * 30}], progress=progress)
    until(lambda: idle(hs))
    assert hs.warm([{"role": "system", "content": "A handbook. " * 30}]).prompt > 300


def test_an_interrupted_warm_up_ends(hs: headstart.Headstart, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: after Ctrl-C the engine computed on."""

    class Interrupted(queue.SimpleQueue[Any]):
        def get(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    cancelled: list[Handle] = []
    monkeypatch.setattr("headstart.library.headstart.queue", SimpleNamespace(SimpleQueue=Interrupted))
    monkeypatch.setattr(Handle, "cancel", lambda handle: cancelled.append(handle))
    with pytest.raises(KeyboardInterrupt):
        hs.warm("A handbook. " * 30)
    assert len(cancelled) == 1


def test_a_relative_folder_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["The river is long. " * 12, "The hill is green. " * 12]
    for number in range(2):
        (tmp_path / str(number)).mkdir()

    def opened(folder: Path) -> headstart.Headstart:
        return headstart.Headstart(Runtime(lambda: FakeEngine(slots=1, ctx=512), headstart.Settings(cache_dir=folder)))

    monkeypatch.chdir(tmp_path / "0")
    with opened(Path("cache")) as hs:
        for number, prompt in enumerate(prompts):
            monkeypatch.chdir(tmp_path / str(number))
            hs.warm([{"role": "system", "content": prompt}])
    assert not [*(tmp_path / "1").iterdir()]
    with opened(tmp_path / "0" / "cache") as hs:
        for prompt in prompts:
            report = hs.warm([{"role": "system", "content": prompt}])
            assert report.computed < report.prompt / 2


def test_the_disk_names_the_file_of_a_model_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: `headstart models` and `rm --conversations` did not know which model the conversations were of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").touch()

    def make() -> FakeEngine:
        engine = FakeEngine()
        engine.facts = dataclasses.replace(engine.facts, details={"path": "m.gguf"})
        return engine

    Runtime(make, headstart.Settings(cache_dir=tmp_path / "cache")).close()
    monkeypatch.chdir("/")
    disk = Disk(tmp_path / "cache", 1 << 30)
    (model,) = disk.catalog.models().values()
    disk.close()
    assert (model.name, model.file) == ("m", str(tmp_path / "m.gguf"))
    assert model.at_hand


FORKED = """
import os, signal, sys
import headstart
from headstart.interfaces.generation import GenerationParams
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine

hs = headstart.Headstart(Runtime(lambda: FakeEngine(slots=1, ctx=512)))
prompt = hs.runtime.text_prompt("a")
request = Request(prompt, GenerationParams(max_tokens=1))
calls = {
    "chat": lambda: hs.chat("Hello."),
    "warm": lambda: hs.warm("Hello."),
    "submit": lambda: hs.runtime.submit(request, print),
    "stored": lambda: hs.runtime.stored.all(),
    "call": lambda: hs.runtime.scheduler.call(print),
}
if os.fork() == 0:
    signal.alarm(60)  # it does not outlive the test
    for name, call in calls.items():
        try:
            call()
        except headstart.Unavailable as error:
            print(name, error, flush=True)
    print(hs.runtime.alive)
    hs.close()
    sys.exit(0)  # the runtime is closed at exit too
os.wait()
print(hs.chat("Hello.", max_tokens=3, temperature=0.0).report.completion)
hs.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_is_told_to_load_the_model_itself() -> None:
    """Fault: it waited for ever for a thread that only its parent has."""
    result = run(code=FORKED)
    assert result.returncode == 0, result.stderr
    *refused, alive, replied = result.stdout.splitlines()
    assert [line.partition(" ")[0] for line in refused] == ["chat", "warm", "submit", "stored", "call"]
    assert all("load it after the fork" in line for line in refused)
    assert (alive, replied) == ("False", "3")


def test_stream_has_the_reply_at_its_end(hs: headstart.Headstart) -> None:
    whole = hs.chat(CHAT, max_tokens=12, **ENDLESS)
    stream = hs.chat(CHAT, stream=True, max_tokens=12, **ENDLESS)
    with pytest.raises(RuntimeError, match="not read to its end"):
        stream.reply  # noqa: B018
    pieces = list(stream)
    assert len(pieces) > 3
    assert "".join(pieces) == stream.reply.text == whole.text
    assert stream.reply.finish_reason == "length"
    assert list(stream) == []


def test_next_takes_one_piece(hs: headstart.Headstart) -> None:
    stream = hs.chat(CHAT, stream=True, max_tokens=5, **ENDLESS)
    pieces = [next(stream) for _ in range(5)]
    with pytest.raises(StopIteration):
        next(stream)
    assert "".join(pieces) == stream.reply.text


def test_leaving_the_loop_cancels(hs: headstart.Headstart) -> None:
    stream = hs.chat(CHAT, stream=True, **ENDLESS)
    for _ in stream:
        break
    until(lambda: idle(hs))
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="not read"):
        stream.reply  # noqa: B018


@pytest.mark.parametrize("leave", ["close", "with", "drop"])
def test_what_ends_a_stream(hs: headstart.Headstart, leave: str) -> None:
    stream = hs.chat(CHAT, stream=True, **ENDLESS)
    next(stream)
    if leave == "close":
        stream.close()
        stream.close()
    elif leave == "with":
        with stream:
            next(stream)
    else:
        del stream
    until(lambda: idle(hs))
    assert hs.chat(CHAT, max_tokens=1).report.prompt > 0


def test_closing_wakes_a_waiting_reader() -> None:
    engine = FakeEngine(slots=1, ctx=512, delay=0.2)
    with headstart.Headstart(Runtime(lambda: engine)) as hs:
        stream = hs.chat(CHAT, stream=True)
        failures: list[BaseException] = []

        def read() -> None:
            try:
                list(stream)
            except headstart.Cancelled as error:
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.05)
        stream.close()
        reader.join(60)
        assert not reader.is_alive()
        assert len(failures) == 1


def test_complete_stops_at_a_text(hs: headstart.Headstart) -> None:
    free = hs.complete("Once upon a time", max_tokens=20, **ENDLESS)
    stop = free.text[7:9]
    stopped = hs.complete("Once upon a time", max_tokens=20, stop=stop, **ENDLESS)
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"


def test_seed_repeats_a_reply(hs: headstart.Headstart) -> None:
    texts = {hs.chat(CHAT, max_tokens=16, temperature=2.0, seed=7).text for _ in range(3)}
    assert len(texts) == 1
    assert hs.chat(CHAT, max_tokens=16, temperature=2.0, seed=8).text not in texts


def test_salts_share_nothing(hs: headstart.Headstart) -> None:
    hs.chat(CHAT, max_tokens=4, salt="a")
    assert hs.chat(CHAT, max_tokens=4, salt="b").report.cached == 0
    assert hs.chat(CHAT, max_tokens=4, salt="a").report.cached > 0
    assert hs.chat(CHAT, max_tokens=4, salt="a", reuse=False).report.cached == 0


def test_messages_have_one_form(hs: headstart.Headstart) -> None:
    def prompt(messages: headstart.library.headstart.Messages) -> int:
        return hs.chat(messages, max_tokens=0).report.prompt

    text = CHAT[0]["content"]
    parts = [{"role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]}]
    assert prompt(text) == prompt(CHAT) == prompt(parts)


def test_tools_reach_the_template(hs: headstart.Headstart) -> None:
    tools = [{"type": "function", "function": {"name": "tide", "parameters": {}}}]
    prompts: list[str] = []

    def watch(request: Request) -> Callable[[Event], None]:
        prompts.append(request.prompt.text)
        return lambda event: None

    hs.runtime.watch(watch)
    hs.chat(CHAT, max_tokens=0, tools=tools)
    hs.chat(CHAT, max_tokens=0)
    with_tools, without = prompts
    assert '"tide"' in with_tools
    assert "tide" not in without


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": ["a", ""]}, "stop"),
        ({"template": {"messages": []}}, "messages"),
        ({"seed": "7"}, "seed"),
        ({"seed": 7.0}, "seed"),
        ({"top_k": 40.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"penalty_last_n": -2}, "penalty_last_n"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": None}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": "1"}, "top_p"),
        ({"repeat_penalty": [1]}, "repeat_penalty"),
        ({"presence_penalty": "x"}, "presence_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": 1e39}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logit_bias": {5: "1"}}, "logit_bias"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"logit_bias": {259: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": [(5, 1.0)]}, "logit_bias"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": b"a"}, "stop"),
        ({"salt": 5}, "salt"),
        ({"reuse": "no"}, "reuse"),
        ({"tools": "none"}, "tools"),
        ({"template": [1]}, "Invalid 'template': must be a"),
        ({"template": {"messages": 1}}, "Invalid 'template': may not contain 'messages'"),
        ({"template": {1: 2}}, r"Invalid 'template\[1\]'"),
    ],
)
def test_bad_options_are_refused(hs: headstart.Headstart, options: dict[str, object], said: str) -> None:
    with pytest.raises(headstart.InvalidRequest, match=said):
        hs.chat(CHAT, **options)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "options",
    [
        {"seed": -5, "temperature": 1.0},
        {"seed": 2**63 - 1, "temperature": 1.0},
        {"seed": None, "max_tokens": 3},
        {"top_k": 5, "temperature": np.float64(0.5), "top_p": 1},
        {"logit_bias": {5: float("-inf"), 6: -1}, "temperature": 1},
        {"stop": ("x", "y")},
    ],
)
def test_good_options_are_taken(hs: headstart.Headstart, options: dict[str, Any]) -> None:
    assert hs.chat(CHAT, **{"max_tokens": 3, **options}).report.completion <= 3


def test_refused_text(hs: headstart.Headstart) -> None:
    with pytest.raises(headstart.InvalidRequest, match="text"):
        hs.complete(5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="tools"):
        hs.complete("a", tools=[])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda hs: hs.chat(CHAT, max_token=5), "no option max_token: did you mean max_tokens?"),
        (lambda hs: hs.chat(CHAT, max_new_tokens=5), "did you mean max_tokens?"),
        (lambda hs: hs.chat(CHAT, tool=[]), "did you mean tools?"),
        (lambda hs: hs.chat(CHAT, steam=True), "did you mean stream?"),
        (lambda hs: hs.chat(CHAT, xyzzy=1), "there are salt, max_tokens, stop,.* tools, tool_choice, template."),
        (lambda hs: hs.chat(CHAT, max_token=5, temprature=0), "max_tokens?.*option temprature: did you mean temperature?"),
        (lambda hs: hs.chat(CHAT, response_format={}), "did you mean json_schema?"),
        (lambda hs: hs.chat(CHAT, stop_sequences=["a"], n_predict=1), "did you mean max_tokens?.*did you mean stop?"),
        (lambda hs: hs.chat(CHAT, reasoning_effort="low"), "did you mean template?"),
        (lambda hs: hs.complete("a", repetition_penalty=1.1), "did you mean repeat_penalty?"),
        (lambda hs: asyncio.run(hs.achat(CHAT, top_n=5)), "did you mean top_"),
        (lambda hs: asyncio.run(hs.acomplete("a", max_token=5)), "did you mean max_tokens?"),
        (lambda hs: hs.warm(CHAT, templates={}), "did you mean template?"),
        (lambda hs: headstart.Settings(n_ctx=8192), "no option n_ctx: did you mean ctx?"),
        (lambda hs: headstart.Settings(n_gpu_layers=1), "did you mean gpu_layers?"),
        (lambda hs: headstart.Sampling(temp=0.1), "did you mean temperature?"),
    ],
)
def test_an_unknown_option_is_a_type_error_that_says_what_was_meant(
    hs: headstart.Headstart, call: Callable[[headstart.Headstart], object], said: str
) -> None:
    with pytest.raises(TypeError, match=said.replace("?", r"\?").replace(r".*", ".*")):
        call(hs)


@pytest.mark.parametrize("messages", [[], [{"role": "nobody", "content": "x"}], [{"role": "user"}], 5, [5], None, CHAT[0]])
def test_bad_messages_are_refused(hs: headstart.Headstart, messages: Any) -> None:
    with pytest.raises(headstart.InvalidRequest, match="messages"):
        hs.chat(messages)


def test_too_long_says_both_numbers(hs: headstart.Headstart) -> None:
    with pytest.raises(headstart.ContextTooLong, match=r'512 .* 6\d\d.*a larger ctx=, or with overflow="truncate"\.') as caught:
        hs.chat("x" * 600)
    assert "--" not in caught.value.message
    assert "a larger --ctx, or with --overflow truncate." in caught.value.with_flags


def test_an_engine_fault_is_raised_and_forgotten(hs: headstart.Headstart) -> None:
    engine = hs.runtime.engine
    assert isinstance(engine, FakeEngine)
    engine.fail_next("prefill")
    with pytest.raises(headstart.EngineError):
        hs.chat(CHAT)
    assert hs.chat(CHAT, max_tokens=3, **ENDLESS).report.completion == 3


def test_closed_means_unavailable() -> None:
    hs = headstart.Headstart(Runtime(FakeEngine))
    hs.close()
    hs.close()
    with pytest.raises(headstart.Unavailable):
        hs.chat(CHAT)


# ── asyncio ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_async_gives_what_sync_gives(hs: headstart.Headstart) -> None:
    async def play() -> tuple[str, str, str]:
        whole = await hs.achat(CHAT, max_tokens=12, **ENDLESS)
        stream = await hs.achat(CHAT, stream=True, max_tokens=12, **ENDLESS)
        pieces = [piece async for piece in stream]
        assert len(pieces) > 3
        completed = await hs.acomplete("Once", max_tokens=5, **ENDLESS)
        assert completed.text == hs.complete("Once", max_tokens=5, **ENDLESS).text
        return whole.text, "".join(pieces), stream.reply.text

    assert set(asyncio.run(play())) == {hs.chat(CHAT, max_tokens=12, **ENDLESS).text}


def test_async_requests_run_side_by_side(hs: headstart.Headstart) -> None:
    async def play() -> list[headstart.Reply]:
        return await asyncio.gather(*(hs.achat(f"Question {number}", max_tokens=8, **ENDLESS) for number in range(6)))

    assert [reply.report.completion for reply in asyncio.run(play())] == [8] * 6


@pytest.mark.parametrize("closes", [False, True])
def test_each_of_several_readers_of_a_stream_sees_its_end(hs: headstart.Headstart, closes: bool) -> None:
    """Fault: the reader that did not get the last event waited for ever, also after `close`."""
    whole = "" if closes else hs.chat(CHAT, max_tokens=12, **ENDLESS).text
    stream = hs.chat(CHAT, stream=True, **({} if closes else {"max_tokens": 12}), **ENDLESS)
    read, ends = list[str](), list[object]()

    def reader() -> None:
        try:
            for text in stream:
                read.append(text)
            ends.append(None)
        except headstart.Cancelled as error:
            ends.append(error)

    threads = [threading.Thread(target=reader, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    if closes:
        until(lambda: len(read) > 3)
        stream.close()
    until(lambda: len(ends) == len(threads))
    if not closes:
        assert ends == [None] * 3
        assert sorted("".join(read)) == sorted(whole)


@pytest.mark.parametrize("closes", [False, True])
def test_each_of_several_tasks_that_read_a_stream_sees_its_end(hs: headstart.Headstart, closes: bool) -> None:
    async def main() -> None:
        limit = {} if closes else {"max_tokens": 12}
        stream = await hs.achat(CHAT, stream=True, **limit, **ENDLESS)
        read = list[str]()

        async def reader() -> None:
            async for text in stream:
                read.append(text)
                if closes and len(read) == 4:
                    stream.close()

        ends = await asyncio.wait_for(asyncio.gather(*(reader() for _ in range(3)), return_exceptions=True), 60)
        assert all(end is None or isinstance(end, headstart.Cancelled) for end in ends)
        if not closes:
            assert "".join(read) == stream.reply.text

    asyncio.run(main())


class CountedLock:
    """A lock, and who has come to it."""

    def __init__(self) -> None:
        self.came, self._lock = set[int](), threading.Lock()

    def __enter__(self) -> None:
        self.came.add(threading.get_ident())
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_each_reader_of_a_stream_that_fails_is_told(hs: headstart.Headstart) -> None:
    before = [hs.chat(CHAT, stream=True, **ENDLESS) for _ in range(2)]  # they have the slots, so nothing is read
    until(lambda: hs.runtime.snapshot()["running"] == len(before))
    stream = hs.chat(CHAT, stream=True, **ENDLESS)
    stream._reading = lock = CountedLock()  # type: ignore[assignment]
    errors = list[Exception]()

    def reader() -> None:
        try:
            list(stream)
        except headstart.Unavailable as error:
            errors.append(error)

    threads = [threading.Thread(target=reader, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(lock.came) == len(threads))
    hs.close()
    until(lambda: not any(thread.is_alive() for thread in threads))
    assert len(errors) == 2


@pytest.mark.parametrize("way", ["break", "with", "cancel", "cancel stream"])
def test_async_cancellation(hs: headstart.Headstart, way: str) -> None:
    async def read() -> None:
        async for _ in await hs.achat(CHAT, stream=True, **ENDLESS):
            pass

    async def play() -> None:
        if way == "break":
            async for _ in await hs.achat(CHAT, stream=True, **ENDLESS):
                break
        elif way == "with":
            async with await hs.achat(CHAT, stream=True, **ENDLESS) as stream:
                await anext(stream)
        else:
            task = asyncio.create_task(read() if way == "cancel stream" else hs.achat(CHAT, **ENDLESS))
            while idle(hs):
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.to_thread(until, lambda: idle(hs))

    asyncio.run(play())


def test_a_dropped_async_stream_is_cancelled(hs: headstart.Headstart, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the engine's request held the stream, and computed the reply to its end."""
    cancelled: list[Handle] = []
    cancel = Handle.cancel
    monkeypatch.setattr(Handle, "cancel", lambda handle: (cancelled.append(handle), cancel(handle))[1])

    async def play() -> None:
        stream = await hs.achat(CHAT, stream=True, **ENDLESS)
        await anext(stream)
        dropped = weakref.ref(stream)
        del stream
        gc.collect()
        assert dropped() is None
        assert len(cancelled) == 1
        await asyncio.to_thread(until, lambda: idle(hs))

    asyncio.run(play())


def test_events_after_the_end_of_the_loop_harm_nobody(hs: headstart.Headstart) -> None:
    """The loop may close between any check and the call."""
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(hs.achat(CHAT, stream=True, **ENDLESS))
    assert isinstance(stream, headstart.library.headstart.AsyncStream)
    loop.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "is_closed", lambda: False)
        time.sleep(0.05)  # the engine thread goes on telling
        stream.close()
    until(lambda: idle(hs))
    assert hs.chat(CHAT, max_tokens=2, **ENDLESS).report.completion == 2


# ── open ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"contxt": 4}, "contxt"),
        ({"reuse": "exakt"}, "reuse= must be fast or exact"),
        ({"kv_type": "q4_0"}, "kv_type= must be"),
        ({"overflow": "drop"}, "overflow= must"),
        ({"slots": 0}, "slots= must be at least 1"),
        ({"stall": 0.0}, "stall= must"),
        ({"memory_budget": -1}, "memory_budget= must"),
        ({"memory_budget": "8XB"}, "4GiB"),
        ({"disk_budget": True}, "disk_budget= must be a whole number"),
        ({"tenant_memory": "200%"}, "tenant_memory="),
        ({"ctx": "8k"}, "ctx= must be a whole number"),
        ({"gpu_layers": 1.5}, "gpu_layers= must be a whole number or auto"),
        ({"gpu_layers": "some"}, "gpu_layers=: 'some' is neither a whole number nor auto"),
        ({"drain": "long"}, "drain= must"),
        ({"stall": float("nan")}, "stall= must"),
        ({"temperature": 2.1}, "temperature= must be a number from 0 to 2"),
        ({"top_p": True}, "top_p= must"),
        ({"top_k": -1}, "top_k= must"),
        ({"context": 8192}, "did you mean ctx"),
        ({"progres": print}, "did you mean progress"),
        ({"chat_template": "no-such.jinja"}, "Cannot read chat_template= no-such.jinja"),
        ({"xyzzy": 1}, "there are ctx, slots"),
        ({"no_disk": True}, "no setting no_disk: cache_dir=None stores nothing on disk"),
        ({"shared": "valkey://localhost"}, "give shared_key_file="),
        ({"shared": "ftp://localhost", "shared_key_file": __file__}, "shared_key_file|key file"),
    ],
)
def test_open_refuses_settings_that_cannot_work(settings: dict[str, object], said: str) -> None:
    with pytest.raises(headstart.ConfigError, match=said) as caught:
        headstart.open("demo", **settings)
    assert "--" not in str(caught.value)


def test_settings_may_be_written_as_on_the_command_line() -> None:
    settings = headstart.Settings(memory_budget="8GiB", disk_budget="512MiB", tenant_memory="25%")  # type: ignore[arg-type]
    assert (settings.memory_budget, settings.disk_budget, settings.tenant_memory) == (8 << 30, 512 << 20, 0.25)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, "must be the path"),
        ("Qwen/Qwen3-8B-GGUF", "HF_HUB_OFFLINE is set"),
        ("https://example.com/model.gguf", "OWNER/NAME of a Hugging Face repository"),
        ("models/nothing.gguf", r"or 'demo'\.$"),
        ("no-such-name", "There is no model 'no-such-name'"),
    ],
)
def test_open_says_where_models_come_from(model: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("huggingface_hub.constants")  # it would keep what it finds when it is imported
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(headstart.HeadstartError, match=said):
        headstart.open(model)


def test_open_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(headstart.ModelError, match=r"nothing\.gguf"):
        headstart.open(tmp_path / "nothing.gguf")


def test_a_template_that_cannot_be_read_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").touch()
    with pytest.raises(headstart.ConfigError, match="chat_template= no-such"):
        headstart.open(tmp_path / "broken.gguf", chat_template="no-such.jinja")


def test_exact_is_refused_without_proof() -> None:
    with pytest.raises(headstart.ConfigError, match='use reuse="fast"'):
        Runtime(lambda: FakeEngine(canonical=False), headstart.Settings(reuse="exact"))


def test_the_real_model(demo_model: Path) -> None:
    told: list[float] = []
    shared = {"ctx": 512, "slots": 3, "threads": 2, "memory_budget": 256 << 20}  # as in test_llama, so that it is proved once
    with headstart.open(demo_model, **shared, progress=told.append) as hs:
        assert told == sorted(told)
        assert told[-1] == 1.0
        first = hs.chat("Write one sentence about rivers.", max_tokens=8, temperature=0.0)
        assert first.text
        chat = [
            {"role": "user", "content": "Write one sentence about rivers."},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "And about lakes."},
        ]
        stream = hs.chat(chat, stream=True, max_tokens=8, temperature=0.0)
        assert "".join(stream) == stream.reply.text
        report = stream.reply.report
        assert report.cached >= first.report.prompt
        assert report.computed < 32
    for use in (lambda: hs.chat(chat), lambda: hs.complete("Rivers"), lambda: asyncio.run(hs.achat("Rivers"))):
        with pytest.raises(headstart.Unavailable):  # the model's vocabulary is gone: to use it would end the process
            use()


# ── grammars ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class River(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: Annotated[str, pydantic.Field(max_length=9)]
    length: Annotated[int, pydantic.Field(ge=0, le=9999)]


def test_a_reply_is_what_the_caller_wants_it_to_be(hs: headstart.Headstart) -> None:
    schema = River.model_json_schema()
    for wanted in (schema, River):
        reply = hs.chat(CHAT, json_schema=wanted, max_tokens=300)
        assert reply.finish_reason == "stop"
        assert River.model_validate_json(reply.text).length >= 0
    assert re.fullmatch("[a-f]{4}", hs.complete("Code: ", regex="[a-f]{4}").text)
    assert hs.complete("Code: ", grammar='start: "yes" | "no"').text in ("yes", "no")
    assert re.fullmatch("[a-f]{4}", "".join(hs.chat(CHAT, regex="[a-f]{4}", stream=True)))


def test_a_grammar_works_for_asyncio(hs: headstart.Headstart) -> None:
    async def run() -> str:
        return (await hs.achat(CHAT, regex="[a-f]{4}")).text

    assert re.fullmatch("[a-f]{4}", asyncio.run(run()))


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"json_schema": {"type": "word"}}, "json_schema", "Invalid type: word"),
        ({"json_schema": {"const": {1, 2}}}, "json_schema.const", ""),
        ({"json_schema": "text"}, "json_schema", ""),
        ({"regex": "("}, "regex", "unclosed group"),
        ({"regex": ""}, "regex", "at least 1 character"),
        ({"stop": ""}, "stop", "Invalid 'stop': String should have at least 1 character."),
        ({"grammar": "start: x"}, "grammar", "x"),
        ({"regex": "a", "grammar": "start: /a/"}, "regex", "'grammar' already sets"),
    ],
)
def test_what_cannot_be_followed_names_its_option(
    hs: headstart.Headstart, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(headstart.InvalidRequest) as caught:
        hs.chat(CHAT, **options)
    assert caught.value.param == param
    assert words in caught.value.message
    assert idle(hs)


# ── parsed replies ───────────────────────────────────────────────────────────────────────────────────────────────────

LOOK_UP = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}
THINKS_AND_CALLS = (
    '<think>\nwhich word?\n</think>\n\nLooking.<tool_call>\n{"name": "look_up", "arguments": {"word": "sea"}}\n</tool_call>'
)


@pytest.fixture
def scripted() -> Iterator[tuple[headstart.Headstart, Scripted]]:
    engine = Scripted(FakeEngine(slots=2, ctx=2048, tokenizer=FakeTokenizer(chat_template=TOOLS)))
    with headstart.Headstart(Runtime(lambda: engine)) as made:
        yield made, engine


def test_a_reply_is_parsed_as_over_http(scripted: tuple[headstart.Headstart, Scripted]) -> None:
    hs, engine = scripted
    engine.say(THINKS_AND_CALLS)
    reply = hs.chat(CHAT, tools=[LOOK_UP])
    assert (reply.text, reply.reasoning, reply.finish_reason) == ("Looking.", "which word?", "tool_calls")
    [call] = reply.tool_calls
    assert call["function"] == {"name": "look_up", "arguments": '{"word": "sea"}'}
    assert reply.message == {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "which word?",
        "tool_calls": [call],
    }


def test_its_message_goes_on(scripted: tuple[headstart.Headstart, Scripted]) -> None:
    hs, engine = scripted
    engine.say(THINKS_AND_CALLS, "It is salt water.")
    first = hs.chat(CHAT, tools=[LOOK_UP])
    result = {"role": "tool", "tool_call_id": first.tool_calls[0]["id"], "content": "salt water"}
    second = hs.chat([*CHAT, first.message, result], tools=[LOOK_UP])
    assert second.text == "It is salt water."
    assert second.report.cached >= first.report.prompt


@pytest.mark.parametrize("way", ["sync", "async"])
def test_deltas_add_up_to_the_reply(scripted: tuple[headstart.Headstart, Scripted], way: str) -> None:
    hs, engine = scripted
    engine.say(THINKS_AND_CALLS, THINKS_AND_CALLS)
    stream = hs.chat(CHAT, tools=[LOOK_UP], stream=True)
    if way == "sync":
        deltas = list(stream.deltas())
    else:

        async def read() -> list[object]:
            return [delta async for delta in (await hs.achat(CHAT, tools=[LOOK_UP], stream=True)).deltas()]

        list(stream)
        deltas = asyncio.run(read())
    thought = "".join(one.text for one in deltas if isinstance(one, headstart.ReasoningDelta))
    said = "".join(one.text for one in deltas if isinstance(one, headstart.TextDelta))
    arguments = "".join(one.text for one in deltas if isinstance(one, headstart.ToolCallDelta))
    assert (thought, said, arguments) == ("which word?", "Looking.", '{"word": "sea"}')
    assert [one.name for one in deltas if isinstance(one, headstart.ToolCallStart)] == ["look_up"]


def test_text_alone_is_what_a_stream_yields(scripted: tuple[headstart.Headstart, Scripted]) -> None:
    hs, engine = scripted
    engine.say(THINKS_AND_CALLS)
    assert "".join(hs.chat(CHAT, tools=[LOOK_UP], stream=True)) == "Looking."


@pytest.mark.parametrize("choice", ["another", 3, ""])
def test_a_tool_that_does_not_exist_cannot_be_required(hs: headstart.Headstart, choice: object) -> None:
    with pytest.raises(headstart.InvalidRequest, match="tool_choice"):
        hs.chat(CHAT, tools=[LOOK_UP], tool_choice=choice)  # type: ignore[call-overload]


def test_a_tool_can_be_required(scripted: tuple[headstart.Headstart, Scripted]) -> None:
    hs, _ = scripted
    reply = hs.chat(CHAT, tools=[LOOK_UP], tool_choice="look_up", max_tokens=400, temperature=0.0)
    assert [call["function"]["name"] for call in reply.tool_calls][:1] in (["look_up"], [])
    assert reply.finish_reason in ("tool_calls", "length")
