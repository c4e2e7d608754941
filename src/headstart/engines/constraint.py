"""Constraint: the tokens that may come next in a reply that follows a grammar. llguidance computes them.

    Grammars.check   text → compiled, kept        any thread, before the request is queued; the request holds it
    Grammars.start   compiled → Constraint        one for each reply
    Constraint       allowed, or bits for a device → (the engine draws) → take

A grammar names control tokens, and tokens that end a reply; they are never part of free text. All other tokens stand for their
bytes, also user-defined ones.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headstart.errors import EngineError, InvalidRequest, Overloaded
from headstart.interfaces.sampling import Grammar
from headstart.interfaces.tokenizer import Tokenizer
from headstart.lru import Lru

log = logging.getLogger("headstart.constraint")

MOST_TEXT = 1 << 18
"""Most bytes of a grammar's text."""

KEPT, KEPT_TEXT = 64, 1 << 19
"""Most compiled grammars that are kept, and most bytes of their texts. A compiled grammar takes up to 400 times its text."""

IN_USE_TEXT = 4 * KEPT_TEXT
"""Most bytes of the texts of all compiled grammars, including those that are kept only because requests still use them."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""The most that one grammar may cost. By llguidance's own rates this is about 20 ms, 14 ms, 3 ms, and 100 MB."""

NAMES = {"lark": "grammar", "json_schema": "JSON schema", "regex": "regular expression"}

_JSON: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    # A space, or a new line with its indentation. Without a bound a small model may write white space for ever.
    "whitespace_pattern": r" |\n[ \t]{0,40}",
    "coerce_one_of": False,
    "lenient": False,
}
"""A JSON schema is followed as it is written, or refused, whatever its `x-guidance` says."""

_EXCERPT = re.compile(r"\s*(\d+ \||\^+$)")
"""A line of llguidance's messages that shows the text of the grammar."""
_MOST_WORDS = 300


class NotFollowed(EngineError):
    """A grammar cannot be followed any further. The message quotes its text."""

    quotes = True


class Constraint:
    """The position of one reply in its grammar."""

    def __init__(self, matcher: LLMatcher, name: str, eog: frozenset[int], n_vocab: int) -> None:
        self._matcher = matcher
        self._name = name
        self._eog = eog
        self._n_vocab = n_vocab
        self._bits = np.zeros((n_vocab + 31) // 32, np.uint32)

    def bits(self) -> npt.NDArray[np.uint32]:
        """The tokens that may come next, for an engine that draws on its device: uint32, (⌈n_vocab / 32⌉,).

        The token t is the bit t % 32 of the word t // 32, counted from the lowest. Bits beyond n_vocab mean nothing. The next
        call overwrites it. Raises what `allowed` raises.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise self._fault()
        if not self._bits.any():
            raise NotFollowed(f"nothing that this model can write goes on with {self._name}")
        return self._bits

    def allowed(self) -> npt.NDArray[np.int64]:
        """The tokens that may come next, in ascending order; at least one. At the end they are the tokens that end a reply.

        Raises EngineError: the grammar became too costly to follow, or nothing can follow.
        """
        flags = np.unpackbits(self.bits().view(np.uint8), count=self._n_vocab, bitorder="little")
        return np.flatnonzero(flags.view(np.bool_))

    def mask(self, scores: npt.NDArray[Any]) -> None:
        """Sets the scores of tokens that are not allowed to -∞, and keeps others finite. Raises what `allowed` raises."""
        allowed = self.allowed()
        kept = np.maximum(scores[allowed], np.finfo(scores.dtype).min)  # a bias may have forbidden all of them
        scores[:] = -np.inf
        scores[allowed] = kept

    def take(self, token: int) -> None:
        """Appends `token` to the reply. Raises EngineError if the grammar forbids it."""
        if not self._matcher.consume_token(token):
            raise self._fault()
        if token in self._eog and not self._matcher.is_accepting():
            raise NotFollowed(f"{self._name} wants a token that ends a reply before the reply is complete")

    def _fault(self) -> EngineError:
        return NotFollowed(f"{self._name} could not be followed: {condense(self._matcher.get_error())}")


class Compiled:
    """A compiled grammar. `size`: bytes of its text."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self.matcher = matcher
        self.size = size


class GrammarError(NamedTuple):
    """Why a grammar cannot be compiled. `size`: bytes of its text."""

    text: str
    size: int


class Grammars:
    """Compiled grammars of one tokenizer. The last used are kept. Thread-safe.

    One is compiled at a time, so that they cost one core at most. A request with a known grammar does not wait for that.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: Lru[Grammar, Compiled | GrammarError] = Lru(KEPT, KEPT_TEXT, lambda known: known.size)
        self._in_use: WeakSet[Compiled] = WeakSet()
        self._trie: LLTokenizer | None = None
        self._compiling = threading.Lock()

    def check(self, grammar: Grammar, param: str | None = None) -> Grammar:
        """Compiles a grammar, if it is not compiled yet. Returns the same grammar, ready. It can take some seconds.

        Raises:
            InvalidRequest: about `param`, in llguidance's words: the text is wrong, asks for what is not supported, or is
                too large.
            Overloaded: too many are in use.
        """
        return grammar if grammar.ready is not None else replace(grammar, ready=self._compiled(grammar, param))

    def clear(self) -> None:
        """Drops the compiled grammars. Those in use stay valid."""
        self._known.clear()

    def start(self, grammar: Grammar) -> Constraint:
        """The constraint of a new reply. It compiles nothing if `check` returned the grammar. Raises what `check` raises."""
        compiled = grammar.ready if isinstance(grammar.ready, Compiled) else self._compiled(grammar, None)
        matcher = compiled.matcher.deep_copy()
        text = grammar.text if len(grammar.text) <= 60 else grammar.text[:60] + "…"
        return Constraint(matcher, f"the {NAMES[grammar.kind]} {text!r}", self._tokenizer.eog, self._tokenizer.n_vocab)

    def _compiled(self, grammar: Grammar, param: str | None) -> Compiled:
        found = self._known.get(grammar)
        if found is None:
            size = _size(grammar)
            if size > MOST_TEXT:
                found = GrammarError(f"it has {size} bytes; {MOST_TEXT} are the most.", size)
            else:
                with self._compiling:
                    found = self._known.first(grammar, lambda: self._compile(grammar))
        if isinstance(found, GrammarError):
            raise InvalidRequest(f"This {NAMES[grammar.kind]} cannot be followed: {found.text}", param=param)
        return found

    def _compile(self, grammar: Grammar) -> Compiled | GrammarError:
        size = _size(grammar)
        if not self._tokenizer.eog:
            return GrammarError("this model has no token that ends a reply.", size)
        if self._trie is None:
            begun = time.monotonic()
            self._trie = _trie(self._tokenizer)
            log.info("made the tokenizer ready for grammars, once, in %.1f s", time.monotonic() - begun)
        if sum(one.size for one in self._in_use) + size > IN_USE_TEXT:
            raise Overloaded("Requests with too many large grammars are being answered; try again.", retry_after=1.0)
        begun = time.monotonic()
        try:
            matcher = LLMatcher(self._trie, _SOURCES[grammar.kind](grammar.text), log_level=0, limits=LIMITS)
            matcher.compute_bitmask()  # of the first token; each copy keeps the result
        except ValueError as error:
            return GrammarError(condense(str(error)), size)
        if matcher.is_error():
            return GrammarError(condense(matcher.get_error()), size)
        log.debug("compiled a %s of %d bytes in %.3f s", NAMES[grammar.kind], size, time.monotonic() - begun)
        compiled = Compiled(matcher, size)
        self._in_use.add(compiled)
        return compiled


def _size(grammar: Grammar) -> int:
    return len(grammar.text.encode("utf-8", "replace"))


def condense(words: str) -> str:
    """llguidance's message on one line, without excerpts of the grammar."""
    lines = [line.strip() for line in words.splitlines() if line.strip() and not _EXCERPT.match(line)]
    message = " ".join(lines).removesuffix(" <non-verbose/>.") or "for no known reason"
    if message.startswith("NoExtension"):
        return "nothing satisfies it."
    return (message if len(message) <= _MOST_WORDS else message[:_MOST_WORDS] + "…").rstrip(".") + "."


_SOURCES = {
    "lark": LLMatcher.grammar_from_lark,
    "json_schema": lambda text: LLMatcher.grammar_from_json_schema(text, overrides=_JSON),
    "regex": LLMatcher.grammar_from_regex,
}


class _Encoder:
    """A tokenizer in the form that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {control.id for control in tokenizer.controls} | tokenizer.eog
        self.eos_token_id = min(tokenizer.eog)
        self.special_token_ids = sorted(special)
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.n_vocab)]
        self._tokenizer = tokenizer
        self._ids = {text: token for token, text in enumerate(self.tokens) if text and token not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, data: bytes) -> list[int]:
        """Tokens of exactly these bytes. They are drawn where the grammar leaves no choice."""
        text = data.decode("utf-8", "replace")
        tokens = self._tokenizer.tokenize(text)
        if self._says(tokens, data):
            return tokens
        # The tokenizer puts a space before a text, which must not be there in the middle of one.
        tokens = self._tokenizer.tokenize("\n" + text)
        starts = (start for start in range(1, len(tokens)) if self._says(tokens[start:], data))
        start = next(starts, None)
        return self._greedy(data) if start is None else tokens[start:]

    def _says(self, tokens: list[int], data: bytes) -> bool:
        return b"".join(self.tokens[token] for token in tokens) == data

    def _greedy(self, data: bytes) -> list[int]:
        tokens, at = [], 0
        while at < len(data):
            size = next((size for size in range(self._longest, 0, -1) if data[at : at + size] in self._ids), 0)
            if not size:
                break  # no token has this byte
            tokens.append(self._ids[data[at : at + size]])
            at += len(data[at : at + size])
        return tokens


def _trie(tokenizer: Tokenizer) -> LLTokenizer:
    encoder = TokenizerWrapper(_Encoder(tokenizer))
    return LLTokenizer(encoder, n_vocab=tokenizer.n_vocab, eos_token=sorted(tokenizer.eog))
