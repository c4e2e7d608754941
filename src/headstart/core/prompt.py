"""Prompt: messages → text → tokens.

Text is tokenised piece by piece between control tokens, and pieces are remembered per salt, so that a long prompt costs
its new text only; tokenising whole equals tokenising in pieces. Spellings of control tokens *inside* the caller's strings
are escaped before rendering and end as plain text: nobody forges a turn.

*Spelling*: a model does not always spell a text with the tokens that the tokenizer would choose. `Spellings` remembers how
a reply was really spelled, so that a prompt which sends that reply back continues on the rows that exist.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from blake3 import blake3

from headstart.core.blocks import Tokens, as_tokens
from headstart.core.template import Message, Template
from headstart.engines.base import Control, Tokenizer
from headstart.errors import InvalidRequest

# A noncharacter that marks an escaped control spelling. Its own occurrences in a text are doubled, and a spelling never
# begins with it, so that unescaping is unambiguous.
_MARK = "\ufdd0"
_UNMARK = re.compile(_MARK + "(" + _MARK + "?)")


@dataclass(frozen=True)
class Prompt:
    """A text with its tokens.

    Attributes:
        salt: the tenant's; part of every block's id.
        head: digest of salt and tokens up to the last control token: together with `lead`, what a reply hangs on.
        lead: the text after that control token, and its tokens: what comes right before the reply.
        marks: for each message, where its content begins in `text`; -1 if the template changed it beyond recognition.
        dropped: messages that `--overflow slide` left out.
    """

    text: str
    tokens: Tokens
    salt: str = ""
    head: bytes = b""
    lead: str = ""
    lead_tokens: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def locate(self, offset: int) -> tuple[int | None, int]:
        """The message that `offset` lies in, and the offset within its content; (None, offset) before the first."""
        for number in range(len(self.marks) - 1, -1, -1):
            if 0 <= self.marks[number] <= offset:
                return number, offset - self.marks[number]
        return None, offset


class Escaper:
    """Escapes control spellings in callers' strings, and undoes it in rendered text."""

    def __init__(self, controls: Iterable[Control]) -> None:
        spellings = sorted((re.escape(control.text) for control in controls if control.text), key=len, reverse=True)
        self._risky = re.compile("|".join([_MARK, *spellings]))

    def escape(self, value: Any) -> Any:
        """The same value with all its strings escaped, keys included."""
        if isinstance(value, str):
            if self._risky.search(value) is None:
                return value
            return self._risky.sub(lambda m: _MARK * 2 if m[0] == _MARK else m[0][0] + _MARK + m[0][1:], value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        return value

    @staticmethod
    def unescape(text: str) -> str:
        return _UNMARK.sub(r"\1", text) if _MARK in text else text


class _Memo:
    """Tokens of pieces of text, per salt; the least recently used go first. Thread-safe."""

    def __init__(self, characters: int) -> None:
        self._budget = characters
        self._used = 0
        self._known: OrderedDict[tuple[str, str], list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, salt: str, text: str, compute: Callable[[str], list[int]]) -> list[int]:
        key = (salt, text)
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
        tokens = compute(text)
        with self._lock:
            if key not in self._known:
                self._known[key] = tokens
                self._used += len(text)
                while self._used > self._budget and self._known:
                    (_, old), _ = self._known.popitem(last=False)
                    self._used -= len(old)
        return tokens


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a reply was spelled: `lead` + `reply` is the text, `tokens` those of both together."""

    lead: str
    reply: str
    tokens: tuple[int, ...]


class Spellings:
    """Replies whose tokens differ from the tokenizer's choice, by what they hang on. Thread-safe."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._known: OrderedDict[bytes, dict[tuple[str, str], Spelling]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, head: bytes, spelling: Spelling) -> None:
        with self._lock:
            self._known.setdefault(head, {})[spelling.lead, spelling.reply] = spelling
            self._known.move_to_end(head)
            while len(self._known) > self._limit:
                self._known.popitem(last=False)

    def forget(self, head: bytes, lead: str, reply: str) -> None:
        with self._lock:
            found = self._known.get(head)
            if found is not None and found.pop((lead, reply), None) is not None and not found:
                del self._known[head]

    def find(self, head: bytes, text: str) -> Spelling | None:
        """The longest remembered spelling that `text` begins with."""
        with self._lock:
            found = list(self._known.get(head, {}).values())
        fitting = [spelling for spelling in found if text.startswith(spelling.lead + spelling.reply)]
        return max(fitting, key=lambda spelling: len(spelling.lead) + len(spelling.reply), default=None)


@dataclass(frozen=True, slots=True)
class Slide:
    """What `--overflow slide` kept of a conversation."""

    messages: tuple[Message, ...]
    dropped: int


def exchanges(messages: Sequence[Message]) -> list[list[Message]]:
    """Groups messages into user-led exchanges; what precedes the first user message is the first group."""
    groups: list[list[Message]] = [[]]
    previous = None
    for message in messages:
        role = message.get("role")
        if role == "user" and previous != "user":
            groups.append([])
        groups[-1].append(message)
        previous = role
    return groups


def slide(messages: Sequence[Message], count: Callable[[Sequence[Message]], int], limit: int) -> Slide:
    """Replays the history from its first turn and, whenever a request of it exceeded `limit` tokens, drops its oldest whole
    exchanges (tool calls with their results) until it is at most `limit / 2`. The last exchange always stays.

    A pure function of the messages, and what it drops now it also drops when the conversation has gone on (each request
    is seen as it was made, without the reply that it had yet to get): so the next turn hits again.
    """
    head, *turns = exchanges(messages)
    kept: list[list[Message]] = []
    dropped = 0

    def total() -> int:
        return count([*head, *(m for group in kept for m in group)])

    def shrink() -> None:
        nonlocal dropped
        if total() > limit:
            while len(kept) > 1 and total() > limit // 2:
                dropped += len(kept.pop(0))

    for turn in turns:
        kept.append([])
        for message in turn:
            if message.get("role") == "assistant":
                shrink()
            kept[-1].append(message)
    shrink()
    return Slide((*head, *(m for group in kept for m in group)), dropped)


@dataclass
class Prompter:
    """Builds prompts for one model. Thread-safe.

    Args:
        spelling: whether replies are matched by how they were really spelled (fast mode).
    """

    tokenizer: Tokenizer
    template: Template
    spelling: bool = True
    memo_characters: int = 64_000_000
    spellings: Spellings = field(default_factory=Spellings)

    def __post_init__(self) -> None:
        controls = sorted(self.tokenizer.controls, key=lambda control: -len(control.text))
        self._controls = {control.text: control for control in controls if control.text}
        self._split = re.compile("|".join(map(re.escape, self._controls))) if self._controls else None
        self._escaper = Escaper(controls)
        self._memo = _Memo(self.memo_characters)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        salt: str = "",
        generation: bool = True,
        **extra: Any,
    ) -> Prompt:
        """The prompt of a conversation.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
        """
        if not messages:
            raise InvalidRequest("A conversation needs at least one message.", param="messages")
        safe = self._escaper.escape(list(messages))
        rendered = self.template.render(
            safe, tools=self._escaper.escape(tools) if tools else None, generation=generation, **extra
        )
        return self._build(rendered, salt, tuple(self._marks(safe, rendered)))

    def text(self, text: str, *, salt: str = "") -> Prompt:
        """The prompt of a raw text; control spellings in it are control tokens."""
        return self._build(text.replace(_MARK, _MARK * 2), salt, ())

    def tokens(self, tokens: Sequence[int], *, salt: str = "") -> Prompt:
        """The prompt of given tokens.

        Raises:
            InvalidRequest: a token that the model does not have.
        """
        if any(not 0 <= token < self.tokenizer.n_vocab for token in tokens):
            raise InvalidRequest(f"Tokens must lie in [0, {self.tokenizer.n_vocab}).", param="prompt")
        text = b"".join(map(self.tokenizer.piece, tokens)).decode("utf-8", "replace")
        return Prompt(text, as_tokens(tokens), salt)

    def remember(self, prompt: Prompt, reply: str, tokens: Sequence[int]) -> None:
        """Learns how a reply was spelled. `tokens`: those whose bytes were wholly delivered in `reply`, and no more."""
        if not self.spelling or not prompt.head or not tokens:
            return
        delivered = b"".join(map(self.tokenizer.piece, tokens)).decode("utf-8", "replace")
        if not reply.startswith(delivered):
            return
        spelled = (*prompt.lead_tokens, *tokens)
        whole = self.tokenizer.tokenize(prompt.lead + delivered)
        if list(spelled) == whole:
            self.spellings.forget(prompt.head, prompt.lead, delivered)
        else:
            self.spellings.remember(prompt.head, Spelling(prompt.lead, delivered, spelled))

    # ── text → tokens ────────────────────────────────────────────────────────────────────────────────────────────────

    def _build(self, rendered: str, salt: str, marks: tuple[int, ...]) -> Prompt:
        tokens: list[int] = []
        digest = blake3(b"headstart.head.1" + salt.encode("utf-8", "surrogatepass") + b"\0")
        bos = self.tokenizer.bos
        if bos is not None and not rendered.startswith(bos.text):
            tokens.append(bos.id)
        hashed = 0
        lead, lead_at = "", 0
        for text, control in self._pieces(rendered):
            digest.update(np.array(tokens[hashed:], dtype="<i4").tobytes())
            hashed = len(tokens)
            lead, lead_at = text, len(tokens)
            if text:
                tokens += self._spell(text, salt, digest)
            if control is not None:
                tokens.append(control.id)
                lead, lead_at = "", len(tokens)
        if lead_at == len(tokens):
            digest.update(np.array(tokens[hashed:], dtype="<i4").tobytes())
        return Prompt(
            text=Escaper.unescape(rendered),
            tokens=as_tokens(tokens),
            salt=salt,
            head=digest.digest(),
            lead=lead,
            lead_tokens=tuple(tokens[lead_at:]),
            marks=marks,
        )

    def _spell(self, text: str, salt: str, head: Any) -> list[int]:
        if self.spelling and len(self.spellings):
            known = self.spellings.find(head.digest(), text)
            if known is not None:
                rest = text[len(known.lead) + len(known.reply) :]
                behind = self._memo.get(salt, rest, self.tokenizer.tokenize) if rest else []
                # A tokenizer may add a space before a text of its own: then the bytes are not those asked for.
                if b"".join(map(self.tokenizer.piece, behind)) == rest.encode("utf-8", "surrogatepass"):
                    return [*known.tokens, *behind]
        return self._memo.get(salt, text, self.tokenizer.tokenize)

    def _pieces(self, rendered: str) -> Iterator[tuple[str, Control | None]]:
        """Plain pieces, unescaped, each with the control token that follows it."""
        position = 0
        strip_left = False
        if self._split is not None:
            for found in self._split.finditer(rendered):
                control = self._controls[found[0]]
                plain = Escaper.unescape(rendered[position : found.start()])
                if strip_left:
                    plain = plain.lstrip()
                yield (plain.rstrip() if control.lstrip else plain), control
                position, strip_left = found.end(), control.rstrip
        rest = Escaper.unescape(rendered[position:])
        if strip_left:
            rest = rest.lstrip()
        if rest:
            yield rest, None

    @staticmethod
    def _marks(messages: Sequence[Message], rendered: str) -> Iterator[int]:
        # Offsets are in the rendered text; escapes before them are rare and shift them by a character each.
        cursor = 0
        for message in messages:
            content = message.get("content")
            at = rendered.find(content.strip()[:200], cursor) if isinstance(content, str) and content.strip() else -1
            if at >= 0 and isinstance(content, str):
                cursor = at + min(len(content.strip()), 200)
            yield at
