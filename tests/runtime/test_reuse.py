"""What is computed of each prompt, on the workloads that users have. `O`: what an infinite cache would compute."""

from __future__ import annotations

import pytest
from harness import Messages, Oracle, ask, assistant, converse, submit, system, user

from headstart.config import Settings
from headstart.engines.fake import FakeEngine
from headstart.runtime.request import Progress
from headstart.runtime.runtime import Runtime

GRID = 8
SYSTEM = "You answer in the words of the house. " * 8


def runtime(mode: str = "fast", slots: int = 4, **options: object) -> Runtime:
    engine = FakeEngine(slots=slots, ctx=4096, grid=GRID, **options)  # type: ignore[arg-type]
    return Runtime(engine, Settings(reuse=mode, memory_budget=4 << 20))  # type: ignore[arg-type]


def bound(mode: str, expected: int, reply: int, *, inside: bool = False) -> float:
    """The issue's bounds, with the grid in place of 64."""
    if mode == "exact":
        return 1.02 * expected + reply + GRID + GRID
    return 1.02 * expected + (GRID if inside else 8)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_ten_accumulating_turns(mode: str) -> None:
    with runtime(mode) as rt:
        oracle, chat = Oracle(), [system(SYSTEM)]
        for turn in range(10):
            answer, expected = converse(rt, oracle, chat, f"question {turn} about the house")
            assert answer.report.computed <= bound(mode, expected, 16)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_many_users_round_robin_on_few_slots(mode: str) -> None:
    with runtime(mode) as rt:
        oracle = Oracle()
        chats: list[Messages] = [[system(SYSTEM)] for _ in range(16)]
        for turn in range(3):
            for number, chat in enumerate(chats):
                first = turn == 0
                answer, expected = converse(rt, oracle, chat, f"user {number} asks question {turn}")
                assert answer.report.computed <= bound(mode, expected, 16, inside=first)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_regenerate_edit_and_back(mode: str) -> None:
    with runtime(mode) as rt:
        oracle, chat = Oracle(), [system(SYSTEM)]
        for turn in range(4):
            converse(rt, oracle, chat, f"question {turn} about the garden and the gate")
        original = list(chat[:-1])
        edited_last = [*original[:-1], user("something else entirely, if you please")]
        edited_middle = [*original[:3], user("a different second question"), *original[4:]]
        for messages in (original, edited_last, original, edited_middle, original, edited_middle):
            expected = oracle.cost(rt.chat_prompt(messages).tokens)
            answer = ask(rt, messages)
            oracle.learn(answer)
            assert answer.report.computed <= bound(mode, expected, 16, inside=True), answer.report


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_changed_line_in_the_middle_of_the_system_prompt(mode: str) -> None:
    with runtime(mode) as rt:
        oracle = Oracle()
        for day in ("monday", "tuesday", "monday", "tuesday", "wednesday"):
            messages = [system(SYSTEM + f"Today is {day}. " + SYSTEM), user("hello there")]
            expected = oracle.cost(rt.chat_prompt(messages).tokens)
            answer = ask(rt, messages)
            oracle.learn(answer)
            assert answer.report.computed <= bound(mode, expected, 16, inside=True)


def test_four_concurrent_requests_compute_their_prefix_once() -> None:
    """Fault: a busy prefix cannot be shared."""
    with runtime() as rt:
        engine = rt.engine
        assert isinstance(engine, FakeEngine)
        prompts = [[system(SYSTEM * 4), user(f"{number} is my number")] for number in range(4)]
        shared = len(rt.chat_prompt([system(SYSTEM * 4)], generation=False))
        before = engine.prefilled
        pending = [submit(rt, messages) for messages in prompts]
        reports = [one.answer().report for one in pending]
        total = engine.prefilled - before
        assert total == sum(report.computed for report in reports)
        assert total <= shared + sum(report.prompt - shared + GRID for report in reports)


def test_n_choices_compute_the_prompt_once_even_above_the_slots() -> None:
    with runtime(slots=2) as rt:
        answer = submit(rt, [system(SYSTEM), user("tell me")], choices=5).answer()
        assert len(answer.finishes) == 5
        assert len(set(answer.texts.values())) == 1  # greedy
        computed = sum(finish.report.computed for finish in answer.finishes.values())
        assert computed <= len(answer.prompt) + 4 * GRID


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
        assert report.cached >= done.done - GRID


def test_single_messages_and_short_conversations_hit() -> None:
    """Fault: no reuse below some length, or for single-message conversations."""
    with runtime() as rt:
        first = ask(rt, [user("hi")])
        again = ask(rt, [user("hi")])
        assert first.report.cached == 0
        assert again.report.computed <= GRID
        assert ask(rt, [user("hi"), assistant(first.text), user("and?")]).report.cached >= len(first.prompt)


def test_a_hit_does_not_move_an_entry_out() -> None:
    with runtime(slots=1) as rt:
        base = [system(SYSTEM), user("one")]
        ask(rt, base)
        for number in range(5):
            ask(rt, [user(f"somebody else entirely {number}")])
            assert ask(rt, base).report.computed <= GRID


def test_a_reply_spelled_otherwise_is_a_hit_in_fast_mode() -> None:
    """The model's tokens for a text are not always the tokenizer's choice."""
    from headstart.engines.fake import FakeTokenizer

    words = [a + b for a in "etaoin" for b in "etaoin"]
    engine = FakeEngine(ctx=4096, grid=GRID, alphabet=b"etaoin", tokenizer=FakeTokenizer(words))
    with Runtime(engine, Settings(memory_budget=4 << 20)) as rt:
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
        assert ask(rt, messages, salt="alice").report.computed <= GRID


def test_a_model_that_cannot_be_cut_only_ever_grows() -> None:
    """Fault: state that cannot be rewound is served after a mismatch; or a slid window claims to be trimmable."""
    with runtime(sliceable=False) as rt:
        chat = [system(SYSTEM), user("one")]
        cold = Runtime(FakeEngine(ctx=4096, grid=GRID, sliceable=False), Settings())
        first = ask(rt, chat)
        grown = [*chat, assistant(first.text), user("two")]
        assert ask(rt, grown).report.live >= len(first.prompt)
        edited = [system(SYSTEM), user("another"), *grown[2:]]
        warm = ask(rt, edited, keep_logits=True)
        assert warm.report.cached == 0
        assert warm.report.reason is not None
        assert warm.text == ask(cold, edited).text
        cold.close()
