"""Tokenise: rendered text → tokens, segment by segment between control tokens.

Tokenising the segments one by one gives the same tokens as tokenising the whole text. The tokens of segments and of whole
prefixes are remembered by salt, so a long prompt costs only its new text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headstart.interfaces.tokenizer import Control, Tokenizer
from headstart.interfaces.tokens import Tokens, as_tokens, utf8
from headstart.prompt.escape import Escaper
from headstart.prompt.landmarks import Places
from headstart.prompt.prefix_memo import PrefixMemo, TokenisedPrefix
from headstart.prompt.reply_tokens import ReplyTokensMemo, ReplyTokensRecord, head_digest, text_digest
from headstart.prompt.special_tokens import SpecialTokenSplitter
from headstart.prompt.text_memo import TextMemo

_NONE = as_tokens([])


@dataclass(frozen=True, slots=True, eq=False)
class Tokenised:
    """A tokenised text.

    Attributes:
        tokens: the tokens.
        head, lead: as in `Prompt`.
        leading: number of tokens before the lead.
        places: finds the position of a character in the tokens.
    """

    tokens: Tokens
    head: bytes
    lead: str
    leading: int
    places: Places


class PromptTokenizer:
    """Tokenises rendered texts. Thread-safe.

    Args:
        controls: the control tokens, the longest text first.
        reply_tokens: the tokens of earlier replies.
        memo_bytes: most bytes of remembered texts and tokens.

    Attributes:
        elsewhere: finds the tokens of a reply that another server has made, by salt and key of the record. It may take
            milliseconds, and is asked once for each reply of a conversation that is not known here.
    """

    def __init__(
        self, tokenizer: Tokenizer, controls: Sequence[Control], reply_tokens: ReplyTokensMemo, memo_bytes: int
    ) -> None:
        self.splitter = SpecialTokenSplitter(controls)
        self._tokenizer = tokenizer
        self._single = {control.text: as_tokens(control.id) for control in controls}
        self._reply_tokens = reply_tokens
        self.elsewhere: Callable[[str, bytes], ReplyTokensRecord | None] | None = None
        self._prefixes = PrefixMemo(memo_bytes // 4)
        self._memo = TextMemo(memo_bytes - memo_bytes // 4)

    def tokenise(
        self, rendered: str, salt: str, *, use_reply_tokens: bool, stable: int = 0, forget: list[bytes] | None = None
    ) -> Tokenised:
        """The tokens of a text.

        Args:
            use_reply_tokens: whether earlier replies in the text keep the tokens that the model produced.
            stable: characters that the next text is likely to begin with.
            forget: if a list, reply tokens are used for the last time: they are dropped, and their keys are added to the list.
        """
        version = self._reply_tokens.version
        looks = use_reply_tokens and (len(self._reply_tokens) > 0 or self.elsewhere is not None)
        known = None if forget is not None else self._known(rendered, salt, looks=looks)
        work = _Work(known or self._nothing(rendered), salt)
        before, lead, leading = work.prefix.control, "", work.size
        cut = work.cut(len(work.prefix.text), before)
        segments = [*self.splitter.split(rendered, len(work.prefix.text), before)]
        opens = segments[-1][1] if segments and segments[-1][2] is None else ""  # what stands before a reply
        for at, text, control in segments:
            if at <= stable:
                cut = work.cut(at, before)
            lead, leading, before = text, work.size, control
            work.begin(at)
            if text and looks:
                may = forget is None and control is not None and bool(opens) and text.startswith(opens)
                self._add_reply_tokens(work, text, salt, forget, closed=control is not None, elsewhere=may)
            elif text:
                work.add(self._plain(text, salt))
            if control is not None:
                work.add(self._single[control.text])
                lead, leading = "", work.size
        tokens = np.concatenate(work.parts)
        tokens.flags.writeable = False
        if forget is None and cut.at > len(work.prefix.text) and self.splitter.splits_at(rendered, cut.at):
            self._prefixes.add((salt, looks), work.until(cut, rendered, tokens, version), instead=known)
        places = Places(rendered, work.starts, work.offsets, tokens, lambda text: self._plain(Escaper.unescape(text), salt))
        return Tokenised(tokens, work.last_head(tokens[:leading]), lead, leading, places)

    def clearing(self) -> Iterator[None]:
        """Drops all remembered texts and tokens, and frees them in pieces."""
        self._prefixes.clear()
        return self._memo.clearing()

    def _known(self, rendered: str, salt: str, *, looks: bool) -> TokenisedPrefix | None:
        found = self._prefixes.find((salt, looks), rendered)
        if found is None or not looks:
            return found
        changed = self._reply_tokens.changed(found.version)
        if changed is None or not found.heads.isdisjoint(changed):
            self._prefixes.drop(found)
            return None
        self._reply_tokens.use(found.replies)
        return found

    def _add_reply_tokens(
        self, work: _Work, text: str, salt: str, forget: list[bytes] | None, *, closed: bool, elsewhere: bool
    ) -> None:
        """Adds a segment. Known replies in it get the tokens that the model produced."""
        head = work.head()
        known = self._reply_tokens.find(head, text, closed=closed)
        if not known and elsewhere and self.elsewhere is not None:
            found = self.elsewhere(salt, head + text_digest(text))
            if found is not None and found.reply.end == len(text):
                self._reply_tokens.learn(found)
                known = [found]
        if forget is not None:
            forget += [record.key for record in known]
            self._reply_tokens.drop(known)
        parts: list[Tokens] = []
        end = len(text)
        for record in known:
            rest = text[record.reply.end : end]
            behind = self._plain(rest, salt) if rest else _NONE
            # Some tokenizers add a space before a text of its own. Then the bytes are not those of the text.
            if b"".join(map(self._tokenizer.token_bytes, behind.tolist())) != utf8(rest):
                work.add(self._plain(text, salt))
                return
            parts += (behind, record.reply.tokens)
            end = record.reply.start
        work.add(*([self._plain(text[:end], salt)] if end else []), *reversed(parts))
        work.replies += known

    def _plain(self, text: str, salt: str) -> Tokens:
        return self._memo.tokens(salt, text, self._tokenizer.tokenize)

    def _nothing(self, rendered: str) -> TokenisedPrefix:
        """The empty prefix. It has the model's first token, unless the text has it already."""
        bos = self._tokenizer.bos
        return TokenisedPrefix(tokens=_NONE if bos is None or rendered.startswith(bos.text) else as_tokens(bos.id))


class _Cut(NamedTuple):
    """A position between two segments: `at` characters, after the token `control`, and the lengths of the other lists."""

    at: int
    control: Control | None
    size: int
    segments: int
    heads: int
    replies: int


class _Work:
    """A text that is being tokenised, from the end of a known prefix on."""

    def __init__(self, prefix: TokenisedPrefix, salt: str) -> None:
        self.prefix = prefix
        self.parts = [prefix.tokens]
        self.size = len(prefix.tokens)
        self.starts = prefix.starts[:]
        self.offsets = prefix.offsets[:]
        self.replies: list[ReplyTokensRecord] = []
        self._heads: list[bytes] = []
        self._digest = head_digest(salt)
        self._hashed = 0, 0  # parts and tokens in the digest

    def begin(self, at: int) -> None:
        """A segment begins at this character."""
        self.starts.append(at)
        self.offsets.append(self.size)

    def add(self, *parts: Tokens) -> None:
        self.parts += parts
        self.size += sum(map(len, parts))

    def head(self) -> bytes:
        """The head of the segment that has just begun."""
        self._digest.update(np.concatenate(self.parts[self._hashed[0] :]).tobytes())
        self._hashed = len(self.parts), self.size
        self._heads.append(self._digest.digest())
        return self._heads[-1]

    def last_head(self, before: Tokens) -> bytes:
        """The head of a segment after all these tokens."""
        return self._digest.update(before[self._hashed[1] :].tobytes()).digest()

    def cut(self, at: int, control: Control | None) -> _Cut:
        return _Cut(at, control, self.size, len(self.starts), len(self._heads), len(self.replies))

    def until(self, cut: _Cut, rendered: str, tokens: Tokens, version: int) -> TokenisedPrefix:
        """The tokenised prefix that ends at a mark."""
        return TokenisedPrefix(
            rendered[: cut.at],
            cut.control,
            as_tokens(tokens[: cut.size]),  # a view would keep all of them
            self.starts[: cut.segments],
            self.offsets[: cut.segments],
            self.prefix.heads.union(self._heads[: cut.heads]),
            (*self.prefix.replies, *self.replies[: cut.replies]),
            version,
        )
