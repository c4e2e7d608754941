"""What is computed of each prompt where rows are not all there is: hybrids, sliding windows, models of state only.

`O`: what an infinite cache would compute; a text that was left in its middle for the first time may cost as much more as lies
between that place and the nearest point of the lattice before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from harness import Answer, Messages, Oracle, Pending, ask, assistant, check, converse, speak_plainly, submit, system, user
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.interfaces.engine import Engine
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.landmarks import Landmarks
from headstart.interfaces.sampling import GREEDY
from headstart.interfaces.tokens import Tokens, as_tokens, common_prefix
from headstart.prefix_cache.blocks import Chain, checkpoint_id, root_id
from headstart.prefix_cache.checkpoints import GAP
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.prompt.builder import Prompt
from headstart.serving import settle
from headstart.serving.request import Progress, Request
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from histories import cold_logits
from talks import talk

HEADER = 24
"""Most tokens of what a template writes around a message, and before a reply."""
SYSTEM = "You answer in the words of the house. "
MEMORY = 96 << 20

KINDS = ("fake", "pure", "qwen35", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3", "lfm2", "mamba2")))
"""Two fakes, with rows and without; real ones by their architecture: engines/test_state is about them all."""

Make = Callable[..., Runtime]


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "AFTER", 3600.0)


def build(kind: str, folder: Path, mode: str = "fast", slots: int = 4, **options: Any) -> Runtime:
    options = {"memory_budget": MEMORY} | options
    engine: Engine
    if kind in ("fake", "pure"):
        engine = FakeEngine(
            slots=slots, ctx=8192, block_size=16, sliceable=False, kv_bytes_per_token=0 if kind == "pure" else 16
        )
        return Runtime(lambda: engine, Settings(reuse=mode, **options))  # type: ignore[arg-type]
    path = folder / f"{kind}.gguf"
    if not path.exists():
        tiny.write(path, kind)
    settings = Settings(str(path), ctx=4096, slots=slots, threads=1, reuse=mode, **options)  # type: ignore[arg-type]
    return Runtime(lambda: speak_plainly(LlamaEngine.load(settings.engine_options(), block_size=64)), settings)


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.getbasetemp()
    return lambda *args, **options: build(request.param, folder, *args, **options)


def prelude(rt: Runtime) -> str:
    """A system prompt of some blocks."""
    return SYSTEM * (2 if isinstance(rt.engine, FakeEngine) else 16)


def block_size(rt: Runtime) -> int:
    return rt.engine.traits.block_size


def test_the_trait_is_what_these_tests_are_about(make: Make) -> None:
    with make() as rt:
        assert rt.engine.traits.stateful
        assert rt.engine.shape.state_bytes > 0


def test_retention_is_told_of_a_request_by_rows_and_checkpoints(make: Make) -> None:
    with make(slots=2) as rt:
        messages = [system(prelude(rt)), user("a question")]
        reply = ask(rt, messages, max_tokens=40, ignore_eos=True)
        for other in range(2):
            ask(rt, [user(f"{other} something else entirely")])
        prompt = rt.chat_prompt(talk(messages))
        ids = Chain(root_id(rt.engine.fingerprint, prompt.salt), block_size(rt), prompt.tokens).ids
        held = [entry for entry in rt.cache.index if entry.id in {*ids, *map(checkpoint_id, ids)}]
        assert any(entry.state for entry in held)
        request_traits = {
            rt.cache.store.retention.request_traits(entry.id) for entry in held if rt.cache.memory.name in entry.copies
        }
        pieces = (len(prompt.tokens) + reply.report.completion - 1) // block_size(rt)
        expected = RequestTraits.of(pieces, new=len(prompt.tokens), siblings=-1, reply=reply.report.completion, called=False)
        assert request_traits == {expected}


# ── reuse ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("words", [1, 40])
def test_a_plain_chat_goes_on_for_its_new_tokens(make: Make, words: int) -> None:
    """Fault: no checkpoint under 8,192 (or 64) tokens, none for single messages: 0, 37, 57 % reused."""
    with make() as rt:
        oracle, chat = Oracle(), Messages()
        for turn in range(8):
            answer, expected = converse(rt, oracle, chat, f"question {turn} " * words)
            assert answer.report.computed <= 1.02 * expected + 8
            assert turn == 0 or answer.report.live


def test_a_chat_that_lost_its_slot(make: Make) -> None:
    with make(slots=2) as rt:
        oracle, chat = Oracle(), [system(prelude(rt))]
        for turn in range(4):
            answer, expected = converse(rt, oracle, chat, f"question {turn}", max_tokens=70, ignore_eos=True)
            assert answer.report.computed <= 1.02 * expected + HEADER + block_size(rt)
            for other in range(2):
                ask(rt, [user(f"{turn} {other} something else entirely")])


def test_exact_mode_pays_for_the_last_reply(make: Make) -> None:
    with make("exact", slots=2) as rt:
        oracle, chat = Oracle(), [system(prelude(rt))]
        for turn in range(4):
            answer, expected = converse(rt, oracle, chat, f"question {turn}", max_tokens=40, ignore_eos=True)
            assert answer.report.computed <= expected + 40 + HEADER + block_size(rt)


def test_new_chats_under_one_system_prompt(make: Make) -> None:
    """Fault: a shared system prompt is never shared."""
    with make() as rt:
        oracle = Oracle()
        for number in range(6):
            answer, expected = converse(rt, oracle, [system(prelude(rt))], f"{number} is my question")
            assert answer.report.computed <= 1.02 * expected + block_size(rt)
            assert number == 0 or expected < answer.report.prompt / 2


def test_four_at_once_with_a_shared_prefix(make: Make) -> None:
    """Fault: a busy prefix cannot be shared."""
    with make() as rt:
        chats: list[Messages] = [[system(prelude(rt)), user(f"{number} is my question")] for number in range(4)]
        pending = [submit(rt, chat) for chat in chats]
        answers = [each.answer() for each in pending]
        alone = min(answer.report.prompt for answer in answers)
        shared = min(common_prefix(answers[0].prompt, answer.prompt) for answer in answers[1:])
        assert sum(answer.report.computed for answer in answers) <= 4 * (alone - shared + block_size(rt)) + 1.02 * shared


def test_many_users_on_few_slots(make: Make) -> None:
    with make() as rt:
        oracle = Oracle()
        chats: list[Messages] = [[system(prelude(rt))] for _ in range(16)]
        for turn in range(3):
            for number, chat in enumerate(chats):
                answer, expected = converse(rt, oracle, chat, f"{chr(65 + number)} is who asks question {turn}")
                assert answer.report.computed <= 1.02 * expected + block_size(rt)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_regenerate(make: Make, mode: str) -> None:
    with make(mode) as rt:
        oracle, chat = Oracle(), [system(prelude(rt))]
        for turn in range(3):
            converse(rt, oracle, chat, f"question {turn}", max_tokens=40, ignore_eos=True)
        for _ in range(2):
            again = ask(rt, chat[:-1])
            assert again.report.computed <= block_size(rt)


def test_a_cancelled_prompt_is_not_computed_again(make: Make) -> None:
    """Fault: a timeout throws the prefill away, so the retry times out again, for ever."""
    with make(slots=1) as rt:
        rt.scheduler.prefill.patience = 0.0  # a call a block
        chat = [system(prelude(rt) * 4), user("go")]
        pending = submit(rt, chat)
        total = len(pending.request.prompt)
        done = 0
        while done < 0.7 * total:
            event = pending.next()
            assert isinstance(event, Progress)
            done = event.done
        pending.handle.cancel()
        ask(rt, [user("another takes the slot")])
        retry = ask(rt, chat)
        assert retry.report.computed <= total - done + block_size(rt)


def lattice_gap(before: int) -> int:
    """Most tokens between a place with `before` tokens of its line behind it and the point of the lattice before it."""
    return GAP if before < 4 * GAP else before


def test_first_divergence_costs_the_way_to_the_lattice_and_only_once(make: Make) -> None:
    """An edit in the middle, a changed line in the system prompt, another question about the same document."""
    with make() as rt:
        lines = [f"Rule {number}: {prelude(rt)}" for number in range(8)]
        document = prelude(rt) * 4
        chat = [system("\n".join(lines)), user(document + "What is it about?")]
        chat.append(assistant(ask(rt, chat).text))
        chat += [user("And then?")]
        chat.append(assistant(ask(rt, chat).text))
        changed = [system("\n".join([*lines[:5], "Rule 5: none", *lines[6:]])), *chat[1:4]]
        variants: list[list[Messages]] = [
            [[*chat[:2], chat[2], user(f"Now it is {word}")] for word in ("one", "two", "three")],
            [[changed[0], user(f"{word} is my question")] for word in ("one", "two")],
            [[chat[0], user(document + f"{word} is the question?")] for word in ("one", "two", "three")],
        ]
        oracle = Oracle([np.concatenate([rt.chat_prompt(talk(chat[:-1])).tokens, rt.chat_prompt(talk(chat)).tokens[:0]])])
        for branch in variants:
            for number, messages in enumerate(branch):
                answer = ask(rt, messages)
                expected = oracle.cost(answer.prompt)
                oracle.learn(answer)
                whole = len(rt.chat_prompt(talk(chat)))
                extra = block_size(rt) if number else lattice_gap(whole - len(answer.prompt) + expected) + block_size(rt)
                assert answer.report.computed <= 1.02 * expected + extra + HEADER


def test_every_landmark_of_the_prompt_keeps_its_checkpoint() -> None:
    """The generation header and the client's breakpoints too, where no point of the lattice is."""
    with build("fake", Path()) as rt:
        landmarks = Landmarks(anchor=32, turn=64, header=186, breakpoints=(100,))
        prompt = Prompt("", as_tokens(range(5, 205)), landmarks=landmarks)
        Pending(rt, Request(prompt, GenerationParams(GREEDY, max_tokens=1))).answer()
        ids = Chain(root_id(rt.engine.fingerprint, ""), block_size(rt), prompt.tokens).ids
        held = [16 * number for number, key in enumerate(ids, 1) if rt.cache.index.checkpoint(key, canonical_only=True)]
        assert {*held} >= {32, 64, 96, 176, 192}


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def checkpoints(rt: Runtime, tokens: Tokens) -> int:
    """How many memory holds on the line of `tokens`, those of open tails included."""
    chain = Chain(root_id(rt.engine.fingerprint, ""), block_size(rt), tokens)
    line = set(chain.ids)
    rows = [entry for entry in rt.cache.index if not entry.state]
    pieces = [entry for entry in rows if entry.id in line or (entry.parent in line and len(entry.tokens) < block_size(rt))]
    states = [rt.cache.index.checkpoint(entry.id, canonical_only=False) for entry in pieces]
    return sum(state is not None and rt.cache.memory.name in state.copies for state in states)


def test_a_growing_chat_keeps_few_checkpoints_and_each_row_once(make: Make) -> None:
    """Fault: nested snapshots; dozens of checkpoints of one chat."""
    with make(slots=2) as rt:
        chat = [system(prelude(rt))]
        for turn in range(12):
            chat.append(user(f"question {turn} " * 6))
            answer = ask(rt, chat, max_tokens=30, ignore_eos=True)
            chat.append(assistant(answer.text))
            if turn % 3 == 2:
                for other in range(2):  # take both slots
                    ask(rt, [user(f"{other}")], max_tokens=1)
            length = answer.report.prompt + answer.report.completion
            assert checkpoints(rt, answer.prompt) <= 6 + log2(max(length, GAP) / GAP)
        rows = [entry for entry in rt.cache.index if not entry.state]
        assert len({(entry.parent, entry.tokens.tobytes()) for entry in rows}) == len(rows)


def test_an_evicted_checkpoint_takes_its_rows_along() -> None:
    """Rows behind the last checkpoint of a line are of no use: they must not fill the memory."""
    cell, state = 16 * 16, 48
    engine = FakeEngine(slots=1, ctx=4096, block_size=16, sliceable=False, kv_bytes_per_token=16)
    with Runtime(lambda: engine, Settings(memory_budget=60 * cell + 10 * state)) as rt:
        for number in range(30):
            ask(rt, [user(f"{number} is a conversation of its own, and this is all of it. " * 2)])
        index, name = rt.cache.index, rt.cache.memory.name
        rows = [entry for entry in index if not entry.state and name in entry.copies]
        useful = set()
        for entry in index:
            if entry.state:
                piece = index.get(entry.parent)
                while piece is not None:
                    useful.add(piece.id)
                    piece = index.get(piece.parent)
        assert rt.cache.store.counters["evicted"] > 20
        assert sum(entry.id not in useful for entry in rows) <= 12


# ── the naive ways, and why they are not taken ───────────────────────────────────────────────────────────────────────


def logits_of(rt: Runtime, chat: Messages) -> tuple[bytes, Answer]:
    answer = ask(rt, chat, keep_logits=True, max_tokens=1)
    assert answer.logits is not None
    return answer.logits.tobytes(), answer


def cold_of(make: Make, chat: Messages) -> bytes:
    with make("exact", slots=1) as cold:
        return cold_logits(cold.engine, cold.chat_prompt(talk(chat)).tokens)


@pytest.mark.parametrize("naive", [False, True])
def test_a_checkpoint_from_a_later_state_shows(make: Make, naive: bool) -> None:
    """Fault: checkpoints cut after generation from the final state, rows trimmed: tests of `cached_tokens` stay green."""
    chat = [system(""), user("What is it?")]
    with make("exact", slots=2) as rt:
        chat[0] = system(prelude(rt) * 2)
        tokens = rt.chat_prompt(talk(chat)).tokens
        ask(rt, chat, max_tokens=30, ignore_eos=True)
        for other in range(2):
            ask(rt, [user(f"{other}")], max_tokens=1)
        chain = tokens[: (len(tokens) - 1) // block_size(rt) * block_size(rt)]
        if naive:
            spoil(rt, [system(prelude(rt) * 2), user("Another, and rather longer, question: what is it not?")], chain)
        warm, answer = logits_of(rt, chat)
        assert answer.report.restored >= len(chain)
    assert (warm == cold_of(make, chat)) is not naive


def spoil(rt: Runtime, chat: Messages, chain: Tokens) -> None:
    """Puts the state of another text of that length in the place of the checkpoint at the end of `chain`."""
    entry = next(
        e for e in rt.cache.index if e.state and e.stop == len(chain) and e.tokens.tobytes() == chain[e.start :].tobytes()
    )
    data = rt.cache.memory.read(entry.id)
    assert data is not None
    other = np.array(chain)
    other[0] += 1
    engine = rt.engine
    done = threading.Event()

    def swap() -> None:  # on the engine's thread, between two requests
        engine.truncate(0, 0)
        for at in range(0, len(other), block_size(rt)):
            engine.prefill(0, other[at : at + block_size(rt)], logits=False)
        engine.export_checkpoint(0, data)
        rt.scheduler.slots[0].truncate(0)
        engine.truncate(0, 0)
        done.set()

    original = rt.cache.store.offload.take_notices

    def once() -> bool:
        if not done.is_set():
            swap()
        return original()

    rt.cache.store.offload.take_notices = once  # type: ignore[method-assign]
    rt.scheduler.wake()
    assert done.wait(30)


def test_stale_state_does_not_leak_into_the_next_request(make: Make) -> None:
    """Fault: a recurrent state that outlives its request."""
    with make("exact", slots=1) as rt:
        ask(rt, [user("The first one says a lot. " * 20)], max_tokens=20, ignore_eos=True)
        warm, answer = logits_of(rt, [user("A second one.")])
        assert answer.report.cached == 0
    assert warm == cold_of(make, [user("A second one.")])


def test_two_branches_do_not_change_each_other(make: Make) -> None:
    """Fault: a cache returned by reference, mutated by two branches at once."""
    with make("exact") as rt:
        base = [system(prelude(rt))]
        ask(rt, [*base, user("zero")], max_tokens=1)
        pending = [submit(rt, [*base, user(f"{word} " * 30)], keep_logits=True, max_tokens=30) for word in ("one", "two")]
        answers = [each.answer() for each in pending]
        found = [answer.logits.tobytes() for answer in answers if answer.logits is not None]
        again = [logits_of(rt, [*base, user(f"{word} " * 30)])[0] for word in ("one", "two")]
    for word, first, second in zip(("one", "two"), found, again, strict=True):
        assert first == second == cold_of(make, [system(base[0]["content"]), user(f"{word} " * 30)])


# ── faults are misses ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("operation", ["export checkpoint", "import checkpoint", "rewind", "export"])
def test_a_failing_checkpoint_is_a_miss(operation: str) -> None:
    engine = FakeEngine(slots=2, ctx=4096, block_size=16, sliceable=False)
    with Runtime(lambda: engine, Settings(reuse="exact", memory_budget=MEMORY)) as rt:
        chat = [system(SYSTEM * 4), user("one")]
        for number in range(6):
            engine.fail_next(operation, 1 + number % 2)  # type: ignore[arg-type]
            warm, answer = logits_of(rt, chat)
            assert warm == cold_logits(FakeEngine(slots=1, ctx=4096, block_size=16, sliceable=False), answer.prompt)
            engine._failures.clear()
            ask(rt, [user(f"{number} in between")])
            ask(rt, [user(f"{number} and again")])
        check(rt)


def test_a_checkpoint_of_another_length_is_refused(make: Make) -> None:
    """Fault: rows and state of different lengths are joined, and nothing notices."""
    with make("exact", slots=1) as rt:
        chat = [system(prelude(rt) * 2), user("What is it? " * 40)]
        ask(rt, chat, max_tokens=1)
        states = sorted((entry for entry in rt.cache.index if entry.state), key=lambda entry: entry.stop)
        assert len(states) >= 2
        early, late = (rt.cache.memory.read(entry.id) for entry in (states[0], states[-1]))
        assert early is not None
        assert late is not None
        late[: len(early)] = early[: len(late)]  # its length is in its head, whatever the size
        before = rt.cache.store.counters["fault_import"]
        ask(rt, [user("another takes the slot")], max_tokens=1)
        warm, _ = logits_of(rt, chat)
        assert rt.cache.store.counters["fault_import"] > before
        assert warm == cold_of(make, chat)


def test_what_does_not_fit_into_memory_is_restored_in_part(tmp_path: Path) -> None:
    """A line that is longer than memory goes on from its deepest checkpoint that fits, not from nothing."""
    engine = FakeEngine(slots=1, ctx=8192, block_size=16, sliceable=False)
    settings = Settings(memory_budget=60 * 16 * 16, cache_dir=tmp_path, settle="off")
    chat = [system("x" * 1800), user("one")]
    with Runtime(lambda: engine, settings) as rt:
        ask(rt, chat, max_tokens=1)
    engine = FakeEngine(slots=1, ctx=8192, block_size=16, sliceable=False)
    with Runtime(lambda: engine, settings) as rt:
        rt.scheduler._admission.pace.prefill = 1.0
        report = ask(rt, chat, max_tokens=1).report
        known = [entry for entry in rt.cache.index if rt.cache.disk.name in entry.copies and not entry.state]
        assert not known or 0 < report.cached < report.prompt


def test_raw_texts_go_on_too(make: Make) -> None:
    with make() as rt:
        text, oracle = prelude(rt), Oracle()
        for turn in range(4):
            prompt = rt.text_prompt(text)
            expected = oracle.cost(prompt.tokens)
            answer = Pending(rt, Request(prompt, GenerationParams(GREEDY, max_tokens=12))).answer()
            oracle.learn(answer)
            assert answer.report.computed <= 1.02 * expected + 8
            text += answer.text + f" and {turn}"


def test_ids_of_checkpoints_are_a_contract() -> None:
    from blake3 import blake3

    assert checkpoint_id(b"piece") == blake3(b"headstart.checkpoint.1piece").digest()


# ── with a disk ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_restart(make: Make, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "AFTER", 0.01)
    oracle, chat = Oracle(), [system(SYSTEM * 20)]
    for turn in range(3):
        with make(mode, cache_dir=tmp_path) as rt:
            answer, expected = converse(rt, oracle, chat, f"question {turn}", max_tokens=30, ignore_eos=True)
            assert answer.report.computed <= expected + HEADER + block_size(rt)
            assert not turn or answer.report.tiers["disk"]
            if mode == "exact":
                warm, again = logits_of(rt, chat[:-1])
                assert again.report.cached
                assert warm == cold_of(make, chat[:-1])
            until = time.monotonic() + 60
            while not rt.scheduler.idle and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.2)  # the settled rows are copied out when the engine idles


def test_a_spoilt_checkpoint_on_disk_is_a_miss(make: Make, tmp_path: Path) -> None:
    chat = [system(SYSTEM * 20), user("one")]
    with make("exact", cache_dir=tmp_path) as rt:
        ask(rt, chat, max_tokens=1)
    spoilt = 0
    for path in tmp_path.rglob("*"):
        if path.is_file() and b'"kind":"state"' in (data := path.read_bytes())[:8192]:
            path.write_bytes(data[:-3] + bytes(255 - value for value in data[-3:]))
            spoilt += 1
    assert spoilt
    with make("exact", cache_dir=tmp_path) as rt:
        warm, answer = logits_of(rt, chat)
        assert not answer.report.cached
        assert rt.cache.store.counters["fault_disk"] >= 1
        assert warm == cold_of(make, chat)
