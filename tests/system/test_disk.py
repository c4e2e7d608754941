"""The disk tier under the runtime: restarts, neighbours, faults. Nothing here may ever fail a request."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from harness import Oracle, ask, assistant, converse, submit, system, user
from headstart.config import Settings
from headstart.explain.causes import Cause
from headstart.interfaces.conversation import Message
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.serving import kv_save, runtime
from headstart.serving.request import Started
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from headstart.tiers.disk.format import decode, header_size
from live import wait_until
from talks import talk

BLOCK_SIZE = 8
SYSTEM = "You answer in the words of the house, and never in others. " * 4


def start(
    folder: Path,
    mode: str = "exact",
    *,
    seed: int = 0,
    budget: int = 1 << 20,
    disk: int = 1 << 30,
    delay: float = 0.0,
    random_access: bool = False,
) -> Runtime:
    engine = FakeEngine(slots=2, ctx=2048, block_size=BLOCK_SIZE, seed=seed, delay=delay)
    engine.traits = replace(engine.traits, random_access=random_access)
    settings = Settings(reuse=mode, memory_budget=budget, cache_dir=folder, disk_budget=disk)  # type: ignore[arg-type]
    return Runtime(lambda: engine, settings)


def written(rt: Runtime) -> None:
    """Waits until all that is finished is on disk, and the engine thread knows it."""

    def settled() -> bool:
        return not (any(slot.busy or slot.dirty for slot in rt.scheduler.slots) or rt.cache.store.offload.pending_notices)

    wait_until(settled, 60)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_restart_computes_what_was_not_there(tmp_path: Path, mode: str) -> None:
    oracle, chat = Oracle(), [system(SYSTEM)]
    with start(tmp_path, mode) as rt:
        for turn in range(3):
            converse(rt, oracle, chat, f"question {turn}")
        written(rt)
    with start(tmp_path, mode) as rt:
        answer, expected = converse(rt, oracle, chat, "and another question")
        assert answer.report.computed <= expected + 16 + BLOCK_SIZE
        assert answer.report.tiers == {"disk": answer.report.restored}
        again = ask(rt, chat[:-1])
        assert "disk" not in again.report.tiers, "it is in memory now"
    with Runtime(lambda: FakeEngine(slots=2, ctx=2048, block_size=BLOCK_SIZE), Settings(reuse=mode)) as cold:  # type: ignore[arg-type]
        assert ask(cold, chat[:-1], keep_logits=True).logits is not None


@pytest.mark.parametrize("cut", range(1, BLOCK_SIZE + 1))
def test_a_block_that_is_used_in_part_counts_in_part(tmp_path: Path, cut: int) -> None:
    with start(tmp_path, "fast") as rt:
        ask(rt, [system(SYSTEM), user("a")])
    with start(tmp_path, "fast") as rt:
        report = ask(rt, [system(SYSTEM[:-cut]), user("b")]).report
        assert report.tiers == {"disk": report.restored} != {"disk": 0}


def test_how_replies_were_spelled_is_known_after_a_restart(tmp_path: Path) -> None:
    """The model's tokens for a text are not always the tokenizer's choice: without them no row behind could be found."""
    words = [a + b for a in "etaoin" for b in "etaoin"]

    def opened(mode: str = "fast", folder: Path | None = tmp_path) -> Runtime:
        engine = FakeEngine(ctx=4096, block_size=BLOCK_SIZE, alphabet=b"etaoin", tokenizer=FakeTokenizer(words))
        return Runtime(lambda: engine, Settings(memory_budget=4 << 20, cache_dir=folder, reuse=mode))  # type: ignore[arg-type]

    chat, respelled = [system(SYSTEM)], 0
    with opened() as rt:
        for turn in range(6):
            chat.append(user(f"speak {turn}"))
            answer = ask(rt, chat, max_tokens=24)
            sampled = [token for token in answer.finish.tokens if token not in rt.engine.tokenizer.eog]
            respelled += list(rt.engine.tokenizer.tokenize(answer.text)) != sampled
            chat.append(assistant(answer.text))
    assert respelled >= 3
    with opened() as rt:
        again = ask(rt, chat[:-1])
        assert again.report.computed <= BLOCK_SIZE
        assert again.text == ask(rt, chat[:-1]).text
    with opened("exact") as rt, opened("exact", None) as cold:
        assert ask(rt, chat[:-1]).text == ask(cold, chat[:-1]).text, "exact mode spells as the tokenizer does"
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as db, db:
        kinds = dict(db.execute("SELECT length(key), COUNT(*) FROM notes GROUP BY length(key)"))
        assert kinds == {64: respelled, 32: 1}, "spellings, and the conversation's opening"
        db.execute("UPDATE notes SET value = CAST(substr(value, 1, length(value) - 4) || x'01000000' AS BLOB)")
    with opened() as rt, opened(folder=None) as cold:
        found, due = (one.chat_prompt(talk(chat[:-1])).tokens.tolist() for one in (rt, cold))
        assert found == due, "garbage is not used"
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as db, db:
        db.execute("UPDATE notes SET value = CAST(x'ff' AS TEXT)")
    with opened() as rt:
        assert ask(rt, chat[:2]).report.tiers == {}
    with opened() as rt:
        time.sleep(0.6)
        assert ask(rt, chat[:2]).report.tiers["disk"] > 0, "it was made anew"


def test_a_full_disk_is_read_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [system(SYSTEM), user("a")]
    with start(tmp_path) as rt:
        ask(rt, chat)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    with start(tmp_path) as rt, monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        ask(rt, [user("something new " * 9)])
        until = time.monotonic() + 60
        while not rt.cache.disk.counters["faults"]:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert ask(rt, chat).report.tiers["disk"] >= len(SYSTEM) - BLOCK_SIZE


def test_a_clean_stop_keeps_replies_too(tmp_path: Path) -> None:
    oracle, chat = Oracle(), [system(SYSTEM)]
    with start(tmp_path, "fast") as rt:
        converse(rt, oracle, chat, "question", max_tokens=100, ignore_eos=True)
    with start(tmp_path, "fast") as rt:
        answer, expected = converse(rt, oracle, chat, "and another question")
        assert answer.report.computed <= expected + BLOCK_SIZE


def test_a_second_process_finds_what_the_first_computed(tmp_path: Path) -> None:
    with start(tmp_path) as one, start(tmp_path) as two:
        first = ask(one, [system(SYSTEM), user("a")])
        written(one)
        time.sleep(0.6)
        second = ask(two, [system(SYSTEM), user("b")])
        assert second.report.tiers["disk"] >= len(SYSTEM) - BLOCK_SIZE
        assert first.report.restored == 0


def test_other_weights_find_nothing_and_delete_nothing(tmp_path: Path) -> None:
    chat = [system(SYSTEM), user("a")]
    with start(tmp_path) as rt:
        ask(rt, chat)
    with start(tmp_path, seed=1) as rt:
        report = ask(rt, chat).report
        assert (report.cached, report.cause) == (0, Cause.FINGERPRINT)
        assert ask(rt, chat, salt="bob").report.cause is Cause.FIRST, "what another tenant has computed is not told"
    with start(tmp_path) as rt:
        assert ask(rt, chat).report.tiers["disk"] > 0


def test_another_tenant_finds_nothing(tmp_path: Path) -> None:
    chat = [system(SYSTEM), user("a")]
    with start(tmp_path) as rt:
        ask(rt, chat, salt="alice")
    with start(tmp_path) as rt:
        assert ask(rt, chat, salt="bob").report.cached == 0
        assert ask(rt, chat, salt="alice").report.tiers["disk"] > 0


@pytest.mark.parametrize("called", [False, True])
def test_what_is_known_of_a_request_is_known_on_disk(tmp_path: Path, called: bool) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def returns(text: str) -> Message:
        return {"role": "assistant", "content": text} | ({"tool_calls": [call]} if called else {})

    with start(tmp_path) as rt:
        ask(rt, [system(SYSTEM), user("a")], max_tokens=16, ignore_eos=True)
        written(rt)
        ask(rt, [system(SYSTEM), user("b")], max_tokens=40, ignore_eos=True, returns=returns)
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
        known = [
            RequestTraits(*request_traits)
            for request_traits in db.execute("SELECT bucket, weight FROM objects ORDER BY start, number")
        ]
    assert len({request_traits.weight for request_traits in known[: len(SYSTEM) // BLOCK_SIZE]}) == 1
    pieces = round(1 / known[0].weight)
    assert pieces >= len(SYSTEM) // BLOCK_SIZE
    expected = RequestTraits.of(pieces, new=1, siblings=1, reply=40, called=called)
    assert set(known[: len(SYSTEM) // BLOCK_SIZE]) == {expected}, "the second request has used them last"


def test_a_request_that_is_cancelled_is_known_as_far_as_it_went(tmp_path: Path) -> None:
    with start(tmp_path) as rt:
        pending = submit(rt, [system(SYSTEM), user("a")], max_tokens=1500, ignore_eos=True)
        pending.until(Started)
        pending.handle.cancel()
        prompt = len(rt.chat_prompt(talk([system(SYSTEM), user("a")])).tokens)
        expected = {RequestTraits.of(prompt // BLOCK_SIZE, new=prompt, siblings=-1, reply=-1)}
        known, until = set[RequestTraits](), time.monotonic() + 60
        while known != expected:
            assert time.monotonic() < until, known
            time.sleep(0.05)
            with closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
                known = {RequestTraits(*request_traits) for request_traits in db.execute("SELECT bucket, weight FROM objects")}


def test_each_row_is_written_once(tmp_path: Path) -> None:
    oracle, chat = Oracle(), [system(SYSTEM)]
    with start(tmp_path) as rt:
        for turn in range(10):
            converse(rt, oracle, chat, f"question {turn}")
            written(rt)
        blocks = len(rt.chat_prompt(talk(chat)).tokens) // BLOCK_SIZE
        assert rt.cache.disk.counters["saved"] <= 1.1 * blocks
    with start(tmp_path) as rt:
        ask(rt, chat[:-1])
        written(rt)
        assert rt.cache.disk.counters["saved"] <= 3, "what was restored is not written again"


@pytest.mark.parametrize("random_access", [False, True])
def test_a_long_request_is_on_disk_before_it_ends(
    random_access: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sooner if the engine can export a part of a slot."""
    monkeypatch.setattr(kv_save, "SECURE_SOON" if random_access else "SECURE", 0.0)
    monkeypatch.setattr(kv_save, "SECURE" if random_access else "SECURE_SOON", 1e9)
    with start(tmp_path, delay=0.02, random_access=random_access) as rt:  # half a minute of work
        pending = submit(rt, [system(SYSTEM), user("a")], max_tokens=1500, ignore_eos=True)
        pending.until(Started)
        wait_until(lambda: rt.cache.disk.counters["saved"] >= len(SYSTEM) // BLOCK_SIZE, 60)
        assert rt.scheduler.running, "too late"
        pending.handle.cancel()


def test_a_burst_larger_than_the_queue_gets_to_disk_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "QUEUE_SHARE", 0.0)  # one at a time
    with start(tmp_path) as rt:
        ask(rt, [system(SYSTEM), user("a")], max_tokens=1)
        until = time.monotonic() + 60
        while rt.cache.disk.counters["saved"] < len(SYSTEM) // BLOCK_SIZE:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert rt.cache.disk.counters["skipped_full"] > 0


def test_what_memory_evicts_is_on_disk_replies_too(tmp_path: Path) -> None:
    chat = [system(SYSTEM), user("a")]
    with start(tmp_path, "fast", budget=20 << 10) as rt:
        first = ask(rt, chat, max_tokens=200, ignore_eos=True)
        written(rt)  # a disk that had no time yet would have lost some
        for number in range(10, 22):
            ask(rt, [system(f"{number}" * 100), user("b")])
            written(rt)
        assert rt.cache.store.counters["evicted"] > 100
        chat += [assistant(first.text), user("go on")]
        rt.scheduler._admission.pace.prefill = 1.0  # the fake engine computes faster than any disk reads
        second = ask(rt, chat)
        assert second.report.tiers["disk"] >= first.report.prompt + 200 - 2 * BLOCK_SIZE


def test_of_what_is_too_long_a_half_is_restored_and_nothing_else_suffers(tmp_path: Path) -> None:
    """Rows in cells, and the engine's copy of them, share the budget; what the copy took is there for others again."""
    ctx, row = 2048, 64

    def budgeted(share: float) -> Runtime:
        engine = FakeEngine(slots=2, ctx=ctx, block_size=BLOCK_SIZE, kv_bytes_per_token=row, transfer_bytes=ctx * row)
        rt = Runtime(lambda: engine, Settings(memory_budget=int(share * ctx * row), cache_dir=tmp_path, settle="off"))
        rt.scheduler._admission.pace.prefill = 1.0  # the fake engine computes faster than any disk reads
        return rt

    short, long = [system("Z" * 300), user("hi")], [system("x" * 1850), user("a")]
    with budgeted(4) as rt:
        for chat in (short, long):
            ask(rt, chat)
        written(rt)
    with budgeted(1) as rt:
        report = ask(rt, long).report
        assert 0.45 * ctx < report.restored == report.tiers["disk"] <= 0.5 * ctx
        written(rt)
        for other in "qwe":
            ask(rt, [system(other * 40), user("b")])
        report = ask(rt, short).report
        assert report.computed <= 2 * BLOCK_SIZE
        assert rt.cache.memory.used <= rt.cache.memory.budget
    with budgeted(1) as rt:  # while a reply runs, which reads in rounds
        running = submit(rt, [user("go on")], max_tokens=1500, ignore_eos=True)
        running.until(Started)
        report = ask(rt, long).report
        assert rt.scheduler.running
        assert 0.4 * ctx < report.restored == report.tiers["disk"] <= 0.5 * ctx
        running.handle.cancel()
    with budgeted(1) as rt:  # to save what is long, the engine has taken nearly all
        ask(rt, [system("y" * 1850), user("a")])
        written(rt)
        assert rt.cache.store.memory_budget.claimed > 0.9 * rt.cache.memory.budget
        assert ask(rt, short).report.computed <= 2 * BLOCK_SIZE
        assert rt.cache.store.memory_budget.claimed < 0.25 * rt.cache.memory.budget


# ── faults ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def objects(folder: Path) -> list[Path]:
    return sorted((folder / "objects").iterdir())


def start_of(path: Path) -> int:
    data = path.read_bytes()
    return decode(data[: header_size(data[:32])], len(data)).label.start


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("flip", "corrupt"),
        ("truncate", "truncated"),
        ("empty", "truncated"),
        ("swap", "other"),
        ("foreign", "foreign"),
        ("newer", "newer"),
        ("missing", "missing"),
        ("unreadable", "read"),
    ],
)
def test_a_bad_object_is_a_miss(tmp_path: Path, damage: str, reason: str) -> None:
    chat = [system(SYSTEM), user("a")]
    with start(tmp_path) as rt:
        expected = ask(rt, chat, keep_logits=True)
    paths = sorted(objects(tmp_path), key=start_of)
    victim = paths[len(paths) // 2]
    data = bytearray(victim.read_bytes())
    match damage:
        case "flip":
            data[-1] ^= 1
            victim.write_bytes(data)
        case "truncate":
            victim.write_bytes(data[:-1])
        case "empty":
            victim.write_bytes(b"")
        case "swap":
            victim.write_bytes(paths[0].read_bytes())
        case "foreign":
            victim.write_bytes(b"something else" * 1000)
        case "newer":
            data[8] += 1
            victim.write_bytes(data)
        case "missing":
            victim.unlink()
        case "unreadable":
            victim.unlink()
            victim.mkdir()
    with start(tmp_path) as rt:
        answer = ask(rt, chat, keep_logits=True)
        assert answer.logits is not None
        assert expected.logits is not None
        assert answer.logits.tobytes() == expected.logits.tobytes()
        assert answer.text == expected.text
        assert 0 < answer.report.restored < len(SYSTEM), "what comes before it is good"
        assert rt.cache.store.counters["fault_disk"] == 1
        assert dict(rt.cache.disk.counters) == {f"fault_{reason}": 1}
        written(rt)
    with start(tmp_path) as rt:
        assert ask(rt, chat).report.restored >= len(SYSTEM) - BLOCK_SIZE, "it was written anew"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with start(tmp_path) as rt:
        assert ask(rt, [user("a")]).text is not None
        assert rt.cache.disk.counters["faults"] >= 1


def test_a_place_that_is_no_folder_is_no_reason_to_fail(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("x")
    with start(place) as rt:
        assert ask(rt, [user("a")]).text is not None
        assert rt.cache.disk.counters["faults"] >= 1


def test_a_damaged_catalogue_is_made_anew_from_the_objects(tmp_path: Path) -> None:
    chat = [system(SYSTEM), user("a")]
    with start(tmp_path) as rt:
        ask(rt, chat)
    for name in ("index.sqlite-wal", "index.sqlite-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "index.sqlite").write_bytes(b"garbage" * 1000)
    with start(tmp_path) as rt:
        time.sleep(0.6)
        assert ask(rt, chat).report.tiers["disk"] >= len(SYSTEM) - BLOCK_SIZE


def test_a_cancelled_prefill_is_there_after_a_restart(tmp_path: Path) -> None:
    chat = [system(SYSTEM), user("a long message " * 20)]
    with start(tmp_path) as rt:
        pending = submit(rt, chat, max_tokens=500, ignore_eos=True)
        pending.until(Started)
        pending.handle.cancel()
    with start(tmp_path) as rt:
        answer = ask(rt, chat)
        assert answer.report.computed <= BLOCK_SIZE
        assert ask(rt, [*chat, assistant(answer.text), user("b")]).text is not None


def test_the_disk_budget_holds(tmp_path: Path) -> None:
    from headstart.tiers.disk.store import RESERVE

    with start(tmp_path, disk=RESERVE + (400 << 10)) as rt:
        for number in range(8):
            ask(rt, [system(f"{number} " + SYSTEM), user("a")])
            written(rt)
            occupied = sum(path.stat().st_blocks * 512 for path in [*objects(tmp_path), *(tmp_path / "tmp").iterdir()])
            assert occupied <= 400 << 10
        assert rt.cache.disk.counters["evicted"] > 0
        assert ask(rt, [system("7 " + SYSTEM), user("b")]).report.cached > 0
