"""Settle: what a finished turn costs later, what settling costs, and that it takes nothing away.

Replies are dictated: the engine computes every token as ever, only the choice of the next one is a script's. So a reply can
have the reasoning that a template strips.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tiny
from effort import SLOW
from harness import Answer, Messages, Oracle, Pending, ask, assistant, request_of, system, user
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.errors import EngineError
from headstart.interfaces.engine import Engine
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import GREEDY, Sampler
from headstart.prefix_cache.blocks import Chain, root_id
from headstart.serving import offload, settle
from headstart.serving.request import Request
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from histories import cold_logits
from live import wait_until
from talks import talk
from templates import REASONING, TOOLS

HEADER = 24
"""Most tokens of what a template writes around a message, and before a reply."""
SYSTEM = "You answer in the words of the house. "
CALCULATOR = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]

Make = Callable[..., Runtime]


def dictate(engine: Engine, *replies: str) -> None:
    """The next replies are these; then the engine is on its own again."""
    end = next(iter(sorted(engine.tokenizer.eog)))
    script = [token for reply in replies for token in (*engine.tokenizer.tokenize(reply), end)]
    free = type(engine).sample

    def sample(slot: int, sampler: Sampler) -> int:
        return script.pop(0) if script else free(engine, slot, sampler)

    engine.sample = sample  # type: ignore[method-assign]


def settled(rt: Runtime) -> None:
    """Waits until nothing is left to settle."""
    until = time.monotonic() + 60
    while not rt.scheduler.idle:
        assert time.monotonic() < until
        time.sleep(0.005)
    time.sleep(0.01)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "AFTER", 0.01)


WHEN_SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "gemma3")]
"""To settle is the runtime's work: one kind of the real engine, whose own tests know all, is enough where no bits matter."""


A_FEW = pytest.mark.parametrize(
    "make",
    ["attention", "pure", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fake", "qwen35")), *WHEN_SLOW],
    indirect=True,
)
"""Of conversations that are long."""


@pytest.fixture(params=["attention", pytest.param("fake", marks=pytest.mark.slow), "pure", "qwen35", *WHEN_SLOW])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    def build(mode: str = "fast", template: str | None = None, slots: int = 2, **options: Any) -> Runtime:
        kind = request.param
        settings: dict[str, Any] = {"reuse": mode, "memory_budget": 96 << 20} | options
        engine: Engine
        if kind in ("attention", "fake", "pure"):
            tokenizer = FakeTokenizer(chat_template=template) if template else FakeTokenizer()
            rows = 0 if kind == "pure" else 16
            engine = FakeEngine(
                slots=slots,
                ctx=16384,
                block_size=16,
                sliceable=kind == "attention",
                kv_bytes_per_token=rows or 16,
                tokenizer=tokenizer,
            )
            return Runtime(lambda: engine, Settings(**settings))
        path = tmp_path_factory.getbasetemp() / f"{kind}-{hash(template)}.gguf"
        if not path.exists():
            tiny.write(path, kind, **({"chat_template": template} if template else {}))
        chosen = Settings(str(path), ctx=8192, slots=slots, threads=1, **settings)
        return Runtime(lambda: LlamaEngine.load(chosen.engine_options(), block_size=64), chosen)

    return build


def block_size(rt: Runtime) -> int:
    return rt.engine.traits.block_size


def say(rt: Runtime, messages: Messages, reply: str, **options: Any) -> Answer:
    """Asks, has the engine say `reply`, and adds that to the conversation."""
    dictate(rt.engine, reply)
    tools = options.pop("tools", None)
    prompt = rt.chat_prompt(talk(messages, tools=tools))
    answer = Pending(rt, request_of(prompt, max_tokens=4096, **options)).answer()
    assert answer.text == reply
    messages.append(assistant(reply))
    return answer


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_settled_turn_costs_its_new_message(make: Make, mode: str) -> None:
    with make(mode) as rt:
        oracle, chat = Oracle(), [system(SYSTEM * 8)]
        for turn in range(4):
            chat.append(user(f"question {turn}"))
            expected = oracle.cost(rt.chat_prompt(talk(chat)).tokens)
            answer = say(rt, chat, SYSTEM * 2)
            oracle.learn(answer)
            assert answer.report.computed <= expected + HEADER + block_size(rt)
            settled(rt)
        assert rt.snapshot()["settle"]["turns"] == 4


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_stripped_reasoning_costs_nothing(make: Make, mode: str) -> None:
    """Fault: thinking stripped by the template: every turn prefills the last reply again."""
    with make(mode, REASONING) as rt:
        thought = "I think about the house, and about its words, and what they are. " * 6
        chat = [system(SYSTEM * 4)]
        for turn in range(6 if SLOW else 4):
            chat.append(user(f"question {turn}"))
            answer = say(rt, chat, thought + "\n</think>\n\nThe answer is in the house. " + SYSTEM)
            if turn:
                new = len(rt.engine.tokenizer.tokenize(f"question {turn}"))
                assert answer.report.computed <= new + HEADER + block_size(rt)
            settled(rt)


@pytest.mark.parametrize("make", ["attention", pytest.param("qwen35", marks=pytest.mark.slow), WHEN_SLOW[0]], indirect=True)
def test_turns_of_long_reasoning(make: Make) -> None:
    """400 tokens of reasoning, 100 of an answer, and time to settle: all turns but the first pay for their message."""
    with make("fast", REASONING) as rt:
        tokenize = rt.engine.tokenizer.tokenize
        words = "house water garden letter market window bridge summer winter paper stone river " * 40
        thought, answer = (tokens_of(rt, words, count) for count in (400, 100))
        chat = [system(SYSTEM * 20)]
        for turn in range(10 if SLOW else 5):
            chat.append(user(f"question {turn}"))
            said = say(rt, chat, thought + "\n</think>\n\n" + answer)
            assert not turn or said.report.computed <= len(tokenize(f"question {turn}")) + HEADER + block_size(rt)
            settled(rt)


def tokens_of(rt: Runtime, text: str, count: int) -> str:
    """The first `count` tokens of a text."""
    tokenizer = rt.engine.tokenizer
    return b"".join(map(tokenizer.token_bytes, tokenizer.tokenize(text)[:count])).decode()


@pytest.mark.parametrize("make", ["fake"], indirect=True)
def test_a_settled_turn_keeps_the_checkpoints_of_the_client(make: Make) -> None:
    """Breakpoints are where the client says that another conversation may part."""
    with make("fast") as rt:
        chat = [system(SYSTEM * 8), user("a question")]
        prompt = rt.chat_prompt(talk(chat, breakpoints=[(0, 60)]))
        dictate(rt.engine, SYSTEM)
        answer = Pending(rt, Request(prompt, GenerationParams(GREEDY, max_tokens=4096))).answer()
        settled(rt)
        assert rt.snapshot()["settle"]["turns"] == 1
        (marked,) = (mark // block_size(rt) for mark in prompt.landmarks.breakpoints)
        ids = Chain(root_id(rt.engine.fingerprint, prompt.salt), block_size(rt), answer.prompt).ids
        assert rt.cache.index.checkpoint(ids[marked - 1], canonical_only=True) is not None


@A_FEW
def test_a_tool_loop_and_what_the_next_question_strips_of_it(make: Make) -> None:
    with make("fast", TOOLS) as rt:
        oracle, chat = Oracle(), [system(SYSTEM * 4), user("Add many numbers.")]
        thought = "<think>\n" + "I need another number for the sum. " * 8 + "\n</think>\n\n"
        for call in range(8 if SLOW else 5):
            expected = oracle.cost(rt.chat_prompt(talk(chat, tools=CALCULATOR)).tokens)
            reply = thought + f'<tool_call>\n{{"name": "add", "arguments": {{"n": {call}}}}}\n</tool_call>'
            answer = say(rt, chat, reply, tools=CALCULATOR)
            oracle.learn(answer)
            assert answer.report.computed <= 1.02 * expected + HEADER + (block_size(rt) if call else 0)
            chat.append({"role": "tool", "content": f"the sum is {call * 3}", "tool_call_id": f"call_{call}"})
            settled(rt)
        say(rt, chat, thought + f"It is {84 if SLOW else 30}.", tools=CALCULATOR)
        chat.append(user("And now?"))
        settled(rt)
        answer = say(rt, chat, "<think>\n\n</think>\n\nNothing.", tools=CALCULATOR)
        assert answer.report.computed <= len(rt.engine.tokenizer.tokenize("And now?")) + HEADER + block_size(rt)


@A_FEW
def test_the_strip_without_time_to_settle_costs_what_it_leaves(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "AFTER", 3600.0)
    with make("fast", TOOLS) as rt:
        chat = [system(SYSTEM * 4), user("Add many numbers.")]
        thought = "<think>\n" + "I need another number for the sum. " * 12 + "\n</think>\n\n"
        for call in range(8 if SLOW else 5):
            say(
                rt,
                chat,
                thought + f'<tool_call>\n{{"name": "add", "arguments": {{"n": {call}}}}}\n</tool_call>',
                tools=CALCULATOR,
            )
            chat.append({"role": "tool", "content": f"the sum is {call * 3}", "tool_call_id": f"call_{call}"})
        start = len(rt.chat_prompt(talk(chat[:2], tools=CALCULATOR)))
        say(rt, chat, thought + f"It is {84 if SLOW else 30}.", tools=CALCULATOR)
        chat.append(user("And now?"))
        left = len(rt.chat_prompt(talk(chat, tools=CALCULATOR))) - start
        answer = say(rt, chat, "Nothing.", tools=CALCULATOR)
        assert answer.report.computed <= left + HEADER + block_size(rt)


def test_an_immediate_answer_of_a_tool_costs_itself(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "AFTER", 3600.0)
    with make("fast", TOOLS) as rt:
        chat = [system(SYSTEM * 4), user("Add many numbers.")]
        thought = "<think>\nI need another number for the sum.\n</think>\n\n"
        for call in range(4):
            answer = say(
                rt,
                chat,
                thought + f'<tool_call>\n{{"name": "add", "arguments": {{"n": {call}}}}}\n</tool_call>',
                tools=CALCULATOR,
            )
            if call:
                result = len(rt.engine.tokenizer.tokenize(f"the sum is {call - 1}"))
                framing = len(rt.engine.tokenizer.tokenize("\n<tool_response>\n\n</tool_response>")) + HEADER
                assert answer.report.computed <= result + framing + 8
                assert answer.report.live
            chat.append({"role": "tool", "content": f"the sum is {call}", "tool_call_id": f"call_{call}"})


@pytest.mark.parametrize("make", ["attention", "fake", "pure", "llama", "qwen35", "gemma3"], indirect=True)
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_settled_bits_are_cold_bits(make: Make, mode: str) -> None:
    """After settling, fast mode has canonical ground too."""
    with make(mode) as rt, make("exact", slots=1) as cold:
        chat = [system(SYSTEM * 8)]
        for turn in range(3):
            chat.append(user(f"question {turn}"))
            say(rt, chat, SYSTEM * 2)
            settled(rt)
        chat.append(user("the last"))
        stem = rt.prompter.shared_prefix(talk(chat[:-1]))
        answer = ask(rt, chat, keep_logits=True, max_tokens=1)
        if mode == "exact":  # in fast mode the open tail of the live reply may be used behind what was settled
            assert answer.logits is not None
            assert answer.logits.tobytes() == cold_logits(cold.engine, answer.prompt)
        chain = Chain(root_id(rt.engine.fingerprint, ""), block_size(rt), stem.tokens)
        entries = [rt.cache.index.get(piece) for piece in chain.ids[: (len(stem) - 1) // block_size(rt)]]
        assert len(entries) >= 2
        assert all(entry is not None and entry.canonical for entry in entries)


def test_what_was_live_is_not_lost(make: Make) -> None:
    """The client sends something else than was expected: it is a branch, and pays as if nothing had been settled."""
    with make("fast") as rt:
        chat = [system(SYSTEM * 8), user("one")]
        prompt = rt.chat_prompt(talk(chat))
        dictate(rt.engine, SYSTEM * 2)
        first = Pending(rt, Request(prompt, GenerationParams(GREEDY, max_tokens=4096))).answer()
        settled(rt)
        raw = [*first.prompt.tolist(), *first.finish.tokens[:-1], *rt.engine.tokenizer.tokenize(" and so on")]
        again = Pending(rt, Request(rt.text_prompt(raw), GenerationParams(GREEDY, max_tokens=1))).answer()
        assert again.report.computed <= len(rt.engine.tokenizer.tokenize(" and so on")) + block_size(rt)


def test_interrupted_settling_leaves_a_usable_prefix(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "CALL", 0.0)  # a block a call
    with make("exact") as rt:
        chat = [system(SYSTEM * 4), user("one")]
        say(rt, chat, SYSTEM * 12)
        steps = rt.scheduler.settle.counters
        until = time.monotonic() + 30
        while not steps["tokens"] and time.monotonic() < until:
            time.sleep(0.0005)
        other = ask(rt, [user("another")], max_tokens=1)
        assert other.finish
        before = steps["tokens"]
        assert before
        settled(rt)
        chat.append(user("two"))
        answer = say(rt, chat, "fine")
        assert answer.report.computed <= len(rt.engine.tokenizer.tokenize("two")) + HEADER + block_size(rt)
        reply = len(rt.engine.tokenizer.tokenize(SYSTEM * 12))
        assert steps["tokens"] <= 2 * (reply + HEADER + 2 * block_size(rt)), "what was settled is not computed twice"


@pytest.mark.parametrize("options", [{}, {"raw": True}, {"choices": 2}, {"max_tokens": 0}], ids=str)
def test_each_prompt_becomes_canonical(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts part within a block. A turn that will not be settled computes canonical KV at once."""
    monkeypatch.setattr(settle, "AFTER", 0.01)
    options = {"max_tokens": 4, **options}
    raw = options.pop("raw", False)
    engine = FakeEngine(slots=2, ctx=8192, block_size=16)
    with Runtime(lambda: engine, Settings(memory_budget=64 << 20)) as rt:
        for pad in range(0, 16, 5):  # wherever in a block they part
            for question in ("The first question is a long one.", "The other question is a long one."):
                text = "." * pad + SYSTEM * 20 + question
                prompt = rt.text_prompt(text) if raw else rt.chat_prompt(talk([user(text)]))
                Pending(rt, request_of(prompt, **options)).answer()
                settled(rt)
                wait_until(lambda: not any(slot.dirty for slot in rt.scheduler.slots))
            ids = Chain(root_id(engine.fingerprint, ""), 16, prompt.tokens).ids
            entries = [rt.cache.index.get(key) for key in ids[:-1]]
            assert all(entry is not None and entry.canonical for entry in entries)


@pytest.mark.parametrize("make", ["fake"], indirect=True)
def test_who_looks_often_does_not_keep_turns_from_being_settled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "AFTER", 0.25)
    with make("fast") as rt:
        say(rt, [system(SYSTEM * 8), user("one")], SYSTEM * 2)

        def looked() -> bool:
            rt.scheduler.call(lambda: None).result()
            return rt.scheduler.idle

        wait_until(looked)


def test_off_is_off(make: Make) -> None:
    with make("exact", settle="off") as rt:
        chat = [system(SYSTEM * 4), user("one")]
        say(rt, chat, SYSTEM * 6)
        time.sleep(0.1)
        chat.append(user("two"))
        answer = say(rt, chat, "fine")
        assert answer.report.computed > len(rt.engine.tokenizer.tokenize(SYSTEM * 6)) - block_size(rt)
        assert not rt.snapshot()["settle"]


def test_a_reply_is_forgotten_as_it_was_spelled() -> None:
    """Settled text is spelled as the tokenizer does it; all later prompts have that spelling, earlier turns included."""
    tokenizer = FakeTokenizer(words=("house", "words"))
    engine = FakeEngine(slots=2, ctx=8192, block_size=16, tokenizer=tokenizer, sliceable=False)
    with Runtime(lambda: engine, Settings(memory_budget=64 << 20)) as rt:
        chat = [system(SYSTEM)]
        for turn in range(3):
            chat.append(user(f"question {turn}"))
            letters = [*(b"in the house of words, " * 4), sorted(tokenizer.eog)[0]]
            engine.sample = lambda slot, sampler, letters=letters: letters.pop(0)  # type: ignore[method-assign, misc]
            answer = ask(rt, chat, max_tokens=500)
            chat.append(assistant(answer.text))
            if turn < 2:
                assert len(rt.prompter.reply_tokens) == 1
            settled(rt)
            assert len(rt.prompter.reply_tokens) == 0
            assert answer.report.computed <= 16 + HEADER + 16 or turn == 0


def test_dead_rows_leave_the_disk(tmp_path: Path) -> None:
    """Fault: dead branches of stripped reasoning fill the disk."""
    engine = FakeEngine(slots=2, ctx=8192, block_size=16, tokenizer=FakeTokenizer(chat_template=REASONING))
    with Runtime(lambda: engine, Settings(memory_budget=64 << 20, cache_dir=tmp_path)) as rt:
        chat = [system(SYSTEM), user("one")]
        say(rt, chat, "I think. " * 40 + "\n</think>\n\nThe answer.")
        settled(rt)
        until = time.monotonic() + 30
        while not (found := [entry for entry in rt.cache.index if rt.cache.disk.name in entry.copies]) or not all(
            entry.copies[rt.cache.disk.name] for entry in found
        ):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_dead_rows_do_not_come_back_at_the_end(tmp_path: Path) -> None:
    for sliceable in (True, False):
        folder = tmp_path / str(sliceable)
        tokenizer = FakeTokenizer(chat_template=REASONING)
        made = partial(FakeEngine, slots=2, ctx=8192, block_size=16, sliceable=sliceable, tokenizer=tokenizer)
        with Runtime(made, Settings(memory_budget=64 << 20, cache_dir=folder)) as rt:
            say(rt, [system(SYSTEM), user("one")], "I think. " * 40 + "\n</think>\n\nThe answer.")
            settled(rt)
        heads = [path.read_bytes()[:8192] for path in folder.rglob("*") if path.is_file()]
        objects = [head for head in heads if head.startswith(b"headstrt")]
        assert objects
        assert all(b'"canonical":true' in head for head in objects)


def test_what_the_disk_need_not_have_is_not_remembered_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: each settled turn left some ids for good, such as those of checkpoints in a model that has none."""
    monkeypatch.setattr(offload, "UNNEEDED", 20)
    engine = FakeEngine(slots=2, ctx=8192, block_size=16, tokenizer=FakeTokenizer(chat_template=REASONING))
    with Runtime(lambda: engine, Settings(memory_budget=64 << 20, cache_dir=tmp_path)) as rt:
        for number in range(3):
            say(rt, [system(SYSTEM), user(f"{number}")], "I think. " * 40 + "\n</think>\n\nThe answer.")
            settled(rt)
        assert len(rt.cache.store.offload._unneeded) == 20


@pytest.mark.parametrize("error", [EngineError("cannot"), TypeError("cannot")])
def test_a_failing_settle_harms_nobody(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up, and what slots are believed to hold is what they hold."""
    engine = FakeEngine(slots=2, ctx=8192, block_size=16)
    with Runtime(lambda: engine, Settings(reuse="fast", memory_budget=64 << 20)) as rt:
        truncate, fails = engine.truncate, [True]

        def half(slot: int, length: int) -> None:
            truncate(slot, length)
            if length and fails:
                fails.clear()
                raise error

        monkeypatch.setattr(engine, "truncate", half)
        chat = [system(SYSTEM * 4), user("one")]
        say(rt, chat, SYSTEM * 3)
        settled(rt)
        assert not fails
        assert rt.snapshot()["settle"]["given_up"] == 1
        assert all(engine.length(slot.number) == len(slot) for slot in rt.scheduler.slots)
        chat.append(user("two"))
        assert say(rt, chat, "fine").report.cached


def test_nobody_waits_for_more_than_a_block(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "CALL", 0.0)
    with make("exact") as rt:
        sizes: list[int] = []
        original = rt.engine.prefill

        def prefill(slot: int, tokens: Any, *, logits: bool) -> None:
            if not rt.scheduler.running:
                sizes.append(len(tokens))
            original(slot, tokens, logits=logits)

        rt.engine.prefill = prefill  # type: ignore[method-assign]
        chat = [system(SYSTEM * 4), user("one")]
        say(rt, chat, SYSTEM * 8)
        settled(rt)
        assert sizes
        assert max(sizes) <= block_size(rt)


def test_a_turn_whose_kv_does_not_stay_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an idle server would compute it for ever."""
    real = settle.Settle._advance

    def advance(self: settle.Settle, task: settle.SettleTask) -> bool:
        goes_on = real(self, task)
        if task.slot is not None:
            self._admission.empty(task.slot)
        return goes_on

    monkeypatch.setattr(settle.Settle, "_advance", advance)
    monkeypatch.setattr(settle, "CALL", 1e-9)  # a block in each step
    with Runtime(lambda: FakeEngine(ctx=4096), Settings(memory_budget=0, reuse="exact")) as rt:
        say(rt, [user("A question. " * 20)], "an answer")
        wait_until(lambda: not rt.scheduler.settle.pending and rt.scheduler.settle.counters["given_up"] == 1)
        assert rt.scheduler.settle.counters["tokens"] > settle.AGAIN * 200
