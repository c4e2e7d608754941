"""The founding systems' own cases: what they got wrong or paid for twice. `O` is in `harness.Oracle`.

By default on a tiny model; where sizes on disk matter on one with so many layers that its tokens take as many bytes as the
bundled model's. All of them on the bundled model are `slow`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import tiny
from harness import Answer, Messages, Oracle, assistant, converse, system, user
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokens import common_prefix
from headstart.prefix_cache.blocks import last_block_boundary
from headstart.serving.runtime import Runtime
from live import Server, serving
from restarts import BLOCK_SIZE, abort, ask, assert_near, assert_same, bits, load, occupied, running, written
from talks import talk

HANDBOOK = files("headstart").joinpath("data/handbook.txt").read_text("utf-8")
CTX = 1024
LAYERS = 90
"""Of a tiny model with the 23,040 bytes a token of the bundled one."""


class Engines:
    """Engines of one model, by their slots and context."""

    def __init__(self, model: Path, ctx: int, threads: int | None) -> None:
        self._model, self._ctx, self._threads = model, ctx, threads
        self._loaded: dict[tuple[int, int], Engine] = {}

    def __call__(self, slots: int, ctx: int | None = None) -> Engine:
        key = slots, ctx or self._ctx
        if key not in self._loaded:
            self._loaded[key] = load(self._model, slots=slots, ctx=key[1], threads=self._threads)
        return self._loaded[key]

    def close(self) -> None:
        for engine in self._loaded.values():
            engine.close()


def made(kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    if kind == "deep":
        model = tiny.write(tmp_path_factory.mktemp("models") / "deep.gguf", layers=LAYERS)
    else:
        model = request.getfixturevalue(f"{kind}_model")
    demo = kind == "demo"
    engines = Engines(model, CTX if demo else 4 * CTX, threads=None if demo else 1)
    yield engines
    engines.close()


MODES = pytest.mark.parametrize("mode", ["fast", "exact"])
SLOTS = pytest.mark.parametrize("slots", [1, 2])
DEMO = pytest.param("demo", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["tiny", DEMO])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    yield from made(request.param, request, tmp_path_factory)


@pytest.fixture(scope="module", params=["deep", DEMO])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Of models whose keys and values take far more bytes than what is kept beside them."""
    yield from made(request.param, request, tmp_path_factory)


def assert_right(mode: str, answers: list[Answer], engine: Engine) -> None:
    (assert_same if mode == "exact" else assert_near)(answers, engine)


def kv(engine: Engine, tokens: int) -> int:
    """Bytes of their rows."""
    return tokens * engine.shape.kv_bytes_per_token


# ── quant.cpp: sessions by `user`, ten accumulating turns ────────────────────────────────────────────────────────────

SECRETS = {"alice": ("zebra", "walrus"), "bob": ("walrus", "zebra")}  # one's own, and the other's
SAID = (
    "My name is {name} and my password is {secret}. Greet me.",
    "What is my name?",
    "What is my password?",
    "Repeat.",
    "Bye.",
)


def say(server: Server, name: str, chat: Messages, **options: Any) -> dict[str, Any]:
    body = {"messages": chat, "user": name, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 3, **options}
    found: dict[str, Any] = server.post("/v1/chat/completions", json=body).raise_for_status().json()
    return found


@MODES
@SLOTS
def test_quant_alice_and_bob_in_turn_and_over_a_restart(engines: Engines, tmp_path: Path, mode: str, slots: int) -> None:
    engine = engines(slots)
    chats: dict[str, Messages] = {name: [] for name in SECRETS}
    before: dict[str, dict[str, int]] = {}
    asked: list[tuple[str, Messages, Any]] = []
    for turns in (range(3), range(3, 5)):
        with running(engine, mode, tmp_path) as rt, serving(rt, model_id="demo") as server:
            for turn in turns:
                for name, chat in chats.items():
                    own, others = SECRETS[name]
                    chat.append(user(SAID[turn].format(name=name.title(), secret=own)))
                    answer = say(server, name, chat)
                    usage, choice = answer["usage"], answer["choices"][0]
                    if turn:
                        earlier = before[name]["prompt_tokens"] + (mode == "fast") * before[name]["completion_tokens"]
                        assert answer["headstart"]["computed"] <= usage["prompt_tokens"] - earlier + 64
                    before[name] = usage
                    assert others not in choice["message"]["content"]
                    asked.append((name, list(chat), answer["choices"]))
                    chat.append(assistant(choice["message"]["content"]))
    if mode == "exact":
        with running(engine, mode, memory=0) as rt, serving(rt, model_id="demo") as server:
            for name, messages, choices in asked[-4:]:
                fresh = say(server, name, messages, cache_prompt=False)
                assert fresh["headstart"]["cached"] == 0
                assert fresh["choices"] == choices, "what was said, and its log-probabilities"


QUESTIONS = (
    "Hello! When are you open?",
    "And how much is a membership for a student?",
    "How many tools can I take home at once?",
    "May I keep a cordless drill for two weeks?",
    "What do I have to do before I use the angle grinder?",
    "I am late with a ladder by three opening days. What will it cost?",
    "Can you bring the floor sander to my home?",
    "My nephew is nine and would like to mend a radio with me. Is that possible?",
    "What happens if I break something?",
    "Thank you. Where can I hand in a hammer on a Sunday?",
)


@dataclass(frozen=True)
class Growth:
    """Ten accumulating turns, and one after a restart.

    Attributes:
        costs: O of each turn.
        objects: bytes of objects after each turn, and after the end.
        disk: bytes of all that is in the folder after the end.
        saved: objects that were written.
        physical: bytes that this process has had written to storage meanwhile; 0 where the system does not say.
    """

    answers: list[Answer]
    costs: list[int]
    objects: list[int]
    disk: int
    saved: int
    physical: int
    resumed: Answer


# In fast mode runtime/test_reuse asks the same of a tiny model.
@pytest.fixture(scope="module", params=["exact", pytest.param("fast", marks=pytest.mark.slow)])
def growth(request: pytest.FixtureRequest, wide: Engines, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Growth]:
    engine, mode, folder = wide(1), request.param, tmp_path_factory.mktemp("growth")
    oracle, chat = Oracle(), [system(HANDBOOK[:500])]
    answers: list[Answer] = []
    costs: list[int] = []
    objects: list[int] = []
    before = physically_written()
    with running(engine, mode, folder) as rt:
        for question in QUESTIONS:
            answer, cost = converse(rt, oracle, chat, question, max_tokens=8, keep_logits=True)
            answers.append(answer)
            costs.append(cost)
            written(rt)
            objects.append(occupied(folder / "objects"))
    objects.append(occupied(folder / "objects"))
    disk = occupied(folder)
    saved, physical = rt.cache.disk.counters["saved"], physically_written() - before
    with running(engine, mode, folder) as rt:
        resumed, cost = converse(rt, oracle, chat, "And on a Monday?", max_tokens=8, keep_logits=True)
        costs.append(cost)
    return mode, Growth(answers, costs, objects, disk, saved, physical, resumed)


def physically_written() -> int:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes")), 0)


def test_quant_ten_accumulating_turns_pay_for_what_is_new(growth: tuple[str, Growth], wide: Engines) -> None:
    mode, grown = growth
    for answer, cost, before in zip(grown.answers, grown.costs, [None, *grown.answers], strict=False):
        unsettled = len(before.finish.tokens) if before is not None and mode == "exact" else 0
        slack = 64 if mode == "exact" else 8
        assert answer.report.computed <= 1.02 * cost + unsettled + slack
    unsettled = len(grown.answers[-1].finish.tokens) if mode == "exact" else 0
    assert grown.resumed.report.computed <= 1.02 * grown.costs[-1] + unsettled + 64
    assert grown.resumed.report.tiers == {"disk": grown.resumed.report.restored}
    assert_right(mode, [grown.resumed], wide(1))


# ── ds4, PR 175: nothing is written twice, however a prompt grows ────────────────────────────────────────────────────


def test_ds4_ten_turns_of_a_growing_chat_write_each_row_once(growth: tuple[str, Growth], wide: Engines) -> None:
    mode, grown = growth
    last = grown.answers[-1]
    final = kv(wide(1), len(last.prompt) + len(last.finish.tokens))
    assert grown.objects == sorted(grown.objects), "nothing had to be pruned"
    assert 0.8 * final <= grown.objects[-1] <= grown.disk <= 1.1 * final
    if mode == "exact":
        blocks = (last_block_boundary(len(answer.prompt), BLOCK_SIZE) for answer in grown.answers)
        assert all(size >= kv(wide(1), tokens) for size, tokens in zip(grown.objects, blocks, strict=False)), "and soon"
    assert grown.saved * kv(wide(1), BLOCK_SIZE) <= 1.1 * final
    if grown.physical >= grown.disk:  # otherwise the system does not count what goes to this folder
        assert grown.physical <= 1.1 * final + (1 << 20), "a journal of the file system's own beside it"


@pytest.mark.parametrize("ctx", [CTX, pytest.param(4 * CTX, marks=pytest.mark.slow)])
def test_ds4_a_prompt_as_long_as_the_context_is_written_once(wide: Engines, tmp_path: Path, ctx: int) -> None:
    """In three requests, each a continuation of the one before; then it is there after a restart, to the bit."""
    engine = wide(1, ctx)
    tokens = (engine.tokenizer.tokenize(HANDBOOK) * 8)[: ctx - 1]
    own = kv(engine, last_block_boundary(len(tokens), BLOCK_SIZE))
    seen: list[tuple[int, int]] = []
    with running(engine, "exact", tmp_path) as rt:
        rt.watch(lambda request: lambda event: seen.append((occupied(tmp_path), len(rt.scheduler.slots[0]))))
        for length in (len(tokens) // 3, 2 * len(tokens) // 3, len(tokens)):
            first = ask(rt, rt.text_prompt(tokens[:length]), max_tokens=1)
            written(rt)
            assert occupied(tmp_path) <= 1.02 * kv(engine, length)
    assert seen
    assert all(size <= 1.02 * kv(engine, done) for size, done in seen if done >= 256), "while it is computed, too"
    assert own < occupied(tmp_path) <= 1.02 * own
    assert sum(path.stat().st_size for path in (tmp_path / "objects").iterdir()) == own + len(tokens) // BLOCK_SIZE * 4096
    with running(engine, "exact", tmp_path) as rt:
        again = ask(rt, rt.text_prompt(tokens), max_tokens=1)
        assert again.report.computed == len(tokens) - last_block_boundary(len(tokens), BLOCK_SIZE)
        assert rt.cache.disk.counters["saved"] == 0
    assert bits(again) == bits(first)
    if ctx > CTX:
        assert_same([again], engine)


# ── ds4, PR 394: the anchor is refreshed, whatever part of it was cached ─────────────────────────────────────────────


def agent(version: str, task: str) -> Messages:
    """A fresh session of an agent whose early prompt block has a version in it."""
    return [system(f"{HANDBOOK[:450]}\nHandbook of {version}.\n{HANDBOOK[450:1000]}"), user(task)]


@MODES
def test_ds4_a_changed_early_block_is_paid_for_once(engines: Engines, tmp_path: Path, mode: str) -> None:
    engine, checked = engines(1), []

    def own(rt: Runtime, messages: Messages) -> int:
        """Tokens of a session behind its anchor: the end of its system prompt."""
        anchor = rt.prompter.chat(talk(messages[:1]), generation=False).tokens
        tokens = rt.chat_prompt(talk(messages)).tokens
        return len(tokens) - common_prefix(tokens, anchor)

    with running(engine, mode, tmp_path) as rt:
        first = ask(rt, agent("May", "List the opening hours."))
        assert first.report.cached == 0
        changed = agent("June", "Write a reminder to Tom.")
        paid = ask(rt, changed)
        anchor = len(paid.prompt) - own(rt, changed)
        shared = common_prefix(paid.prompt, first.prompt)
        assert 0 < paid.report.cached < anchor, "a partial hit"
        assert paid.report.computed <= len(paid.prompt) - shared + 64
        for version, task in (("June", "Who is late?"), ("May", "How much is it?"), ("June", "Count the drills.")):
            session = agent(version, task)
            answer = ask(rt, session)
            assert answer.report.computed <= own(rt, session) + 64
            checked.append(answer)
        written(rt)
    with running(engine, mode, tmp_path) as rt:
        for version, task in (("June", "Look for a ladder."), ("May", "And a saw?")):
            session = agent(version, task)
            answer = ask(rt, session)
            assert answer.report.computed <= own(rt, session) + 64
            assert answer.report.tiers["disk"] > 0
            checked.append(answer)
    assert_right(mode, checked[-2:-1], engine)


@MODES
def test_ds4_no_length_is_excluded_from_one_token_to_a_few_blocks(engines: Engines, tmp_path: Path, mode: str) -> None:
    engine = engines(1)
    tokens = engine.tokenizer.tokenize(HANDBOOK)
    lengths = (1, 63, 64, 65, 129)
    prompts = [tokens[200 * number :][:length] for number, length in enumerate(lengths, 1)]
    with running(engine, mode, tmp_path) as rt:
        for prompt in prompts:
            report = ask(rt, rt.text_prompt(prompt), max_tokens=1).report
            assert (report.prompt, report.cached, report.computed) == (len(prompt), 0, len(prompt))
        for prompt in prompts:
            report = ask(rt, rt.text_prompt(prompt), max_tokens=1).report
            tail = len(prompt) - last_block_boundary(len(prompt), BLOCK_SIZE) if mode == "exact" else 1
            assert (report.cached, report.computed) == (len(prompt) - tail, tail), "displaced by the others, and back"
        written(rt)
    with running(engine, mode, tmp_path) as rt:
        for prompt in prompts:
            report = ask(rt, rt.text_prompt(prompt), max_tokens=1).report
            whole = len(prompt) // BLOCK_SIZE * BLOCK_SIZE if mode == "fast" else last_block_boundary(len(prompt), BLOCK_SIZE)
            assert report.computed == max(1, len(prompt) - whole), "open tails are not on disk"
            assert report.tiers == ({"disk": report.cached} if report.cached else {})


# ── Lucebox, PR 371: a slot that an aborted request had taken ────────────────────────────────────────────────────────


@MODES
@SLOTS
def test_lucebox_an_aborted_request_leaves_nobody_with_anothers_rows(engines: Engines, mode: str, slots: int) -> None:
    """A (→ slot 0), tiny (aborts), big B (wraps to slot 0), shortened A, longer A."""
    engine = engines(slots)
    text = engine.tokenizer.tokenize(HANDBOOK)
    a, tiny, b = text[:160], text[300:366], text[500:680]  # a tail of two tokens is a call of its own everywhere
    shortened, longer = a[:100], a + text[450:480]
    with running(engine, mode) as rt:
        prompt = {name: rt.text_prompt(tokens) for name, tokens in (("a", a), ("tiny", tiny), ("b", b))}
        answers = [ask(rt, prompt["a"])]
        assert abort(rt, prompt["tiny"]) == BLOCK_SIZE
        answers.append(ask(rt, prompt["b"]))
        assert rt.scheduler.slots[0].tokens[: len(b)].tolist() == b, "it has A's slot"
        for tokens, known in ((shortened, len(shortened)), (longer, len(a)), (tiny, BLOCK_SIZE)):
            answer = ask(rt, rt.text_prompt(tokens))
            assert answer.report.computed <= len(tokens) - known + 64
            answers.append(answer)
    assert_right(mode, answers[1:], engine)


@MODES
def test_lucebox_an_aborted_giant_is_not_mistaken_for_a_whole_one(engines: Engines, tmp_path: Path, mode: str) -> None:
    """It hangs up in its middle, its rows are displaced, written and restored: what was computed counts, no more."""
    engine = engines(1)
    text = engine.tokenizer.tokenize(HANDBOOK)
    giant, other = text[:300], text[700:770]
    with running(engine, mode, tmp_path) as rt:
        done = abort(rt, rt.text_prompt(giant))
        assert BLOCK_SIZE <= done < len(giant)
        ask(rt, rt.text_prompt(other))
        written(rt)
    with running(engine, mode, tmp_path) as rt:
        again = ask(rt, rt.text_prompt(giant))
        assert again.report.cached == again.report.tiers["disk"] == done
    assert_right(mode, [again], engine)


# ── mlx-lm: single messages, short conversations, branches ───────────────────────────────────────────────────────────


@MODES
def test_mlx_single_messages_and_short_conversations_are_reused(engines: Engines, mode: str) -> None:
    engine = engines(1)
    with running(engine, mode) as rt:
        single, chat = [user(HANDBOOK[:400])], [user("Hi, I am Ann.")]
        first, hello = ask(rt, single), ask(rt, chat)
        again = ask(rt, single)
        chat += [assistant(hello.text), user("Tell me about saws, drills and ladders, a sentence for each.")]
        second = ask(rt, chat)
        for known, answer in ((first, again), (hello, second)):
            new = len(answer.prompt) - common_prefix(answer.prompt, known.prompt)
            assert answer.report.computed <= max(1, new) + (63 if mode == "exact" else 0)
        assert again.report.cached >= BLOCK_SIZE
    assert_right(mode, [again, second], engine)


@MODES
def test_mlx_branches_leave_each_other_as_they_were(engines: Engines, tmp_path: Path, mode: str) -> None:
    """Regenerated, edited at the end and in the middle, and back: each row stays what it was."""
    engine, oracle = engines(1), Oracle()
    chat: Messages = [system(HANDBOOK[:400])]
    with running(engine, mode, tmp_path) as rt:

        def turn(messages: Messages, unsettled: int = 0, **options: Any) -> Answer:
            cost = oracle.cost(rt.chat_prompt(talk(messages)).tokens)
            answer = ask(rt, messages, **options)
            assert answer.report.computed <= 1.02 * cost + 64 + (unsettled if mode == "exact" else 0)
            oracle.learn(answer)
            return answer

        for question in QUESTIONS[:2]:
            chat.append(user(question))
            last = turn(chat, 4)
            chat.append(assistant(last.text))
        chat.append(user(QUESTIONS[2]))
        original = turn(chat, 4)
        written(rt)
        rows = stored(rt)
        regenerated = turn(chat)
        turn([*chat[:-1], user("May I have a key of my own?")], 4)
        edited_middle = turn([*chat[:1], user("Who are you?"), *chat[2:]], 4)
        back = turn(chat)
        again = stored(rt)
    assert rows
    assert all(again[piece] == rows[piece] for piece in rows)
    if mode == "exact":
        assert bits(original) == bits(regenerated) == bits(back)
        assert original.finish.tokens == regenerated.finish.tokens == back.finish.tokens
    assert_right(mode, [edited_middle, back], engine)


def stored(rt: Runtime) -> dict[bytes, bytes]:
    """Canonical rows in memory."""
    return {
        entry.id: data[: len(entry.tokens) * rt.engine.shape.kv_bytes_per_token].tobytes()
        for entry in list(rt.cache.index)
        if entry.canonical and (data := rt.cache.memory.read(entry.id)) is not None
    }
