"""Grammars: a grammar is refused, or replies follow it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from unittest import SkipTest

from headstart.errors import InvalidRequest
from headstart.interfaces.engine import Step
from headstart.interfaces.sampling import GREEDY, Grammar, Sampling
from headstart.interfaces.tokens import as_tokens
from headstart.testing.conformance.driver import EngineUnderTest, expect

LIVELY = Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
_LONGEST = 100
"""Tokens in which the replies below must end."""
_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["größe", "weight"]}, "count": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


def _fits_the_schema(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return set(found) == {"kind", "count"} and found["kind"] in ("größe", "weight") and 0 <= found["count"] <= 130


_FORMS: tuple[tuple[Grammar, Callable[[str], object]], ...] = (
    (Grammar("regex", r"(ab|cd){2,5}-[0-9]{3}é?"), re.compile(r"(ab|cd){2,5}-[0-9]{3}é?").fullmatch),
    (Grammar("json_schema", json.dumps(_SCHEMA)), _fits_the_schema),
    (Grammar("lark", 'start: "(" /[a-c]{1,3}/ ")"'), re.compile(r"\([a-c]{1,3}\)").fullmatch),
)
"""Grammars, and whether a text follows them."""


def _ready(subject: EngineUnderTest, grammar: Grammar) -> Grammar | None:
    """The checked grammar; None if the engine refuses it."""
    try:
        return subject.engine.check_grammar(grammar, "response_format")
    except InvalidRequest as error:
        expect(error.param == "response_format", f"check_grammar refuses {grammar.kind} without the name of the parameter")
        return None


def _write(subject: EngineUnderTest, grammar: Grammar, sampling: Sampling) -> str:
    engine = subject.engine
    engine.truncate(0, 0)
    engine.prefill(0, as_tokens(engine.tokenizer.tokenize("List: ")), logits=True)
    tokens: list[int] = []
    with closing(engine.sampler(sampling, grammar)) as sampler:
        while (token := engine.sample(0, sampler)) not in engine.tokenizer.eog and len(tokens) < _LONGEST:
            tokens.append(token)
            engine.decode([Step(0, token)])
    return b"".join(map(engine.tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


def _without_blanks(subject: EngineUnderTest) -> tuple[tuple[int, float], ...]:
    """Biases that forbid tokens of white space alone: a model with random weights may write them for ever."""
    tokenizer = subject.engine.tokenizer
    special = {control.id for control in tokenizer.controls} | tokenizer.eog
    blanks = (token for token in range(tokenizer.n_vocab) if token not in special and tokenizer.token_bytes(token).isspace())
    return tuple((token, -math.inf) for token in blanks)


def replies_follow_their_grammar(subject: EngineUnderTest) -> None:
    """Also after `forget_grammars`: a grammar in use stays valid."""
    followed, solid = 0, _without_blanks(subject)
    for grammar, follows in _FORMS:
        if (ready := _ready(subject, grammar)) is None:
            continue
        followed += 1
        for sampling in (GREEDY, LIVELY, replace(LIVELY, seed=2)):
            text = _write(subject, ready, replace(sampling, logit_bias=solid))
            expect(bool(follows(text)), f"check_grammar accepts the {grammar.kind} {grammar.text}, but a reply is {text!r}")
            subject.engine.forget_grammars()
    if not followed:
        raise SkipTest("the engine follows no grammar")


def broken_grammars_are_refused(subject: EngineUnderTest) -> None:
    for grammar in (Grammar("regex", "(a"), Grammar("lark", 'start: "a'), Grammar("json_schema", '{"type":')):
        expect(_ready(subject, grammar) is None, f"check_grammar accepts the broken {grammar.kind} {grammar.text}")


def samplers_of_one_grammar_are_separate(subject: EngineUnderTest) -> None:
    engine = subject.engine
    if (ready := _ready(subject, Grammar("regex", "abc"))) is None:
        raise SkipTest("the engine follows no regular expression")
    engine.prefill(0, as_tokens(engine.tokenizer.tokenize("List: ")), logits=True)
    with closing(engine.sampler(GREEDY, ready)) as one, closing(engine.sampler(GREEDY, ready)) as other:
        expect(engine.sample(0, one) == engine.sample(0, other), "two samplers of one grammar share their place in it")


def grammars_are_checked_in_several_threads(subject: EngineUnderTest) -> None:
    grammars = [Grammar("regex", f"a{number % 7}{{1,9}}") for number in range(28)]
    with ThreadPoolExecutor(4) as pool:
        ready = list(pool.map(lambda grammar: _ready(subject, grammar), grammars))
    expect(ready in ([None] * len(ready), grammars), "check_grammar in several threads gives grammars that were not given")
