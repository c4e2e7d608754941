"""What is computed of each prompt, on the workloads that users have. `O`: what an infinite cache would compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from effort import SLOW
from harness import Messages, Oracle, ask, assistant, converse, submit, system, user
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.interfaces.engine import Engine
from headstart.serving.request import Progress
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine, FakeTokenizer
from talks import talk

BLOCK_SIZE = 8  # of the fake; a byte is a token there
SYSTEM = "You answer in the words of the house. " * 8
MEMORY = 64 << 20

Make = Callable[..., Runtime]


def runtime(mode: str = "fast", slots: int = 4, **options: object) -> Runtime:
    engine = FakeEngine(slots=slots, ctx=4096, block_size=BLOCK_SIZE, **options)  # type: ignore[arg-type]
    return Runtime(lambda: engine, Settings(reuse=mode, memory_budget=MEMORY))  # type: ignore[arg-type]


@pytest.fixture(params=["fake", "tiny"])
def make(request: pytest.FixtureRequest, tiny_model: Path) -> Make:
    """Builds a runtime on the fake, and on a tiny model in the real engine, whose replies are rarely spelled canonically."""

    def build(mode: str = "fast", slots: int = 4) -> Runtime:
        settings = Settings(str(tiny_model), ctx=4096, slots=slots, threads=1, reuse=mode, memory_budget=MEMORY)  # type: ignore[arg-type]
        engine: Engine
        if request.param == "fake":
            engine = FakeEngine(slots=slots, ctx=4096, block_size=BLOCK_SIZE)
        else:
            engine = LlamaEngine.load(settings.engine_options(), block_size=64)
        return Runtime(lambda: engine, settings)

    return build


def prelude(rt: Runtime) -> str:
    """A system prompt of about 40 blocks."""
    return SYSTEM if isinstance(rt.engine, FakeEngine) else SYSTEM * 6


def bound(rt: Runtime, expected: int, reply: int = 16, *, inside: bool = False) -> float:
    """Tokens that a request may compute. `inside`: it leaves an earlier text in its middle, not at its end."""
    block_size = rt.engine.traits.block_size
    if rt.reuse == "exact":
        return 1.02 * expected + reply + 8 + block_size
    return 1.02 * expected + (block_size if inside else 8)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_ten_accumulating_turns(make: Make, mode: str) -> None:
    with make(mode) as rt:
        oracle, chat = Oracle(), [system(prelude(rt))]
        for turn in range(10):
            answer, expected = converse(rt, oracle, chat, f"question {turn} about the house")
            assert answer.report.computed <= bound(rt, expected)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_many_users_round_robin_on_few_slots(make: Make, mode: str) -> None:
    with make(mode) as rt:
        oracle = Oracle()
        chats: list[Messages] = [[system(prelude(rt))] for _ in range(16 if SLOW else 8)]
        for turn in range(3):
            for number, chat in enumerate(chats):
                first = turn == 0
                answer, expected = converse(rt, oracle, chat, f"user {number} asks question {turn}")
                assert answer.report.computed <= bound(rt, expected, inside=first)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_regenerate_edit_and_back(make: Make, mode: str) -> None:
    with make(mode) as rt:
        oracle, chat = Oracle(), [system(prelude(rt))]
        for turn in range(4):
            converse(rt, oracle, chat, f"question {turn} about the garden and the gate")
        original = list(chat[:-1])
        edited_last = [*original[:-1], user("something else entirely, if you please")]
        edited_middle = [*original[:3], user("a different second question"), *original[4:]]
        for messages in (original, edited_last, original, edited_middle, original, edited_middle):
            expected = oracle.cost(rt.chat_prompt(talk(messages)).tokens)
            answer = ask(rt, messages)
            oracle.learn(answer)
            assert answer.report.computed <= bound(rt, expected, inside=True), answer.report
            again = ask(rt, messages)
            oracle.learn(again)
            assert again.report.computed <= bound(rt, 0, inside=mode == "exact"), again.report


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_changed_line_in_the_middle_of_the_system_prompt(make: Make, mode: str) -> None:
    with make(mode) as rt:
        oracle = Oracle()
        for day in ("monday", "tuesday", "monday", "tuesday", "wednesday"):
            messages = [system(prelude(rt) + f"Today is {day}. " + prelude(rt)), user("hello there")]
            expected = oracle.cost(rt.chat_prompt(talk(messages)).tokens)
            answer = ask(rt, messages)
            oracle.learn(answer)
            assert answer.report.computed <= bound(rt, expected, inside=True)


def test_four_concurrent_requests_compute_their_prefix_once(make: Make) -> None:
    """Fault: a busy prefix cannot be shared."""
    with make() as rt:
        prompts = [[system(prelude(rt)), user(f"{number} is my number")] for number in range(4)]
        shared = len(rt.prompter.chat(talk([system(prelude(rt))]), generation=False))
        pending = [submit(rt, messages) for messages in prompts]
        reports = [one.answer().report for one in pending]
        total = sum(report.computed for report in reports)
        assert total <= shared + sum(report.prompt - shared + rt.engine.traits.block_size for report in reports)
        if isinstance(rt.engine, FakeEngine):
            assert total == rt.engine.prefilled  # what is reported is what entered the engine


def test_two_users_interleaved(make: Make) -> None:
    with make(slots=1) as rt:
        oracle = Oracle()
        chats: list[Messages] = [[system(prelude(rt) + name)] for name in ("alice", "bob")]
        for turn in range(5):
            for chat in chats:
                answer, expected = converse(rt, oracle, chat, f"question {turn}, please")
                assert answer.report.computed <= bound(rt, expected, inside=turn == 0)


def test_n_choices_compute_the_prompt_once_even_above_the_slots() -> None:
    with runtime(slots=2) as rt:
        answer = submit(rt, [system(SYSTEM), user("tell me")], choices=5).answer()
        assert len(answer.finishes) == 5
        assert len(set(answer.texts.values())) == 1  # greedy
        computed = sum(finish.report.computed for finish in answer.finishes.values())
        assert computed <= len(answer.prompt) + 4 * BLOCK_SIZE


def test_a_cancelled_prefill_keeps_its_finished_blocks() -> None:
    """Fault: a client's time-out throws the prefill away, so the retry times out again, for ever."""
    with runtime(delay=0.01) as rt:
        messages = [system(SYSTEM * 6), user("never mind")]
        pending = submit(rt, messages)
        done = pending.until(Progress)
        while isinstance(done, Progress) and done.done < done.total * 0.6:
            done = pending.until(Progress)
        pending.handle.cancel()
        report = ask(rt, messages).report
        assert isinstance(done, Progress)
        assert report.cached >= done.done - BLOCK_SIZE


def test_single_messages_and_short_conversations_hit() -> None:
    """Fault: no reuse below some length, or for single-message conversations."""
    with runtime() as rt:
        first = ask(rt, [user("hi")])
        again = ask(rt, [user("hi")])
        assert first.report.cached == 0
        assert again.report.computed <= BLOCK_SIZE
        assert ask(rt, [user("hi"), assistant(first.text), user("and?")]).report.cached >= len(first.prompt)


def test_a_hit_does_not_move_an_entry_out() -> None:
    with runtime(slots=1) as rt:
        base = [system(SYSTEM), user("one")]
        ask(rt, base)
        for number in range(5):
            ask(rt, [user(f"somebody else entirely {number}")])
            assert ask(rt, base).report.computed <= BLOCK_SIZE


def test_a_reply_spelled_otherwise_is_a_hit_in_fast_mode() -> None:
    """The model's tokens for a text are not always the tokenizer's choice."""
    words = [a + b for a in "etaoin" for b in "etaoin"]
    engine = FakeEngine(ctx=4096, block_size=BLOCK_SIZE, alphabet=b"etaoin", tokenizer=FakeTokenizer(words))
    with Runtime(lambda: engine, Settings(memory_budget=4 << 20)) as rt:
        respelled = 0
        for number in range(8):
            chat = [system(SYSTEM), user(f"speak {number}")]
            first = ask(rt, chat, max_tokens=24)
            sampled = list(first.finish.tokens)
            respelled += engine.tokenizer.tokenize(first.text) != [t for t in sampled if t not in engine.tokenizer.eog]
            chat += [assistant(first.text), user("go on")]
            second = ask(rt, chat)
            new = len(second.prompt) - len(first.prompt) - len(sampled)
            assert second.report.computed <= new + 8
        assert respelled >= 4


def test_a_salt_separates_tenants_in_live_slots_and_memory() -> None:
    with runtime() as rt:
        messages = [system(SYSTEM), user("secret")]
        for _ in range(2):
            ask(rt, messages, salt="alice")
        assert ask(rt, messages, salt="bob").report.cached == 0
        assert ask(rt, messages).report.cached == 0
        assert ask(rt, messages, salt="alice").report.computed <= BLOCK_SIZE


def test_a_model_that_cannot_be_cut_only_ever_grows() -> None:
    """Fault: state that cannot be rewound is served after a mismatch; or a slid window claims to be trimmable."""
    with runtime(sliceable=False, movable=False) as rt:
        chat = [system(SYSTEM), user("one")]
        cold = Runtime(lambda: FakeEngine(ctx=4096, block_size=BLOCK_SIZE, sliceable=False, movable=False), Settings())
        first = ask(rt, chat)
        grown = [*chat, assistant(first.text), user("two")]
        assert ask(rt, grown).report.live >= len(first.prompt)
        edited = [system(SYSTEM), user("another"), *grown[2:]]
        warm = ask(rt, edited, keep_logits=True)
        assert warm.report.cached == 0
        assert warm.report.cause is not None
        assert warm.text == ask(cold, edited).text
        cold.close()
