"""The causes, and the latest requests that they are found in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.explain.causes import CAUSES, Cause
from headstart.explain.diff import difference
from headstart.explain.explain import CacheView, Explanation, NotFetched, RequestView, alike, compare, nearest
from headstart.explain.fingerprint import ConversationFingerprint, ConversationFingerprints
from headstart.explain.history import NoHistory, RecentHistory
from headstart.explain.record import Record, key_of
from headstart.interfaces.tokens import Tokens, common_prefix
from headstart.prompt.builder import Prompt, Prompter
from headstart.prompt.chat_template import Template
from headstart.testing.fake_engine import CHATML, FakeTokenizer
from talks import talk

PROMPTER = Prompter(FakeTokenizer(), Template(CHATML, {}))
BLOCK_SIZE = 8


def prompt(*contents: str, roles: str = "sua", **options: Any) -> Prompt:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    order = roles[:1] + (roles[1:] * len(contents))[: len(contents) - 1]
    return PROMPTER.chat(
        talk([{"role": names[role], "content": content} for role, content in zip(order, contents, strict=True)], **options)
    )


def remembered(asked: Prompt, root: bytes = b"r", **options: Any) -> Record:
    return Record(root, asked.text, asked.tokens, len(asked), source=asked.source, **options)


def characters(tokens: Tokens) -> int:
    return sum(len(PROMPTER.tokenizer.token_bytes(token)) for token in tokens.tolist())


def cached(start: int = 0, **options: Any) -> CacheView:
    given = {
        "exact": False,
        "sliceable": True,
        "known_kv": lambda: 0,
        "elsewhere": lambda: 0,
        "otherwise": lambda: 0,
        "characters": characters,
        "pace": 0.5,
    }
    return CacheView(start, BLOCK_SIZE, **{**given, **options})


def explained(asked: Prompt, *records: Record, start: int = 0, root: bytes = b"r", **options: Any) -> Explanation | None:
    history = RecentHistory()
    for record in records:
        history.remember(record)
    names = {name: options.pop(name) for name in ("tenant", "session", "reuse") if name in options}
    return history.explain(RequestView(root, asked, **names), cached(start, **options))


def test_each_cause_is_told_to_people() -> None:
    assert list(CAUSES) == list(Cause)
    for meaning in CAUSES.values():
        assert meaning.what.endswith(".")
        assert str(meaning.hint).endswith(".")
        classes = ("cold", "fingerprint", "diverged", "evicted", "slower", "store", "derived", "state", "disabled")
        assert meaning.reason in classes
    assert len({meaning.what for meaning in CAUSES.values()}) == len(Cause)


def test_the_page_has_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text("utf-8")
    for cause, meaning in CAUSES.items():
        assert f"| `{cause}` | {meaning.what} | `{meaning.anthropic}` | `{meaning.responses}` |" in page


def test_what_was_missed_costs_what_prefill_costs() -> None:
    earlier = prompt("system", "one question", "an answer", "another question")
    found = explained(prompt("system", "one question", "an answer", "another question"), remembered(earlier))
    assert found is not None
    assert (found.cause, found.recomputed, found.seconds) == (Cause.EVICTED, len(earlier) - 1, (len(earlier) - 1) / 2)


def test_what_cost_the_most_is_told() -> None:
    """Rows of a prefix are gone, and a message behind it was edited: which of the two is the cause depends on their lengths."""
    short, long = "a short answer", "an answer of many words, " * 20
    for first, second, cause in ((long, short, Cause.EVICTED), (short, long, Cause.MESSAGE)):
        earlier = prompt("system", first, "reply, edited later", second)
        found = explained(prompt("system", first, "reply, Edited later", second), remembered(earlier))
        assert found is not None
        assert found.cause is cause


def test_what_was_found_beyond_the_difference_is_no_miss() -> None:
    """As after settling: the text differs from what was said, but not from what was computed when idle."""
    earlier = prompt("system", "a question", "an answer, which the template changes later", "then")
    now = prompt("system", "a question", "AN answer, which the template changes later", "something else, and longer")
    shared = common_prefix(earlier.tokens, now.tokens)
    assert explained(now, remembered(earlier), start=len(now) - 40) is None
    found = explained(now, remembered(earlier), start=shared)
    assert found is not None
    assert found.cause is Cause.MESSAGE


WORDS = st.tuples(st.sampled_from("abc"), st.text("abc \n", min_size=6, max_size=38), st.sampled_from("abc")).map("".join)
"""No shorter than what is no coincidence, without white space at the ends."""
PARTS = st.lists(st.tuples(WORDS, st.sampled_from(["", "OLD"])), min_size=1, max_size=4)


@given(st.lists(PARTS, min_size=1, max_size=5), st.integers(0, BLOCK_SIZE - 1), st.booleans())
def test_what_is_missed_is_what_both_have_behind_the_first_change(
    messages: list[list[tuple[str, str]]], less: int, more: bool
) -> None:
    """Any number of places are written otherwise, in digits that nothing else has, and there may be a new message."""
    said = [*("".join(word + change for word, change in parts) for parts in messages), "the end"]
    changed = [content.replace("OLD", "01234567890") for content in said]
    earlier = prompt(*said)
    now = prompt(*changed, *["98765432109876543210"] * more)
    shared = common_prefix(earlier.tokens, now.tokens)
    start = max(0, shared - less)
    found = explained(now, remembered(earlier), start=start)
    if not any(change for parts in messages for _, change in parts):
        assert found is None
        return
    assert found is not None
    again = sum(token not in set(b"0123456789") for token in prompt(*changed).tokens[shared:].tolist())
    header = len("<|im_end|>\n<|im_start|>assistant\n") * more  # the earlier one has one there, where current goes on
    assert abs(found.recomputed - min(again + less, len(now) - 1 - start)) <= header


def test_a_date_at_the_top_and_a_status_at_the_bottom_cost_all_between_them() -> None:
    rules = " ".join(f"Rule {number} is to do as rule {number * 7 % 100} says." for number in range(100))
    old, new = f"It is Monday. {rules} Two files are open.", f"It is Friday. {rules} Nothing is open."
    for before, behind in ((["Hi"], ["Well?"]), (["a question", "an answer", "more"], ["another", "what I said", "so"])):
        found = explained(prompt(new, *behind), remembered(prompt(old, *before)), start=16)
        assert found is not None
        assert (found.cause, found.message) == (Cause.SYSTEM, 0)
        assert len(rules) <= found.recomputed <= len(rules) + 100
        assert found.seconds == found.recomputed / 2


def test_tools_behind_one_that_has_changed_are_missed_too() -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "description": f"Does number {n}."}} for n in range(30)]
    later = [{"type": "function", "function": {"name": "tool_0", "description": "Does nothing."}}, *tools[1:]]
    earlier = prompt("It is Monday, and you are kind.", "a question", tools=tools)
    now = prompt("It is Friday, and you are kind.", "something else", tools=later)
    found = explained(now, remembered(earlier))
    assert found is not None
    assert found.cause is Cause.TOOLS
    assert len(str(tools[1:])) * 0.9 < found.recomputed < len(now)


def test_a_summary_is_new_also_where_the_model_has_just_written_it() -> None:
    """The request for it has everything that was said, and its reply is what takes the place of that."""
    talk = [f"what was said as number {number}, in some words" for number in range(8)]
    asked = prompt("system", *talk, "Now sum all of that up.")
    told = "This is a summary: " + "the user has asked this and that, and all of it was answered at length. " * 3
    record = Record(b"r", asked.text + told, PROMPTER.text(asked.text + told).tokens, len(asked), told, source=asked.source)
    now = prompt("system", told, talk[-1], "Go on.")
    found = explained(now, record, start=8)
    assert found is not None
    assert (found.cause, found.message) == (Cause.COMPACTED, 1)
    assert len(talk[-1]) <= found.recomputed <= len(talk[-1]) + 60


def test_derived_and_checkpoint() -> None:
    earlier = prompt("system", "a question of some length", "an answer of some length")
    record = Record(b"r", earlier.text, earlier.tokens, canonical=40, source=earlier.source)
    again = prompt("system", "a question of some length", "an answer of some length")
    for options, cause in (
        ({"exact": True, "start": 40}, Cause.DERIVED),
        ({"exact": True, "start": 0}, Cause.EVICTED),
        ({"sliceable": False, "known_kv": lambda: 80}, Cause.CHECKPOINT),
        ({"sliceable": False}, Cause.EVICTED),
    ):
        found = explained(again, record, **options)
        assert found is not None
        assert found.cause is cause


@pytest.mark.parametrize(
    "options", [{}, {"sliceable": False, "known_kv": lambda: 80}, {"exact": True}], ids=["fast", "with checkpoints", "exact"]
)
def test_what_was_slower_to_restore_than_to_compute_is_told(options: dict[str, Any]) -> None:
    """It is no other cause as well, unless that cost more."""
    earlier = prompt("system", "a question of some length", "an answer of some length")
    again = prompt("system", "a question of some length", "an answer of some length")
    missed = len(again) - 1 - 16
    for passed_over, cause, recomputed in ((missed, Cause.SLOWER, missed), (missed - 10, Cause.SLOWER, missed - 10)):
        found = explained(again, remembered(earlier), start=16, passed_over=passed_over, **options)
        assert found is not None
        assert (found.cause, found.recomputed, found.token) == (cause, recomputed, 16)
    few = explained(again, remembered(earlier), start=16, passed_over=20, **options)
    assert few is not None
    assert few.cause is not Cause.SLOWER
    assert few.recomputed == missed - 20


def test_what_the_shared_store_has_was_not_evicted() -> None:
    """Fault: what a store did not bring in time was said to be evicted, or to be new."""
    new = prompt("system", "a question of some length", "an answer of some length")
    for there, recomputed in ((0, 0), (60, 44), (10_000, len(new) - 1 - 16)):
        found = explained(new, start=16 if there else 0, not_fetched=NotFetched(Cause.STORE, there))
        assert found is not None
        assert (found.cause, found.recomputed) == (Cause.STORE, recomputed)
    assert explained(new, start=60, not_fetched=NotFetched(Cause.SLOWER, 60)) is None, "all of it came"
    earlier = remembered(prompt("system", "a question of some length", "an answer of some length"))
    for rest in (NotFetched(Cause.STORE, 0), NotFetched(Cause.SLOWER, 60)):
        found = explained(new, earlier, start=16, not_fetched=rest)
        assert found is not None
        assert (found.cause, found.recomputed, found.token) == (rest.cause, len(new) - 1 - 16, 16)
    changed = explained(prompt("another system"), earlier, not_fetched=NotFetched(Cause.STORE, 0))
    assert changed is not None
    assert changed.cause is Cause.STORE, "nobody knows what the store has"


def test_what_is_there_and_was_computed_is_not_evicted() -> None:
    earlier = prompt("system", "a question of some length", "an answer of some length")
    again = prompt("system", "a question of some length", "an answer of some length")
    assert explained(again, remembered(earlier), start=16, known_kv=lambda: len(earlier)) is None
    partly = explained(again, remembered(earlier), start=16, known_kv=lambda: 40)
    assert partly is not None
    assert (partly.cause, partly.recomputed) == (Cause.EVICTED, len(earlier) - 1 - 40)


def test_what_differs_from_another_ones_new_message_is_new() -> None:
    """Two conversations with the same beginning, each with a message of its own then."""
    opening = prompt("system", "a question of some length")
    began = remembered(opening, reply=opening.text[-12:])
    other = prompt("system", "a question of some length", "so", "said by the one")
    now = prompt("system", "a question of some length", "so", "said by the other")
    shared = common_prefix(other.tokens, now.tokens)
    assert explained(now, began, remembered(other), start=shared) is None
    assert explained(now, remembered(other), start=shared) is not None


def test_the_rest_of_a_block_is_missed_with_what_is_behind_it() -> None:
    earlier = prompt("system", "one word of a question changes", "an answer")
    now = prompt("system", "one WORD of a question changes", "an answer")
    shared = common_prefix(earlier.tokens, now.tokens)
    recomputed = []
    for start in (shared, shared - 5):
        found = explained(now, remembered(earlier), start=start)
        assert found is not None
        assert found.cause is Cause.MESSAGE
        recomputed.append(found.recomputed)
    assert recomputed[1] == recomputed[0] + 5


def test_less_than_a_block_behind_what_was_found_beyond_the_difference_is_no_miss() -> None:
    """As where settling has computed another spelling of a turn up to its last block boundary."""
    earlier, now = (prompt("system", "a question", text) for text in ("an answer", "An answer"))
    shared = common_prefix(earlier.tokens, now.tokens)
    assert explained(now, remembered(earlier), start=shared) is not None
    assert explained(now, remembered(earlier), start=shared + 8) is None


def test_new_tools_do_not_cost_more_than_there_was() -> None:
    """Between two messages that the earlier prompt had too, they are no part of what was computed again."""
    tool = {"type": "function", "function": {"name": "look", "description": "Looks at it, long and from all sides."}}
    for contents in (("system", "one question"), ("system", "one question", "an answer", "another")):
        earlier = prompt(*contents)
        found = explained(prompt(*contents, tools=[tool]), remembered(earlier))
        assert found is not None
        assert found.cause is Cause.TOOLS
        said = sum(len(content) for content in contents[1:])
        assert said <= found.recomputed <= len(earlier)


def test_where_all_was_reused_that_can_be_nothing_is_new() -> None:
    text = PROMPTER.text("abcd")
    record = Record(b"r", text.text, text.tokens, len(text))
    assert explained(text, record, start=len(text) - 1) is None
    assert explained(text, start=len(text) - 1) is None
    first = explained(text)
    assert first is not None
    assert first.cause is Cause.FIRST


@pytest.mark.parametrize("writes", [False, True], ids=["hidden", "written"])
def test_ids_of_calls_are_no_difference_unless_they_are_written(writes: bool) -> None:
    written = "{% for call in message.tool_calls or [] %}{{ call.id }}{% endfor %}" if writes else ""
    mark = "{{ '<|im_end|>\n' }}"
    prompter = Prompter(FakeTokenizer(), Template(CHATML.replace(mark, written + mark), {}))

    def asked(id: str, result: str) -> Prompt:
        call = {"id": id, "type": "function", "function": {"name": "ls", "arguments": {"path": "/"}}}
        messages: list[Any] = [
            {"role": "user", "content": "What is there?"},
            {"role": "assistant", "content": "I will look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "content": result},
            {"role": "user", "content": "Then tell me about each of these files."},
        ]
        return prompter.chat(talk(messages))

    first, second = asked("one", "README"), asked("two", "LICENSE")
    assert first.source is not None
    assert second.source is not None
    assert key_of(first.source.messages[1]) == key_of(second.source.messages[1])
    found = difference(second, remembered(first))
    assert found is not None
    assert found.cause is Cause.MESSAGE
    found = difference(asked("two", "README"), remembered(first))
    assert (None if found is None else (found.cause, found.message)) == ((Cause.MESSAGE, 1) if writes else None)


def test_a_fingerprint_is_told_with_what_is_known_of_it() -> None:
    for known, cause in ((48, Cause.FINGERPRINT), (0, Cause.FIRST)):
        found = explained(prompt("system", "question"), elsewhere=lambda known=known: known)
        assert found is not None
        assert (found.cause, found.recomputed) == (cause, known)


def test_a_template_is_told_with_what_was_known_under_the_other_one() -> None:
    asked = prompt("system", "question")
    for known, cause in ((20, Cause.TEMPLATE), (999, Cause.TEMPLATE), (0, Cause.FIRST)):
        found = explained(asked, otherwise=lambda known=known: known)
        assert found is not None
        assert (found.cause, found.recomputed) == (cause, min(known, len(asked) - 1))


def test_openings() -> None:
    talk, fingerprints = ("system", "first question", "answer", "another one"), ConversationFingerprints()
    first, later = (
        ConversationFingerprint.of(prompt(*talk[:2]), "template"),
        ConversationFingerprint.of(prompt(*talk), "template"),
    )
    assert first is not None
    assert later is not None
    assert first.key == later.key
    others = [prompt("other", "first question"), prompt(*talk[:2], salt="bob"), prompt(*talk[:2], tools=[{"name": "f"}])]
    found = [ConversationFingerprint.of(other, "template") for other in others]
    assert len({first.key, *(one.key for one in found if one is not None)}) == 4
    assert [fingerprints.learn(one) for one in (first, later, first)] == [True, False, False]
    for template, options, known in (("template", {}, 0), ("another", {}, len(others[0])), ("template", {"style": "x"}, 1)):
        now = ConversationFingerprint.of(prompt(*talk, **options), template)
        assert now is not None
        assert bool(fingerprints.otherwise(now)) == bool(known)
    assert ConversationFingerprint.unpack(first.key, first.pack()) == first
    for key, packed in ((later.key[::-1], later.pack()), (first.key, first.pack()[:-1] + b"x"), (first.key, b"")):
        with pytest.raises(ValueError, match="not the fingerprint"):
            ConversationFingerprint.unpack(key, packed)
    assert ConversationFingerprint.of(PROMPTER.text("raw"), "template") is None


@pytest.mark.parametrize("tenant", ["a", "b", ""])
def test_what_was_asked_with_another_salt_is_never_told(tenant: str) -> None:
    """A gateway's users may share one key: what one guesses of another's prompt must not show."""
    asked = prompt("system", "a question that was asked before")
    assert explained(asked, remembered(asked, b"other", tenant="a"), tenant=tenant) == explained(asked, tenant=tenant)


def test_two_salts_that_the_caller_says_are_told() -> None:
    one, other = prompt("system", "a question", salt="a"), prompt("system", "a question", salt="b")
    found = compare(other, one, block_size=BLOCK_SIZE, pace=0.5, characters=characters)
    assert found == Explanation(Cause.SALT, recomputed=len(one), seconds=len(one) * 0.5)


def test_tenants_that_share_a_salt_see_nothing_of_each_other() -> None:
    """Their rows may be shared (`--isolate none`), but not their texts."""
    asked, previous = prompt("system", "a question about Rome, the city"), prompt("system", "a question about Oslo, the city")
    found = explained(asked, remembered(previous, tenant="bob"), tenant="alice")
    assert found == Explanation(Cause.FIRST, seconds=0.0)
    assert explained(asked, remembered(previous, tenant="bob"), tenant="alice", start=24) is None
    mine = explained(asked, remembered(previous, tenant="alice"), tenant="alice", start=24)
    assert mine is not None
    assert "Oslo" in mine.previous


def test_the_nearest_is_the_one_with_most_in_common() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "Does something."}}
    talk = ("system prompt", "first question, of some length", "its answer, of some length", "then another one")
    same, other = remembered(prompt(*talk, tools=[tool])), remembered(prompt("system prompt", "something else"))
    asked = prompt(*talk)
    near, shared = nearest([same, other], asked.tokens)
    assert near is other, "tools come first, so their conversation has hardly a token in common"
    assert shared > 20
    assert alike([same, other], RequestView(b"r", asked), near, BLOCK_SIZE) is same
    assert alike([other], RequestView(b"r", asked), near, BLOCK_SIZE) is None
    found = explained(asked, same, other, start=shared // BLOCK_SIZE * BLOCK_SIZE)
    assert found is not None
    assert (found.cause, found.where) == (Cause.TOOLS, "tools")


def test_of_equals_the_one_of_the_same_session() -> None:
    talk = prompt("first question, of some length", "its answer", roles="ua")
    mine, others = remembered(talk, session="mine"), remembered(talk, session="another")
    asked = prompt("Be kind.", "first question, of some length", "its answer", roles="sua")
    assert alike([mine, others], RequestView(b"r", asked, session="mine"), None, 0) is mine
    assert alike([mine, others], RequestView(b"r", asked, session=""), None, 0) is others, "the latest"


def test_a_summary_is_known_by_the_reply_that_it_was() -> None:
    """A client may ask for it in a conversation of its own."""
    long = remembered(prompt("system", "one question", "its answer", "another question", "another answer", "a third one"))
    told = "The user has asked three things, and all of them were answered."
    asked = prompt("system", "one more time: " + told + " Go on.")
    for reply, cause in ((told, Cause.COMPACTED), ("Something else was said here, by somebody else.", None)):
        helper = prompt("Sum it up.", "question, answer, question, answer")
        other = Record(b"r", helper.text + reply, helper.tokens, reply=reply, source=helper.source)
        found = explained(asked, long, other, start=len("1system\n system 1 "))
        assert (found.cause if found is not None else None) is cause


def test_raw_texts_have_a_place_too() -> None:
    words = "some words that both have. " * 10
    one, other = (PROMPTER.text(f"Now it is {hour} o'clock. {words}") for hour in ("9", "10"))
    found = explained(other, Record(b"r", one.text, one.tokens), start=8)
    assert found is not None
    assert (found.cause, found.where, found.message, found.character) == (Cause.MESSAGE, "messages", None, 10)
    assert len(words) <= found.recomputed <= len(words) + 12


def test_compare_is_what_a_cache_that_forgets_nothing_would_miss() -> None:
    one, other = prompt("Monday", "a question", "an answer", "more"), prompt("Tuesday", "a question", "an answer", "more")
    found = compare(other, one, block_size=BLOCK_SIZE, pace=0.5, characters=characters)
    assert found is not None
    assert (found.cause, found.message, found.character) == (Cause.SYSTEM, 0, 0)
    assert len("a question an answer more") < found.recomputed < len(other)
    assert compare(one, one, block_size=BLOCK_SIZE, pace=0.5, characters=characters) is None


def test_the_history_is_bounded_in_number_and_bytes() -> None:
    history, made = RecentHistory(records=5, size=1 << 20), [remembered(prompt("s", f"{n}"), id=str(n)) for n in range(9)]
    for record in made:
        history.remember(record)
    assert [history.last(lambda record, n=n: record.id == str(n)) is not None for n in range(9)] == [False] * 4 + [True] * 5
    latest = history.last(lambda record: True)
    assert latest is made[-1]
    history = RecentHistory(size=sum(record.size for record in made[:3]))
    for record in made:
        history.remember(record)
    assert history.last(lambda record: record.id == "5") is None
    assert history.last(lambda record: record.id == "6") is made[6]


def test_a_records_size_counts_its_conversation() -> None:
    small, large = remembered(prompt("s", "u")), remembered(prompt("s", "u", tools=[{"name": "f", "text": "x" * 100_000}]))
    assert large.size - small.size > 500_000, "text, tokens (four bytes each) and the conversation itself"


def test_switched_off_nothing_is_kept_or_told() -> None:
    history = NoHistory()
    history.remember(remembered(prompt("s", "u")))
    assert history.explain(RequestView(b"r", prompt("s", "u")), cached()) is None
    assert history.last(lambda record: True) is None
