"""What is too old, or was deleted, is nowhere any more: in no slot, tier or file, nor in what is remembered of texts."""

from __future__ import annotations

import errno
import json
import math
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import effort
from effort import SLOW
from harness import Pending, ask, assistant, submit, system, user
from headstart.cli.main import main
from headstart.config import Settings
from headstart.interfaces.engine import Shape
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.tokens import as_tokens
from headstart.prefix_cache.blocks import Chain, checkpoint_id, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index
from headstart.prefix_cache.reuse_model import UNKNOWN_REQUEST
from headstart.serving import expiry as expiry_module
from headstart.serving import scheduler, settle
from headstart.serving.request import Request, Started
from headstart.serving.runtime import Runtime
from headstart.serving.slots import Slot
from headstart.testing.fake_engine import FakeEngine
from headstart.tiers import write_behind
from headstart.tiers.disk import Disk
from headstart.tiers.disk.chains import StoredChain, StoredChains
from headstart.tiers.memory import Memory
from headstart.tiers.notices import ObjectErased, ObjectRefused
from headstart.tiers.write_behind import WriteBehind
from live import idle, wait_until
from remains import DAY, START, Clock, kept, mark, marked, stored


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "POLL", 0.02)
    monkeypatch.setattr(scheduler, "IDLE_POLL", 0.05)
    monkeypatch.setattr(settle, "AFTER", 0.01)


@contextmanager
def started(
    clock: Clock, cache_dir: Path | None = None, engine: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Runtime]:
    chosen = Settings(**{"memory_budget": 1 << 20, "cache_dir": cache_dir, **settings})
    with Runtime(lambda: FakeEngine(**{"slots": 2, "ctx": 2048, **(engine or {})}), chosen, clock=clock) as runtime:
        yield runtime


def settled(runtime: Runtime) -> None:
    """Waits until all that is live has been saved, on disk too, and what has to go has gone."""
    offload, expiry, disk, clock = runtime.cache.store.offload, runtime.scheduler.expiry, runtime.cache.disk, runtime.clock

    def looked() -> bool:
        version = runtime.cache.store.terms.version
        look, below = runtime.cache.store.terms.look, True
        if isinstance(disk, WriteBehind):
            below = disk._upkeep.terms_seen == version and abs(disk._upkeep.looked - clock()) < look and not disk._upkeep.busy
        told = not (getattr(disk, "_notices", ()) or offload.erased or expiry.busy)
        return below and expiry._version == version and expiry.pause > 0 and told

    def quiet() -> bool:
        dirty = any(slot.dirty for slot in runtime.scheduler.slots) or not runtime.scheduler.idle
        return idle(runtime) and looked() and not (offload.writing or offload._queued or dirty)

    wait_until(lambda: idle(runtime))
    runtime.scheduler.wake()
    wait_until(quiet)


def test_the_oracle_sees_what_is_kept(tmp_path: Path) -> None:
    with started(Clock(), tmp_path) as runtime:
        ask(runtime, [user(marked(0))], max_tokens=4)
        settled(runtime)
        assert kept(runtime, [mark(0), mark(1)]) == stored(tmp_path, [mark(0), mark(1)]) == {mark(0)}


# ── --expire ─────────────────────────────────────────────────────────────────────────────────────────────────────────

KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "state": {"sliceable": False},
    "state alone": {"sliceable": False, "kv_bytes_per_token": 0},
    "rigid": {"movable": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("disk", [True, False])
def test_nothing_is_kept_longer(tmp_path: Path, kind: str, disk: bool) -> None:
    """Conversations come, go on and share beginnings, at random; now and then everything that is kept is looked through."""
    clock, dice = Clock(), random.Random(f"{kind} {disk}")
    sent: dict[str, float] = {}  # when a client has sent a mark last
    chats: list[list[dict[str, Any]]] = []
    ids: set[bytes] = set()
    with started(clock, tmp_path if disk else None, KINDS[kind], expire=7 * DAY) as runtime:
        for number in range(24 if SLOW else 16):
            clock.now += dice.choice((0.01, 0.5, 1.0, 3.0)) * DAY
            if chats and dice.random() < 0.5:
                chat = dice.choice(chats[-4:])
            else:
                chat = [system("You are a helpful assistant, and you answer in one sentence.")]
                chats.append(chat)
            chat.append(user(marked(number)))
            sent |= {
                mark(known): clock.now for known in range(number + 1) if any(mark(known) in one["content"] for one in chat)
            }
            answer = ask(runtime, chat, max_tokens=8)
            chat.append(assistant(answer.text))
            settled(runtime)
            due = [known for known, time in sent.items() if time + 7 * DAY <= clock.now]
            assert not kept(runtime, due)
            assert not stored(tmp_path, due)
            runtime.cache.store.check()
            ids |= {entry.id for entry in runtime.cache.index}
        assert due
        clock.now += 7 * DAY
        settled(runtime)
        assert not kept(runtime, list(sent))
        clock.now += DAY
        settled(runtime)
        assert not kept(runtime, [], ids), "nor what it was called"
        assert not stored(tmp_path, list(sent))
        assert len(runtime.cache.memory) == len(runtime.cache.disk) == sum(map(len, runtime.scheduler.slots)) == 0


def test_each_owner_has_a_term_of_its_own(tmp_path: Path) -> None:
    """Also for what was there before it was said; and without it again what everybody has."""
    clock = Clock()
    with started(clock, tmp_path) as runtime:
        for number, salt in enumerate(("alice", "bob", "carol")):
            ask(runtime, [user(marked(number))], salt=salt, max_tokens=4)
        settled(runtime)
        marks = [mark(number) for number in range(3)]
        runtime.keep("alice", DAY)
        runtime.keep("bob", 3 * DAY)
        runtime.keep("carol", DAY)
        runtime.keep("carol", None)
        clock.now += 2 * DAY
        settled(runtime)
        assert kept(runtime, marks) == stored(tmp_path, marks) == {mark(1), mark(2)}
        assert not runtime.due("bob", START)
        clock.now += 2 * DAY
        settled(runtime)
        assert kept(runtime, marks) == stored(tmp_path, marks) == {mark(2)}
        assert runtime.due("bob", START)
        runtime.keep_all(4 * DAY)
        settled(runtime)
        assert not kept(runtime, marks) | stored(tmp_path, marks)


@pytest.mark.parametrize("disk", [True, False])
def test_a_clock_that_was_wrong_does_not_stop_the_looks(tmp_path: Path, disk: bool) -> None:
    clock = Clock(START + 1000 * DAY)
    with started(clock, tmp_path if disk else None, expire=DAY) as runtime:
        settled(runtime)
        clock.now = START
        ask(runtime, [user(marked(0))], max_tokens=4)
        settled(runtime)
        assert kept(runtime, [mark(0)])
        clock.now += DAY
        settled(runtime)
        assert not kept(runtime, [mark(0)]) | stored(tmp_path, [mark(0)])


@pytest.mark.parametrize("whose", ["an owner", "everybody"])
@pytest.mark.parametrize("earlier", [None, DAY], ids=["no term before", "a longer term before"])
def test_a_new_term_wakes_a_server_without_a_disk(whose: str, earlier: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would, until the next request."""
    clock, sleeps = Clock(), list[float | None]()
    with started(clock, None, expire=earlier) as runtime:
        ask(runtime, [user(marked(0))], max_tokens=4)
        settled(runtime)
        works = runtime.scheduler._idle
        monkeypatch.setattr(runtime.scheduler, "_idle", lambda pause: sleeps.append(works(pause)) or sleeps[-1])
        runtime.scheduler.wake()
        wait_until(lambda: sleeps and (sleeps[-1] is None or sleeps[-1] > 1.0))
        clock.now += 2.0
        if whose == "an owner":
            runtime.keep("", 1.0)
        else:
            runtime.keep_all(1.0)
        wait_until(lambda: not kept(runtime, [mark(0)]))


def test_a_key_has_its_term_for_what_other_models_have_left(tmp_path: Path) -> None:
    """Settings and engines are other owners' numbers; whose the text is has not changed."""
    clock = Clock()
    with started(clock, tmp_path, {"seed": 1}) as runtime:
        for number, salt in enumerate(("alice", "bob")):
            ask(runtime, [user(marked(number))], salt=salt, max_tokens=4)
        settled(runtime)
    with started(clock, tmp_path) as runtime:
        runtime.keep("alice", DAY)
        clock.now += DAY
        settled(runtime)
        assert stored(tmp_path, [mark(0), mark(1)]) == {mark(1)}


def test_a_clock_that_is_set_back_does_not_end_the_keeping(tmp_path: Path) -> None:
    clock = Clock(time.time() + 1000 * DAY)
    with started(clock, tmp_path) as runtime:
        with closing(Disk(tmp_path, 1 << 40, clock=clock)) as disk:
            disk.erase([], clock.now)
        wait_until(lambda: runtime.cache.store.terms.before > START)
        clock.now = START
        runtime.scheduler.wake()
        wait_until(lambda: runtime.cache.store.terms.before == START)
        clock.now += 1
        ask(runtime, [user(marked(0))], max_tokens=4)
        settled(runtime)
        assert kept(runtime, [mark(0)]) == stored(tmp_path, [mark(0)]) == {mark(0)}


def test_the_deletions_that_are_known_are_those_that_are_obeyed(tmp_path: Path) -> None:
    clock = Clock()
    counted: list[int] = []
    with started(clock, tmp_path) as runtime:
        runtime.on_erase(lambda erasure: counted.append(runtime.scheduler.expiry.deletion_count))
        ask(runtime, [user(marked(0))], max_tokens=4)
        settled(runtime)
        assert runtime.with_deletions(lambda found: found) == (0.0, 0)
        assert not counted
        with closing(Disk(tmp_path, 1 << 40, clock=clock)) as disk:
            disk.erase([row.label.key for row in disk.catalog.rows()])
        while runtime.with_deletions(lambda found: found == (0.0, 0)):
            time.sleep(0.01)
        assert counted  # the memories of texts have heard of it before
        assert runtime.ends("", START) == math.inf
        runtime.keep("", 20.0)
        assert START < runtime.ends("", START) < START + 20.0
    with started(clock, tmp_path) as runtime:
        assert runtime.with_deletions(lambda found: found is not None and found[1] == 1)
    with started(clock) as runtime:
        assert runtime.with_deletions(lambda found: found) == (0.0, 0)


def test_what_is_younger_stays(tmp_path: Path) -> None:
    """A conversation that goes on loses its beginning, and what others share with it only until that is computed again.

    Where turns are settled, the block in which two conversations part is as old as what they share.
    """
    clock = Clock()
    text = system("You are a helpful assistant. " * 4)
    with started(clock, tmp_path, expire=10 * DAY, settle="off") as runtime:
        ask(runtime, [text, user(marked(0))], max_tokens=4)
        settled(runtime)
        clock.now += 6 * DAY
        for number in (1, 2):
            assert ask(runtime, [text, user(marked(number))], max_tokens=4).report.cached > 100
        settled(runtime)
        clock.now += 5 * DAY
        settled(runtime)
        assert stored(tmp_path, [mark(number) for number in range(3)]) == {mark(1), mark(2)}
        assert ask(runtime, [text, user(marked(1))], max_tokens=4).report.cached == 0
        settled(runtime)
        again = ask(runtime, [text, user(marked(2))], max_tokens=4).report
        assert again.cached >= again.prompt - 16, "its own blocks were still there"


def test_what_a_request_stands_on_goes_when_it_ends(tmp_path: Path) -> None:
    clock = Clock()
    with started(clock, tmp_path, {"delay": 0.02}, expire=DAY, settle="off") as runtime:
        chat = [user(marked(0))]
        ask(runtime, chat, max_tokens=4)
        settled(runtime)
        clock.now += 0.7 * DAY
        pending = submit(runtime, [*chat, assistant("So be it."), user(marked(1))], max_tokens=40)
        pending.until(Started)
        clock.now += 0.4 * DAY  # while it runs
        runtime.scheduler.wake()
        assert pending.answer().report.cached > 0
        settled(runtime)
        assert stored(tmp_path, [mark(0), mark(1)]) == {mark(1)}, "the other was sent again, but kept since before"
        assert not sum(map(len, runtime.scheduler.slots))


def test_a_quotation_is_as_old_as_what_it_quotes() -> None:
    """The explanation of a later request shows some characters of an earlier one."""
    clock, rest = Clock(), user("The rest of the conversation, which is the same and long enough to be missed. " * 3)
    with started(clock, expire=7 * DAY) as runtime:
        ask(runtime, [system(f"Today is {marked(0)}"), rest])
        clock.now += 4 * DAY
        explanation = ask(runtime, [system(f"Today is {marked(1)}"), rest]).report.explanation
        assert explanation is not None
        assert mark(0) in explanation.previous
        explanation = None
        settled(runtime)
        assert kept(runtime, [mark(0), mark(1)]) == {mark(0), mark(1)}
        clock.now += 4 * DAY
        settled(runtime)
        assert kept(runtime, [mark(0)]) == set()


def test_what_is_restored_is_as_old_as_it_was(tmp_path: Path) -> None:
    """Also what is computed anew when idle: it is the text of a turn before."""
    clock, one, two = Clock(), [user(marked(1))], [user(marked(2))]
    with started(clock, tmp_path, {"slots": 1}) as runtime:
        (slot,) = runtime.scheduler.slots
        ask(runtime, one, max_tokens=4)
        clock.now += DAY  # before it is settled
        settled(runtime)
        assert {entry.written for entry in runtime.cache.index} == {START}
        ask(runtime, two, max_tokens=4)
        settled(runtime)
        clock.now += DAY
        assert ask(runtime, [*one, assistant("So be it."), user(marked(3))], max_tokens=4).report.restored > 40
        settled(runtime)
        assert (slot.written(0, 40), slot.written(80)) == (START, START + 2 * DAY)
    with started(clock, tmp_path, {"slots": 1}) as runtime:
        clock.now += DAY
        assert ask(runtime, one, max_tokens=4).report.tiers["disk"] > 40
        assert runtime.scheduler.slots[0].written(0, 40) == START


def test_no_tokens_are_not_old() -> None:
    slot = Slot(0, Shape(1, 400, 8, 1, 0), 8)
    slot.assign(Chain(b"r" * 32, 8, as_tokens([1])), 1, 0, [(1, 8.0)])
    slot.extend(as_tokens([]), canonical=True)
    slot.begin(0.0, UNKNOWN_REQUEST, 2.0)
    slot.append(1, canonical=True)
    assert slot.written() == 2.0


@given(st.lists(st.tuples(st.sampled_from(("extend", "append", "truncate", "assign", "begin")), st.integers(0, 40))), st.data())
def test_a_slot_knows_how_old_each_of_its_tokens_is(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    slot, times, now = Slot(0, Shape(1, 400, 8, 1, 0), 8), list[float](), 0.0
    for what, number in steps:
        if what == "extend" and len(slot) + number <= 400:
            slot.extend(as_tokens(range(number)), canonical=True)
            times += [now] * number
        elif what == "append" and len(slot) < 400:
            slot.append(1, canonical=True)
            times.append(now)
        elif what == "truncate":
            slot.truncate(min(number, len(slot)))
            del times[number:]
        elif what == "assign":
            chain = Chain(b"r" * 32, 8, as_tokens(range(number)))
            pieces = [(min(end, number), float(end)) for end in range(8, number + 8, 8)]
            slot.assign(chain, number, 0, pieces)
            times = [float(at // 8 * 8 + 8) for at in range(number)]
        elif what == "begin":
            now = float(number)
            slot.begin(0.0, UNKNOWN_REQUEST, now)
        assert len(slot) == len(times)
        start, stop = sorted((data.draw(st.integers(0, len(slot))), data.draw(st.integers(0, len(slot)))))
        assert slot.written(start, stop) == min(times[start:stop], default=math.inf)
        assert slot.written() == min(times, default=math.inf)
        assert not slot._buffer[len(slot) :].any(), "what was forgotten is still there"


OWNERS = b"alice---", b"bob-----", b"carol---"


def chains(blocks: list[tuple[int, int, int]], begin: int = 0) -> Iterator[Entry]:
    """Chains of three blocks and a checkpoint: of an owner, the first two with an age in days, and the last."""
    for number, (owner, first, last) in enumerate(blocks, begin):
        chain = Chain(OWNERS[owner] + bytes(24), 8, as_tokens([number] * 24))
        for at, age in enumerate((first, first, last)):
            written = START - age * DAY
            parent, tokens = chain.parent_of(at), chain.block(at)
            yield Entry(chain.ids[at], parent, tokens, 8 * at, owner=OWNERS[owner], written=written)
        state, oldest = checkpoint_id(chain.ids[-1]), START - max(first, last) * DAY
        yield Entry(state, chain.ids[-1], tokens, 16, state=True, owner=OWNERS[owner], written=oldest)


def put(runtime: Runtime, entry: Entry) -> None:
    store = runtime.cache.store
    cell = store.memory_budget.take(entry, store.clock(), needed=True)
    assert cell is not None
    store.publish(entry, cell, store.clock(), canonical=True)


@given(
    blocks=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 20)), max_size=30),
    terms=st.dictionaries(st.sampled_from(OWNERS), st.integers(1, 18)),
    between=st.lists(st.integers(0, 3), max_size=60),
)
@effort.examples(120)
def test_portions_delete_exactly_what_a_whole_pass_deletes(
    blocks: list[tuple[int, int, int]], terms: dict[bytes, int], between: list[int]
) -> None:
    """Whatever comes and goes between them. What comes is younger than any term."""
    with started(Clock(), None, {"sliceable": False}, settle="off", explain="off", expire=19 * DAY) as runtime:
        store, expiry, work = runtime.cache.store, runtime.scheduler.expiry, runtime.scheduler.portions
        later = chains([(number % 3, 0, 0) for number in range(len(between))], 1000)

        def whole() -> None:
            while work.step():  # the look of the start
                pass
            for entry in chains(blocks):
                put(runtime, entry)
            for owner, days in terms.items():
                store.terms.give(owner, days * DAY, START)
            stays = {entry.id for entry in runtime.cache.index if not store.spent(entry)}
            expiry._looked = -math.inf
            expiry.step()
            changes = iter(between)
            while work.pending:
                work._piece()
                for _ in range(next(changes, 0)):
                    if (entry := next(later, None)) is not None:
                        put(runtime, entry)
                        stays.add(entry.id)
            gone = {entry.id for entry in chains(blocks)} - stays
            # A checkpoint goes with its block, which is younger than the oldest text before it or as old.
            assert {entry.id for entry in runtime.cache.index} == stays
            assert all(store.retention.last_use(key) is None for key in gone)
            assert not gone & {*store.retention._ghosts}
            store.check()

        runtime.scheduler.call(whole).result(60)


def test_what_is_due_is_not_loaded_while_a_failing_disk_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can still be read, and nothing can be deleted."""
    clock, chat = Clock(), [user(marked(0))]
    with started(clock, tmp_path, settle="off", expire=7 * DAY) as runtime:
        ask(runtime, chat, max_tokens=4)
        settled(runtime)

        def fails(*_: object) -> None:
            raise OSError(errno.EROFS, "read-only")

        monkeypatch.setattr(Disk, "expire", fails)
        clock.now += 7 * DAY
        assert ask(runtime, chat, max_tokens=4).report.cached == 0
        assert stored(tmp_path, [mark(0)])
    with started(clock, tmp_path, settle="off", expire=7 * DAY) as runtime:
        assert ask(runtime, chat, max_tokens=4).report.cached == 0


def test_nothing_is_loaded_between_two_pieces_of_a_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither into a slot that a request takes meanwhile, nor is anything of it left in the end."""
    clock = Clock()
    with started(clock, None, {"slots": 2}, settle="off", explain="off") as runtime:
        prompt = runtime.text_prompt(f"{mark(0)} " * 40)
        Pending(runtime, Request(prompt, GenerationParams(max_tokens=0))).answer()
        settled(runtime)
        chain, dropped, found = runtime.stored.all()[0], list[bytes](), list[int]()
        asked = Chain(root_id(runtime.engine.fingerprint, ""), 8, prompt.tokens)
        drop = expiry_module.Expiry._drop

        def slowly(expiry: expiry_module.Expiry, key: bytes) -> None:
            drop(expiry, key)
            dropped.append(key)
            if len(dropped) == 3:  # on the engine thread, as its next step would
                held = runtime.scheduler._admission.choose(asked, runtime._mode)
                restored = runtime.cache.kv_restore.restore(runtime.scheduler.slots[1], asked, held)
                found.append(-1 if restored is None else restored.plan.start)

        monkeypatch.setattr(expiry_module.Expiry, "_drop", slowly)
        assert runtime.stored.delete(chain.id, None).entries > 3
        assert found == [0]
        settled(runtime)
        assert kept(runtime.cache, [mark(0)]) == set()
        assert not runtime.cache.store.barred


# ── deleted by somebody's wish ───────────────────────────────────────────────────────────────────────────────────────


def cache(*arguments: str, folder: Path) -> None:
    """`headstart cache`, beside the server."""
    with pytest.raises(SystemExit) as end:
        main(["cache", *arguments, "--cache-dir", str(folder)])
    assert end.value.code == 0


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"rigid"}))  # which has nothing on disk
def test_a_running_server_forgets_what_is_deleted(tmp_path: Path, kind: str) -> None:
    """All of it, or what is old. Nothing comes back, whatever the server had in memory and in its slots."""
    clock = Clock()
    clock.now = time.time() - 10 * DAY
    marks = [mark(number) for number in range(4)]
    with started(clock, tmp_path, KINDS[kind]) as runtime:
        for number in range(2):
            ask(runtime, [user(marked(number))], salt=f"s{number}", max_tokens=4)
        settled(runtime)
        clock.now += 9 * DAY
        ask(runtime, [user(marked(2))], max_tokens=4)
        settled(runtime)
        cache("rm", "--older-than", "5d", folder=tmp_path)
        wait_until(lambda: not kept(runtime, marks[:2]))
        assert kept(runtime, marks) == stored(tmp_path, marks) == {mark(2)}
        ask(runtime, [user(marked(3))], max_tokens=4)
        settled(runtime)
        clock.now = time.time() - 1
        cache("rm", "--all", folder=tmp_path)
        wait_until(lambda: not kept(runtime, marks))
        settled(runtime)
        assert not stored(tmp_path, marks)
        runtime.cache.store.check()
        clock.now = time.time() + 1
        assert ask(runtime, [user(marked(3))], max_tokens=4).report.cached == 0
        settled(runtime)
        assert kept(runtime, marks) >= {mark(3)}, "it was sent again"


def tokens_of(chain: StoredChain) -> list[int]:
    return [token for row in chain.rows for token in row.label.tokens]


def test_a_running_server_forgets_a_chain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = system("You are a helpful assistant. " * 4)
    with started(Clock(), tmp_path, {"delay": 0.02}) as runtime:
        for number in range(3):
            ask(runtime, [text, user(marked(number))], salt="s", max_tokens=4)
        settled(runtime)
        capsys.readouterr()
        cache("ls", "--json", folder=tmp_path)
        ends = [chain["id"] for chain in json.loads(capsys.readouterr().out)]
        with closing(Disk(tmp_path, 1 << 40)) as disk:
            chains = StoredChains(disk.catalog.rows())
        said = {end: "".join(map(chr, tokens_of(chains.of(bytes.fromhex(end))))) for end in ends}
        (end,) = [end for end, text in said.items() if mark(1) in text]
        pending = submit(runtime, [text, user(marked(1))], salt="s", max_tokens=60)  # it is in use when it is deleted
        pending.until(Started)
        cache("rm", end, folder=tmp_path)
        pending.answer()
        marks = [mark(number) for number in range(3)]
        del pending
        wait_until(lambda: kept(runtime, marks) == {mark(0), mark(2)})
        settled(runtime)
        assert stored(tmp_path, marks) == {mark(0), mark(2)}
        runtime.cache.store.check()
        assert ask(runtime, [text, user(marked(2))], salt="s", max_tokens=4).report.cached > 150


@pytest.mark.parametrize("running", [False, True])
def test_a_deleted_text_is_not_quoted(running: bool) -> None:
    """Neither by the explanation of a later request, nor by that of one that runs while it is deleted."""
    rest = user("The rest of the conversation, which is the same and long enough to be missed. " * 3)
    with started(Clock(), None, {"delay": 0.02}) as runtime:
        for number in (2, 0):  # what both begin with is not deleted
            ask(runtime, [system(f"Today is {marked(number)}"), rest], max_tokens=1)
        settled(runtime)
        chain = runtime.stored.all()[0]
        later = submit(runtime, [system(f"Today is {marked(1)}"), rest], max_tokens=40 if running else 1)
        event = later.until(Started) if running else later.answer().finish
        assert mark(0) in event.report.explanation.previous
        runtime.stored.delete(chain.id, None)
        if running:
            later.answer()
        del later, event
        settled(runtime)
        assert kept(runtime, [mark(0), mark(2)]) == {mark(2)}


def test_a_tombstone_that_is_read_while_an_earlier_one_is_obeyed_is_obeyed_too() -> None:
    """Another deletion takes the notices of the disk, just before the last piece of the walk."""
    with started(Clock(), settle="off") as runtime:
        ask(runtime, [user(marked(0))], salt="alice", max_tokens=4)
        settled(runtime)
        store, expiry = runtime.cache.store, runtime.scheduler.expiry

        def together() -> None:
            store.offload._erase_owners([runtime.owner("bob")])
            expiry.step()
            store.offload._erase_owners([runtime.owner("alice")])
            runtime.scheduler.portions.finish()
            assert not any(map(store.usable, runtime.cache.index))

        runtime.scheduler.call(together).result(30)
        settled(runtime)
        assert kept(runtime, [mark(0)]) == set()


def test_an_open_tail_goes_with_its_chain(tmp_path: Path) -> None:
    """It is only in memory, and hangs on a block that is deleted on disk. That of another owner stays."""
    marks = [mark(0), mark(1)]
    with started(Clock(), tmp_path, settle="off", explain="off") as runtime:
        ends = list[bytes]()
        for one, salt in zip(marks, ("alice", "bob"), strict=True):
            text = f"{one[::-1]:.<24}12{one}"  # behind three whole blocks, which say it backwards
            prompt = runtime.text_prompt(text, salt=salt)
            assert Pending(runtime, Request(prompt, GenerationParams(max_tokens=0))).answer().finish.reason == "length"
            ends.append(Chain(root_id(runtime.engine.fingerprint, salt), 8, prompt.tokens).ids[-1])
        settled(runtime)
        for slot in runtime.scheduler.slots:
            assert runtime.erase(slot.number) is not None
        assert kept(runtime.cache, marks) == {*marks}
        assert stored(tmp_path, marks) == set()
        cache("rm", ends[0].hex(), folder=tmp_path)
        wait_until(lambda: kept(runtime.cache, marks) == {mark(1)})
        runtime.cache.store.check()


def test_a_deletion_looks_only_for_what_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at everything that is stored: replies wait for it."""
    with started(Clock(), settle="off", explain="off") as runtime:
        for number in range(2):
            ask(runtime, [user(marked(number))], max_tokens=4)
        settled(runtime)
        chain = runtime.stored.all()[0]
        with monkeypatch.context() as patch:
            patch.setattr(Index, "__iter__", None)
            patch.setattr(Memory, "__iter__", None)
            assert runtime.stored.delete(chain.id, None).entries
        settled(runtime)
        assert kept(runtime, [mark(0), mark(1)]) == {mark(0)}
        runtime.cache.store.check()


def test_a_look_between_the_notices_of_a_deletion_loses_nothing() -> None:
    """Which entries are gone is found piece by piece; that a user has deleted them is known afterwards."""
    with started(Clock(), settle="off", expire=7 * DAY) as runtime:
        ask(runtime, [user(marked(0))], max_tokens=4)
        settled(runtime)
        offload, expiry = runtime.cache.store.offload, runtime.scheduler.expiry

        def first() -> None:
            offload.erased |= {entry.id for entry in runtime.cache.index}
            expiry.step()
            expiry._looked -= runtime.cache.store.terms.look
            expiry.step()

        def second() -> None:
            offload._erase_owners([runtime.owner("")])
            expiry.step()

        runtime.scheduler.call(first).result(30)
        runtime.scheduler.call(second).result(30)
        settled(runtime)
        assert kept(runtime, [mark(0)]) == set()


def test_an_entry_on_its_way_to_the_disk_outlives_the_end_of_an_older_one(tmp_path: Path) -> None:
    """The disk deletes a chain that is due while the same one, which was computed again, is on its way there."""
    with started(Clock(), tmp_path, settle="off") as runtime:
        ask(runtime, [user(marked(0))], max_tokens=4)
        settled(runtime)
        offload, index, disk = runtime.cache.store.offload, runtime.cache.index, runtime.cache.disk
        assert isinstance(disk, WriteBehind)
        keys = [entry.id for entry in index if disk.name in entry.copies]

        def again() -> None:
            for key in keys:
                offload.gone(key)
                offload.offer(index.get(key))
            assert offload.writing.keys() == {*keys}
            offload._notices.extendleft(map(ObjectErased, keys))
            offload.take_notices(len(keys))
            runtime.scheduler.expiry.step()

        runtime.scheduler.call(again).result(30)
        settled(runtime)
        assert {entry.id for entry in index if disk.name in entry.copies} == {*keys}
        with closing(Disk(tmp_path, 1 << 30)) as there:
            assert {*there.catalog.keys()} == {*keys}


def test_what_the_disk_has_deleted_and_refuses_is_dropped(tmp_path: Path) -> None:
    """Another process has deleted it while another copy was on its way. It is not offered again."""
    with started(Clock(), tmp_path, settle="off") as runtime:
        ask(runtime, [user(marked(0))], max_tokens=4)
        settled(runtime)
        store, disk = runtime.cache.store, runtime.cache.disk.name
        entry = next(entry for entry in runtime.cache.index if disk in entry.copies)

        def refused() -> None:
            store.offload.writing[entry.id] = entry
            entry.holds += 1
            store.offload._notices += ObjectErased(entry.id), ObjectRefused(store.label(entry, True), "outdated")
            store.offload.take_notices()
            assert (entry.holds, store.offload.writing, store.offload._queued) == (0, {}, {})
            runtime.scheduler.expiry.step()

        runtime.scheduler.call(refused).result(30)
        settled(runtime)
        assert runtime.cache.index.get(entry.id) is None


def test_what_memory_has_to_drop_is_not_offered(tmp_path: Path) -> None:
    """It waited for the disk, which has just deleted it."""
    with started(Clock(), tmp_path, settle="off") as runtime:
        ask(runtime, [user(marked(0))], max_tokens=4)
        settled(runtime)
        offload, disk = runtime.cache.store.offload, runtime.cache.disk.name
        entry = next(entry for entry in runtime.cache.index if disk in entry.copies)

        def erased() -> None:
            offload._notices.append(ObjectErased(entry.id))
            offload._queued[entry.id] = entry
            offload.take_notices()
            assert entry.id not in offload.writing
            runtime.scheduler.expiry.step()
            offload.flush()
            assert entry.id not in offload.writing

        runtime.scheduler.call(erased).result(30)
        settled(runtime)
        assert runtime.cache.index.get(entry.id) is None


def test_what_is_over_here_may_be_younger_on_disk(tmp_path: Path) -> None:
    """Another server has stored it later. So the disk is asked; while it is barred, what the disk says is not heard."""
    with started(Clock(), tmp_path, settle="off") as runtime:
        ask(runtime, [user(marked(0))], max_tokens=4)
        settled(runtime)
        store, index, disk = runtime.cache.store, runtime.cache.index, runtime.cache.disk.name
        keys = [entry.id for entry in index if disk in entry.copies]

        def on_disk() -> set[bytes]:
            return {entry.id for entry in index if disk in entry.copies}

        def over() -> None:
            for key in keys:
                store.offload.over(key)
            assert not on_disk()

        runtime.scheduler.call(over).result(30)
        wait_until(lambda: on_disk() == {*keys})

        def barred() -> Future[None]:
            store.barred.add(keys)
            for key in keys:
                store.offload.gone(key)
            return store.disk.report(keys)

        runtime.scheduler.call(barred).result(30).result(30)
        runtime.scheduler.call(store.offload.take_notices).result(30)
        assert not on_disk()
        runtime.scheduler.call(lambda: store.barred.lift(keys)).result(30)
        wait_until(lambda: on_disk() == {*keys})
