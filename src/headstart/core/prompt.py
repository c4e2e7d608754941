"""Prompt: messages → text → tokens.

Text is tokenised piece by piece between control tokens, and pieces are remembered per salt, so that a long prompt costs
its new text only; tokenising whole equals tokenising in pieces. Spellings of control tokens *inside* the caller's strings
are escaped before rendering and end as plain text: nobody forges a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from blake3 import blake3

from headstart.core.blocks import Tokens, as_tokens, common_prefix, utf8
from headstart.core.checkpoints import Landmarks
from headstart.core.landmarks import Places, landmarks
from headstart.core.memo import Memo
from headstart.core.slide import Replays, exchanges, slide
from headstart.core.spelling import Spelled, Spellings, text_digest
from headstart.core.template import Message, Template
from headstart.engines.base import Control, Tokenizer
from headstart.errors import InvalidRequest

# A noncharacter that marks an escaped control spelling. Its own occurrences in a text are doubled, and a spelling never
# begins with it, so that unescaping is unambiguous.
_MARK = "\ufdd0"
_UNMARK = re.compile(_MARK + "(" + _MARK + "?)")

_SPACE = " \t\n\v\f\r"
"""What control tokens swallow: C's `isspace`, as in llama.cpp; Python's own notion is wider."""

_NONE = as_tokens([])

_HEAD = 200
"""Characters by which a message's content is found in the rendered text."""

_SENTINELS = ("1", "2")
"""Two messages that have no token in common."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt was rendered from."""

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """A text with its tokens.

    Attributes:
        salt: the tenant's; part of every block's id.
        head: digest of salt and tokens up to the last control token: together with `lead`, what a reply hangs on.
        lead: the text after that control token: what comes right before the reply.
        lead_tokens: those of `lead`; a view of `tokens`.
        marks: for each message, where its content begins in `text`; -1 if it is not there as it was given.
        dropped: messages that `--overflow slide` left out.
        landmarks: where the conversation may part from others, or from what is sent back of it.
        source: the conversation that it is the prompt of.
    """

    text: str
    tokens: Tokens
    salt: str = ""
    head: bytes = b""
    lead: str = ""
    lead_tokens: Tokens = field(default_factory=lambda: _NONE)
    marks: tuple[int, ...] = ()
    dropped: int = 0
    landmarks: Landmarks = field(default_factory=Landmarks)
    source: Conversation | None = None

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


@dataclass
class Prompter:
    """Builds prompts for one model. Thread-safe.

    Args:
        spelling: whether replies are matched by how they were really spelled (fast mode).
        memo_bytes: most bytes of remembered pieces of text with their tokens.
    """

    tokenizer: Tokenizer
    template: Template
    spelling: bool = True
    memo_bytes: int = 64 << 20
    spellings: Spellings = field(default_factory=Spellings)

    def __post_init__(self) -> None:
        controls = sorted(self.tokenizer.controls, key=lambda control: -len(control.text))
        self._controls = {control.text: control for control in controls if control.text}
        self._split = re.compile("|".join(map(re.escape, self._controls))) if self._controls else None
        self._escaper = Escaper(controls)
        self._single = {control.text: as_tokens(control.id) for control in controls}
        self._memo = Memo(self.memo_bytes)
        self._replays = Replays()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        salt: str = "",
        generation: bool = True,
        spelled: bool = True,
        **extra: Any,
    ) -> Prompt:
        """The prompt of a conversation. `spelled`: whether earlier replies in it keep the tokens that they were made of.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
        """
        return self._chat(messages, tools, salt, extra, generation=generation, spelled=spelled)

    def _chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        salt: str,
        extra: Mapping[str, Any],
        *,
        generation: bool,
        spelled: bool,
        forget: list[bytes] | None = None,
    ) -> Prompt:
        """`forget`: replies keep their tokens for the last time, and the keys of what was known of them are added here."""
        if not messages:
            raise InvalidRequest("A conversation needs at least one message.", param="messages")
        safe = self._escaper.escape(list(messages))
        rendered = self.template.render(
            safe, tools=self._escaper.escape(tools) if tools else None, generation=generation, **self._escaper.escape(extra)
        )
        source = Conversation(tuple(messages), tools, extra)
        marks = tuple(self._marks(safe, rendered))
        return replace(self._build(rendered, salt, marks, safe, spelled=spelled, forget=forget), source=source)

    def stem(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        salt: str = "",
        **extra: Any,
    ) -> Prompt:
        """What all continuations of a conversation begin with: what its prompts with two different next messages share.

        One token more is in it, so that it ends behind a grid point even if all of it is on one. A conversation that waits
        for a reply is its own stem. Earlier replies are spelled as the tokenizer chooses, not as the model has.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
        """

        def chat(following: Sequence[Message]) -> Prompt:
            return self.chat([*messages, *following], tools=tools, salt=salt, spelled=False, **extra)

        if not messages or messages[-1].get("role") in ("user", "tool"):
            return chat(())
        calls = self._calls(messages[-1], tools)
        answer = {"role": "tool", "tool_call_id": calls[0].get("id")} if calls else {"role": "user"}
        one, other = (chat([{**answer, "content": text}]) for text in _SENTINELS)
        length = common_prefix(one.tokens, other.tokens)
        return replace(self.tokens(one.tokens[: length + 1].tolist(), salt=salt), landmarks=one.landmarks)

    def _calls(self, reply: Message, tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
        """The calls in a reply, after which a tool's result is what comes next; one without a name if they are in its text."""
        mark = self.template.call_mark if tools else None
        written = mark is not None and mark in (reply.get("content") or "")
        return reply.get("tool_calls") or ([{"id": "call_0"}] if written else [])

    def slide(
        self,
        messages: Sequence[Message],
        limit: int,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        salt: str = "",
        **extra: Any,
    ) -> Prompt:
        """The prompt of a conversation after the function `slide`. The cost of a turn does not grow with their number.

        Raises:
            InvalidRequest: no messages, or the template refuses them.
        """
        latest: tuple[tuple[Message, ...], Prompt] | None = None

        def build(part: Sequence[Message]) -> Prompt:
            nonlocal latest
            if latest is None or latest[0] != tuple(part):
                latest = (tuple(part), self.chat(part, tools=tools, salt=salt, **extra))
            return latest[1]

        root = text_digest(repr((limit, tools, salt, extra)))
        kept = slide(messages, lambda part: len(build(part)), limit, self._replays, root)
        prompt = build(kept.messages)
        first = len(exchanges(messages)[0])
        marks = (*prompt.marks[:first], *[-1] * kept.dropped, *prompt.marks[first:])
        return replace(prompt, marks=marks, dropped=kept.dropped)

    def text(self, text: str, *, salt: str = "", spelled: bool = True) -> Prompt:
        """The prompt of a raw text; control spellings in it are control tokens."""
        return self._build(text.replace(_MARK, _MARK * 2), salt, (), (), spelled=spelled)

    def tokens(self, tokens: Sequence[int], *, salt: str = "") -> Prompt:
        """The prompt of given tokens.

        Raises:
            InvalidRequest: a token that the model does not have.
        """
        if any(not 0 <= token < self.tokenizer.n_vocab for token in tokens):
            raise InvalidRequest(f"Tokens must lie in [0, {self.tokenizer.n_vocab}).", param="prompt")
        text = b"".join(map(self.tokenizer.piece, tokens)).decode("utf-8", "replace")
        return Prompt(text, as_tokens(tokens), salt)

    def remember(self, prompt: Prompt, reply: str, tokens: Sequence[int]) -> Spelled | None:
        """Learns how a reply was spelled, and returns it if the tokenizer would spell it otherwise.

        `tokens`: those whose bytes were wholly delivered in `reply`, and no more.
        """
        if not self.spelling or not prompt.head or not tokens:
            return None
        delivered = b"".join(map(self.tokenizer.piece, tokens)).decode("utf-8", "replace")
        if not delivered or not reply.startswith(delivered):
            return None
        reply_tokens = as_tokens(tokens)
        whole = as_tokens(self.tokenizer.tokenize(prompt.lead + delivered))
        if np.array_equal(np.concatenate([prompt.lead_tokens, reply_tokens]), whole):
            self.spellings.forget(prompt.head, prompt.lead, delivered)
            return None
        return self.spellings.remember(prompt.head, prompt.lead, delivered, reply_tokens)

    def forget(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        salt: str = "",
        **extra: Any,
    ) -> list[bytes]:
        """Forgets how the replies in a conversation were spelled; returns the keys of what was known."""
        forgotten: list[bytes] = []
        if self.spelling and len(self.spellings):
            self._chat(messages, tools, salt, extra, generation=False, spelled=True, forget=forgotten)
        return forgotten

    # ── text → tokens ────────────────────────────────────────────────────────────────────────────────────────────────

    def _build(
        self,
        rendered: str,
        salt: str,
        marks: tuple[int, ...],
        messages: Sequence[Message],
        *,
        spelled: bool,
        forget: list[bytes] | None = None,
    ) -> Prompt:
        parts: list[Tokens] = []
        places: list[tuple[int, int]] = []  # of each piece: where it begins in the text, and its first part
        digest = blake3(b"headstart.head.2" + text_digest(salt))
        bos = self.tokenizer.bos
        if bos is not None and not rendered.startswith(bos.text):
            parts.append(as_tokens(bos.id))
        hashed = 0
        lead, lead_at = "", len(parts)
        for at, text, control in self._pieces(rendered):
            places.append((at, len(parts)))
            for part in parts[hashed:]:
                digest.update(part.tobytes())
            hashed = len(parts)
            lead, lead_at = text, len(parts)
            if text:
                whole = not spelled
                parts += (
                    [self._memo.get(salt, text, self.tokenizer.tokenize)] if whole else self._spell(text, salt, digest, forget)
                )
            if control is not None:
                parts.append(self._single[control.text])
                lead, lead_at = "", len(parts)
        if lead_at == len(parts):
            for part in parts[hashed:]:
                digest.update(part.tobytes())
        tokens = np.concatenate([_NONE, *parts])
        tokens.flags.writeable = False

        def spell(text: str) -> Tokens:
            return self._memo.get(salt, Escaper.unescape(text), self.tokenizer.tokenize)

        return Prompt(
            text=Escaper.unescape(rendered),
            tokens=tokens,
            salt=salt,
            head=digest.digest(),
            lead=lead,
            lead_tokens=tokens[len(tokens) - sum(map(len, parts[lead_at:])) :],
            marks=marks,
            landmarks=landmarks(messages, marks, Places(rendered, places, parts, spell)) if messages else Landmarks(),
        )

    def _spell(self, text: str, salt: str, head: Any, forget: list[bytes] | None) -> list[Tokens]:
        known = self.spellings.find(head.digest(), text) if self.spelling and len(self.spellings) else []
        if forget is not None and known:
            forget += self.spellings.forget_in(head.digest(), text)
        parts: list[Tokens] = []
        end = len(text)
        for spelling in known:
            rest = text[spelling.end : end]
            behind = self._memo.get(salt, rest, self.tokenizer.tokenize) if rest else _NONE
            # A tokenizer may add a space before a text of its own: then the bytes are not those asked for.
            if b"".join(map(self.tokenizer.piece, behind.tolist())) != utf8(rest):
                return [self._memo.get(salt, text, self.tokenizer.tokenize)]
            parts += (behind, spelling.tokens)
            end = spelling.start
        if end:
            parts.append(self._memo.get(salt, text[:end], self.tokenizer.tokenize))
        return parts[::-1]

    def _pieces(self, rendered: str) -> Iterator[tuple[int, str, Control | None]]:
        """Plain pieces, unescaped, each with where it begins and the control token that follows it."""
        position = 0
        strip_left = False
        if self._split is not None:
            for found in self._split.finditer(rendered):
                control = self._controls[found[0]]
                plain = Escaper.unescape(rendered[position : found.start()])
                if strip_left:
                    plain = plain.lstrip(_SPACE)
                yield position, (plain.rstrip(_SPACE) if control.lstrip else plain), control
                position, strip_left = found.end(), control.rstrip
        rest = Escaper.unescape(rendered[position:])
        if strip_left:
            rest = rest.lstrip(_SPACE)
        if rest:
            yield position, rest, None

    @staticmethod
    def _marks(messages: Sequence[Message], rendered: str) -> Iterator[int]:
        # Offsets are in the rendered text; escapes before them are rare and shift them by a character each.
        cursor = 0
        for message in messages:
            content = message.get("content")
            said = content.strip() if isinstance(content, str) else ""
            at = rendered.find(said[:_HEAD], cursor) if said else -1
            if at >= 0 and isinstance(content, str):
                cursor = at + len(said[:_HEAD])
                at = max(0, at - content.index(said))  # blanks before it count, whether the template keeps them or not
            yield at
