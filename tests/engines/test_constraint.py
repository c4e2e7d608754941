"""Replies are what their grammar says, on the fake engine and on llama.cpp; bad and hostile grammars do no harm."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from driving import SMALL, empty
from headstart.engines import constraint
from headstart.engines.constraint import KEPT, KEPT_TEXT, MOST_TEXT, Compiled, Constraint, Grammars, condense
from headstart.engines.llama import LlamaEngine
from headstart.errors import EngineError, InvalidRequest, Overloaded
from headstart.interfaces.engine import Engine, Step
from headstart.interfaces.sampling import GREEDY, Grammar, Sampling
from headstart.testing.fake_engine import END, START, STOP, FakeEngine, FakeTokenizer
from schemas import schema

LIVELY = Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine(slots=1, ctx=8192)


@pytest.fixture(scope="module")
def demo() -> Iterator[LlamaEngine]:
    engine = LlamaEngine.load(SMALL.engine_options(), block_size=64)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[LlamaEngine]:
    engine = LlamaEngine.load(replace(SMALL, model=str(tiny_model), slots=1, ctx=4096).engine_options(), block_size=64)
    yield engine
    engine.close()


@pytest.fixture(params=["fake", "demo"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    found = request.getfixturevalue(request.param)
    yield found
    if isinstance(found, LlamaEngine):
        empty(found)


def lark(text: str) -> Grammar:
    return Grammar("lark", text)


def of_schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def draw(engine: Engine, grammar: Grammar, sampling: Sampling = GREEDY, prompt: str = "List: ") -> list[int]:
    """A whole reply, its end token included."""
    engine.check_grammar(grammar)
    engine.truncate(0, 0)
    engine.prefill(0, np.array(engine.tokenizer.tokenize(prompt), np.int32), logits=True)
    sampler, tokens = engine.sampler(sampling, grammar), []
    try:
        while len(tokens) < engine.shape.ctx // 2:
            tokens.append(engine.sample(0, sampler))
            if tokens[-1] in engine.tokenizer.eog:
                return tokens
            engine.decode([Step(0, tokens[-1])])
    finally:
        sampler.close()
    raise AssertionError(f"no end in {len(tokens)} tokens: {text_of(engine, tokens)[:500]!r}")


def text_of(engine: Engine, tokens: list[int]) -> str:
    return b"".join(engine.tokenizer.token_bytes(token) for token in tokens if token not in engine.tokenizer.eog).decode()


def write(engine: Engine, grammar: Grammar, sampling: Sampling = GREEDY) -> str:
    return text_of(engine, draw(engine, grammar, sampling))


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("sampling", [GREEDY, LIVELY, replace(LIVELY, top_k=3, top_p=0.5, presence_penalty=1.5)])
def test_a_reply_matches_its_regular_expression(engine: Engine, sampling: Sampling) -> None:
    for number in range(3):
        text = write(engine, Grammar("regex", r"(ab|cd){2,5}-[0-9]{3}é?"), replace(sampling, seed=number))
        assert re.fullmatch(r"(ab|cd){2,5}-[0-9]{3}é?", text)


def test_a_reply_follows_its_lark_grammar(engine: Engine) -> None:
    text = write(engine, lark('start: "(" start ")" | /[a-c]{1,3}/'), LIVELY)
    inner = text.strip("()")
    assert text == "(" * ((len(text) - len(inner)) // 2) + inner + ")" * ((len(text) - len(inner)) // 2)
    assert re.fullmatch("[a-c]{1,3}", inner)


def test_an_end_token_is_drawn_only_where_the_grammar_accepts(engine: Engine) -> None:
    """The model wants to end at once, and is not let; and it wants to go on, and is not let either."""
    ends = tuple((token, 1000.0) for token in engine.tokenizer.eog)
    tokens = draw(engine, Grammar("regex", "[ab]{5,9}"), replace(GREEDY, logit_bias=ends))
    assert len(text_of(engine, tokens)) >= 5 > len(text_of(engine, tokens[:-2])), "it ends at the first token at which it may"
    never = tuple((token, -1000.0) for token in engine.tokenizer.eog)
    tokens = draw(engine, Grammar("regex", "[ab]{5,9}"), replace(GREEDY, logit_bias=never))
    assert len(text_of(engine, tokens)) == 9
    assert tokens[-1] in engine.tokenizer.eog


def test_a_caller_cannot_ban_all_that_a_grammar_allows(engine: Engine) -> None:
    banned = tuple((token, float("-inf")) for token in range(engine.tokenizer.n_vocab))
    assert write(engine, Grammar("regex", "ab"), replace(GREEDY, logit_bias=banned)) == "ab"


def test_drawing_leaves_the_logits_as_they_are(engine: Engine) -> None:
    grammar = Grammar("regex", "[0-9]+")
    engine.check_grammar(grammar)
    engine.prefill(0, np.array([65, 66], np.int32), logits=True)
    before = engine.logits(0)
    held, free = engine.sampler(GREEDY, grammar), engine.sampler(GREEDY)
    drawn = engine.sample(0, held)
    assert (engine.logits(0) == before).all()
    assert engine.sample(0, free) == before.argmax() != drawn
    digits = [
        token for token in range(engine.tokenizer.n_vocab) if re.fullmatch(rb"[0-9]+", engine.tokenizer.token_bytes(token))
    ]
    assert drawn == max(digits, key=lambda token: before[token])


def test_a_mask_for_a_device_has_a_bit_for_each_allowed_token(engine: Engine) -> None:
    ready = engine.check_grammar(Grammar("regex", "[0-9]+")).ready
    assert isinstance(ready, Compiled)
    vocabulary = engine.tokenizer.n_vocab
    constraint = Constraint(ready.matcher.deep_copy(), "it", engine.tokenizer.eog, vocabulary)
    bits = constraint.bits()
    assert (bits.dtype, bits.shape) == (np.uint32, ((vocabulary + 31) // 32,))
    found = [token for token in range(vocabulary) if bits[token // 32] >> np.uint32(token % 32) & np.uint32(1)]
    assert found == constraint.allowed().tolist()
    assert 0 < len(found) < vocabulary


# ── control tokens ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_control_tokens_are_named_as_they_are_spelled(engine: Engine) -> None:
    start = next(control for control in engine.tokenizer.controls if control.text == "<|im_start|>")
    tokens = draw(engine, lark('start: "a" <|im_start|> "b"'))
    assert tokens[1] == start.id
    assert text_of(engine, tokens) == "a<|im_start|>b"


def test_control_tokens_are_no_part_of_free_text(engine: Engine) -> None:
    controls = {control.id for control in engine.tokenizer.controls}
    likes = replace(GREEDY, logit_bias=tuple((token, 1000.0) for token in controls))
    for grammar in (lark("start: /(.|\\n){5,9}/"), of_schema({"type": "string", "minLength": 5, "maxLength": 9})):
        tokens = draw(engine, grammar, likes)
        assert not controls & set(tokens[:-1])
    spelled = draw(engine, lark('start: "<|im_start|>"'), likes)  # a text that reads like one is text
    assert text_of(engine, spelled) == "<|im_start|>"
    assert not controls & set(spelled[:-1])


def test_a_lazy_grammar_holds_the_reply_only_from_its_trigger_on() -> None:
    engine = FakeEngine(slots=1)
    grammar = lark('start: /(.|\\n)*/ (<|im_start|> "call:" /[0-9]{2}/)?')
    likes = replace(LIVELY, logit_bias=((START.id, 52.0), (END.id, -1000.0), (STOP.id, -1000.0)))
    tokens = draw(engine, grammar, likes)
    assert re.fullmatch(r"(?s).*<\|im_start\|>call:\d\d", text_of(engine, tokens))


def test_an_end_token_in_the_middle_of_a_grammar_is_an_error(fake: FakeEngine) -> None:
    assert draw(fake, lark('start: "a" <|im_end|>')) == [ord("a"), END.id]
    with pytest.raises(EngineError, match="ends a reply before the reply is complete"):
        draw(fake, lark('start: "a" <|im_end|> "b"'))


# ── tokenizers ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Blanks(FakeTokenizer):
    """As sentencepiece does it: a blank goes before every text of its own."""

    def tokenize(self, text: str) -> list[int]:
        return super().tokenize(" " + text)


class Shouts(FakeTokenizer):
    """Does not spell what it is given."""

    def tokenize(self, text: str) -> list[int]:
        return super().tokenize(text.upper())


@pytest.mark.parametrize("kind", [FakeTokenizer, Blanks, Shouts])
def test_forced_texts_are_spelled_exactly_whatever_the_tokenizer_adds(kind: type[FakeTokenizer]) -> None:
    engine = FakeEngine(slots=1, tokenizer=kind(["name", " name", "na", "größe", "\n\n"]))
    constant = {"type": "object", "properties": {"name": {"const": "größe\n name"}}, "required": ["name"]}
    constant["additionalProperties"] = False
    assert json.loads(write(engine, of_schema(constant))) == {"name": "größe\n name"}


@pytest.mark.slow
def test_sentencepiece_vocabularies(gemma_model: Path) -> None:
    engine = LlamaEngine.load(replace(SMALL, model=str(gemma_model), slots=1).engine_options(), block_size=64)
    try:
        value = {"type": "object", "properties": {"a name": {"enum": ["größe", " x"]}}, "required": ["a name"]}
        value["additionalProperties"] = False
        assert json.loads(write(engine, of_schema(value), LIVELY))["a name"] in ("größe", " x")
        assert write(engine, Grammar("regex", "abc( |\n)def")) in ("abc def", "abc\ndef")
        assert "<start_of_turn>" in write(engine, lark('start: "a" <start_of_turn>'))
    finally:
        engine.close()


def test_a_model_without_an_end_token_follows_no_grammar() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.eog = frozenset()
    with pytest.raises(InvalidRequest, match="no token that ends a reply"):
        Grammars(tokenizer).check(Grammar("regex", "a"))


def test_a_byte_that_no_token_says_is_an_error_of_the_request(fake: FakeEngine) -> None:
    fake.tokenizer._bytes[ord("z")] = b""
    grammar = Grammar("regex", "az|aé")
    assert write(fake, grammar) == "aé"
    with pytest.raises(EngineError, match="regular expression 'az'"):
        draw(fake, Grammar("regex", "az"))


# ── grammars that cannot be followed ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (lark('start: "a'), "This grammar cannot be followed: 1(10): lexer error."),
        (lark("start: <|nope|>"), 'unknown special token: "<|nope|>"'),
        (lark("begin: /a/"), "start"),
        (Grammar("regex", "a(?=b)"), "look-around, including look-ahead and look-behind, is not supported."),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("json_schema", '{"type":'), "EOF"),
        (of_schema({"type": "word"}), "This JSON schema cannot be followed: Invalid type: word."),
        (of_schema({"type": "string", "not": {"const": "a"}}), 'Unimplemented keys: ["not"].'),
        (of_schema({"$ref": "#/$defs/missing"}), "missing"),
        (of_schema([1]), "Expecting object schema"),
        (Grammar("regex", "\ud800"), "surrogates not allowed"),
        (of_schema({"$ref": "#"}), "nothing satisfies it."),
        (Grammar("regex", "[a--a]b"), "nothing satisfies it."),
        (of_schema({"type": "integer", "minimum": 3, "maximum": 2}), "Unsatisfiable"),
        (of_schema({"not": {}, "x-guidance": {"lenient": True}}), "Unimplemented"),
        (Grammar("regex", "a" * (MOST_TEXT + 1)), f"it has {MOST_TEXT + 1} bytes; {MOST_TEXT} are the most."),
    ],
    ids=lambda value: value.text[:30] if isinstance(value, Grammar) else "",
)
def test_what_cannot_be_followed_is_the_callers_fault_in_one_line(fake: FakeEngine, grammar: Grammar, words: str) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            fake.check_grammar(grammar, "response_format")
        assert words in caught.value.message
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < 400
        assert caught.value.param == "response_format"


def test_messages_lose_their_excerpts() -> None:
    said = "at 1(8): invalid\n    a(?=b)\n     ^^^\nerror: not supported\n   1 | start: /a(?=b)/\n              ^\n"
    assert condense(said) == "at 1(8): invalid a(?=b) error: not supported."
    assert condense("x" * 1000) == "x" * 300 + "…."
    assert condense("") == "for no known reason."


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        found = {"type": "array", "items": found}
    return found


HOSTILE = {
    "deep schema": lambda: Grammar("json_schema", '{"items":' * 20_000 + "true" + "}" * 20_000),
    "deep but parsed": lambda: of_schema(nested(60)),
    "deep lark": lambda: lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "deep regex": lambda: Grammar("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "counted": lambda: Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "counted in lark": lambda: lark("start: x{1000000}\nx: y{1000000}\ny: /[a-z]/{1000000}"),
    "long strings": lambda: of_schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "long array": lambda: of_schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 10**9}),
    "states": lambda: Grammar("regex", ".*a.{40}b.*c.{40}"),
    "and": lambda: lark("start: T\nT: " + " & ".join(f"/.*{letter}.{{12}}/" for letter in "abcdefghijkl")),
    "products": lambda: of_schema({"allOf": [{"anyOf": [{"minimum": i * j} for j in range(9)]} for i in range(9)]}),
    "many values": lambda: of_schema({"enum": [f"value {number}" for number in range(8_000)]}),
    "many names": lambda: of_schema({"properties": {f"p{number}": {"type": "string"} for number in range(4_000)}}),
    "any depth": lambda: of_schema({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}),
    "only itself": lambda: of_schema({"$ref": "#"}),
    "ambiguous": lambda: lark('start: start start | "a" | "a" "a"'),
    "empty for ever": lambda: lark('start: x*\nx: y*\ny: ""'),
}


OUTCOMES = {
    "deep schema": "refused: .* recursion limit",
    "deep but parsed": r"reply: \[\]$",
    "deep lark": "refused: .* too deeply nested",
    "deep regex": "refused: .* invalid regex",
    "counted": "failed: .* too many expressions",
    "counted in lark": "reply: [a-z]{100}$",
    "long strings": r'reply: "[^"]{50}',
    "long array": r"reply: \[[-0-9, \n\t]{50}",
    "states": "reply: .{100}$",
    "and": "refused: .* fuel exhausted",
    "products": "refused: .* too large",
    "many values": r'reply: "value \d{1,4}"$',
    "many names": r"reply: \S",
    "any depth": r"reply: [\[\]nul, \n\t]+$",
    "only itself": "refused: .* nothing satisfies it",
    "ambiguous": "reply: a{100}$",
    "empty for ever": "reply: $",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_bounded(fake: FakeEngine, name: str) -> None:
    """Each is refused, fails, or is followed for some tokens; the limits, not the test's timeout, end it.

    The engine then follows the next grammar as if there had been none before.
    """
    assert re.match(OUTCOMES[name], followed(fake, HOSTILE[name]()), re.DOTALL)
    assert text_of(fake, draw(fake, Grammar("regex", "unharmed"))) == "unharmed"


def followed(fake: FakeEngine, grammar: Grammar) -> str:
    """What comes of a grammar: its refusal, its failure, or the first 100 bytes of a reply."""
    try:
        fake.check_grammar(grammar)
    except InvalidRequest as error:
        return f"refused: {error}"
    fake.prefill(0, np.array([65], np.int32), logits=True)
    sampler = fake.sampler(replace(LIVELY, logit_bias=((END.id, -1000.0), (STOP.id, -1000.0))), grammar)
    reply: list[int] = []
    try:
        while len(reply) < 100 and (token := fake.sample(0, sampler)) not in fake.tokenizer.eog:
            reply.append(token)
            fake.decode([Step(0, token)])
    except EngineError as error:
        return f"failed: {error}"
    finally:
        sampler.close()
    return f"reply: {text_of(fake, reply)}"


def test_compiled_grammars_are_kept_within_a_bound(fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "headstart.constraint"):
        for number in range(KEPT + 1):
            fake.check_grammar(Grammar("regex", f"a{number}"))
        fake.check_grammar(Grammar("regex", f"a{KEPT}"))
        assert len(caplog.records) == KEPT + 2  # making the tokenizer ready once
        fake.check_grammar(Grammar("regex", "a0"))  # gone, and compiled anew
        assert len(caplog.records) == KEPT + 3
        for letter in "abc":
            fake.check_grammar(Grammar("regex", letter * (KEPT_TEXT // 3 + 1)))
        fake.check_grammar(Grammar("regex", f"a{KEPT}"))  # they left no room for it
        assert len(caplog.records) == KEPT + 7


def test_whoever_starts_a_known_grammar_waits_for_no_compiling(fake: FakeEngine) -> None:
    """The engine's thread starts replies, and all others would wait with it."""
    known, unknown = Grammar("regex", "ab"), Grammar("regex", "cd")
    fake.check_grammar(known)
    with fake._grammars._compiling, ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(fake.check_grammar, unknown)
        assert pool.submit(fake.sampler, GREEDY, known).result(timeout=30)
        assert not waiting.done()
        fake._grammars._compiling.release()
        waiting.result(timeout=30)
        fake._grammars._compiling.acquire()


def test_a_request_holds_what_was_compiled_for_it(fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Fault: others' grammars put it out while it waits, and the engine's thread compiles it again."""
    ready = fake.check_grammar(Grammar("regex", "held"))
    assert ready == Grammar("regex", "held")
    for number in range(KEPT):
        fake.check_grammar(Grammar("regex", f"b{number}"))
    with caplog.at_level(logging.DEBUG, "headstart.constraint"):
        assert fake.sampler(GREEDY, ready)
        assert fake.check_grammar(ready) is ready
    assert not compiled(caplog)


def compiled(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was compiled; the tokenizer may have been made ready meanwhile, which is said too."""
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("compiled")]


def test_what_is_compiled_for_one_is_not_known_to_another(fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Else the time that it takes tells what others have asked for."""
    fake.check_grammar(Grammar("regex", "salted"))
    with caplog.at_level(logging.DEBUG, "headstart.constraint"):
        for salt, times in (("a", 1), ("b", 2), ("a", 2), ("", 2)):
            fake.check_grammar(Grammar("regex", "salted", salt))
            assert len(compiled(caplog)) == times


def test_grammars_in_use_are_bounded(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KEPT_TEXT // 8  # long grammars take long to compile
    monkeypatch.setattr(constraint, "KEPT_TEXT", kept)
    monkeypatch.setattr(constraint, "IN_USE_TEXT", 4 * kept)
    grammars, size = Grammars(fake.tokenizer), kept // 4

    def large(number: int) -> Grammar:
        return grammars.check(Grammar("regex", f"{number:03}{'x' * (size - 3)}"))

    held = [large(number) for number in range(4 * kept // size)]
    with pytest.raises(Overloaded):
        large(100)
    assert grammars.check(held[0]) is held[0]
    del held[:8]
    assert grammars.check(Grammar("regex", "small again"))


# ── random schemas ───────────────────────────────────────────────────────────────────────────────────────────────────


def check_random(engine: Engine, seeds: range) -> None:
    for seed in seeds:
        value = schema(random.Random(seed))
        text = write(engine, of_schema(value), replace(LIVELY, seed=seed))
        try:
            jsonschema_rs.validate(value, json.loads(text))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {text!r} for {json.dumps(value)}") from error


def test_random_schemas_give_valid_replies(fake: FakeEngine) -> None:
    check_random(fake, range(60))


def test_random_schemas_give_valid_replies_with_a_real_vocabulary(small: LlamaEngine) -> None:
    check_random(small, range(60, 80))


@pytest.mark.slow
def test_a_thousand_random_schemas_give_valid_replies(small: LlamaEngine, fake: FakeEngine) -> None:
    check_random(small, range(1000))
    check_random(fake, range(1000))
