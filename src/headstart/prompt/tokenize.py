"""Piecewise: a rendered text → its tokens, piece by piece between control tokens.

Tokenising whole equals tokenising in pieces. Pieces are remembered per salt, and so is all that a text was made into up to
where the next one may go on: a long prompt costs its new text only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headstart.interfaces.engine import Control, Tokenizer
from headstart.interfaces.tokens import Tokens, as_tokens, utf8
from headstart.prompt.escape import Escaper
from headstart.prompt.landmarks import Places
from headstart.prompt.prefix_memo import Beginning, Beginnings
from headstart.prompt.reply_tokens import Spelled, Spellings, head_digest
from headstart.prompt.special_tokens import Pieces
from headstart.prompt.text_memo import Memo

_NONE = as_tokens([])


@dataclass(frozen=True, slots=True, eq=False)
class Tokenised:
    """The tokens of a text. `head`, `lead`: as in `Prompt`; `leading`: how many tokens are before the lead."""

    tokens: Tokens
    head: bytes
    lead: str
    leading: int
    places: Places


class Piecewise:
    """Tokenises rendered texts. Thread-safe.

    Args:
        controls: the longest spelling first.
        memo_bytes: most bytes of what is remembered.
    """

    def __init__(self, tokenizer: Tokenizer, controls: Sequence[Control], spellings: Spellings, memo_bytes: int) -> None:
        self.pieces = Pieces(controls)
        self._tokenizer = tokenizer
        self._single = {control.text: as_tokens(control.id) for control in controls}
        self._spellings = spellings
        self._beginnings = Beginnings(memo_bytes // 4)
        self._memo = Memo(memo_bytes - memo_bytes // 4)

    def tokenise(
        self, rendered: str, salt: str, *, spelled: bool, stable: int = 0, forget: list[bytes] | None = None
    ) -> Tokenised:
        """The tokens of a text.

        Args:
            spelled: whether replies in it are spelled as the model has.
            stable: characters that the next text is likely to begin with.
            forget: replies keep their tokens for the last time, and the keys of what was known of them are added here.
        """
        version = self._spellings.version
        looks = spelled and len(self._spellings) > 0
        known = None if forget is not None else self._known(rendered, salt, looks=looks)
        work = _Work(known or self._nothing(rendered), salt)
        before, lead, leading = work.begun.control, "", work.size
        cut = work.mark(len(work.begun.text), before)
        for at, text, control in self.pieces.of(rendered, len(work.begun.text), before):
            if at <= stable:
                cut = work.mark(at, before)
            lead, leading, before = text, work.size, control
            work.begin(at)
            if text and looks:
                self._spell(work, text, salt, forget, closed=control is not None)
            elif text:
                work.add(self._plain(text, salt))
            if control is not None:
                work.add(self._single[control.text])
                lead, leading = "", work.size
        tokens = np.concatenate(work.parts)
        tokens.flags.writeable = False
        if forget is None and cut.at > len(work.begun.text) and self.pieces.parts_at(rendered, cut.at):
            self._beginnings.add((salt, looks), work.until(cut, rendered, tokens, version), instead=known)
        places = Places(rendered, work.starts, work.offsets, tokens, lambda text: self._plain(Escaper.unescape(text), salt))
        return Tokenised(tokens, work.last_head(tokens[:leading]), lead, leading, places)

    def clear(self) -> None:
        """Forgets what texts were made into."""
        self._beginnings.clear()
        self._memo.clear()

    def _known(self, rendered: str, salt: str, *, looks: bool) -> Beginning | None:
        found = self._beginnings.find((salt, looks), rendered)
        if found is None or not looks:
            return found
        changed = self._spellings.changed(found.version)
        if changed is None or not found.heads.isdisjoint(changed):
            self._beginnings.drop(found)
            return None
        self._spellings.use(found.spelled)
        return found

    def _spell(self, work: _Work, text: str, salt: str, forget: list[bytes] | None, *, closed: bool) -> None:
        """Adds a piece as the replies in it were spelled."""
        known = self._spellings.find(work.head(), text, closed=closed)
        if forget is not None:
            forget += [one.key for one in known]
            self._spellings.drop(known)
        parts: list[Tokens] = []
        end = len(text)
        for one in known:
            rest = text[one.spelling.end : end]
            behind = self._plain(rest, salt) if rest else _NONE
            # A tokenizer may add a space before a text of its own: then the bytes are not those asked for.
            if b"".join(map(self._tokenizer.token_bytes, behind.tolist())) != utf8(rest):
                work.add(self._plain(text, salt))
                return
            parts += (behind, one.spelling.tokens)
            end = one.spelling.start
        work.add(*([self._plain(text[:end], salt)] if end else []), *reversed(parts))
        work.spelled += known

    def _plain(self, text: str, salt: str) -> Tokens:
        return self._memo.get(salt, text, self._tokenizer.tokenize)

    def _nothing(self, rendered: str) -> Beginning:
        """What a new text begins with: the token that a model wants first, unless it is written there."""
        bos = self._tokenizer.bos
        return Beginning(tokens=_NONE if bos is None or rendered.startswith(bos.text) else as_tokens(bos.id))


class _Mark(NamedTuple):
    """A place between two pieces: characters before it, the control token right there, and how much there is of the rest."""

    at: int
    control: Control | None
    size: int
    pieces: int
    heads: int
    spelled: int


class _Work:
    """A text on its way to tokens, from where it is new."""

    def __init__(self, begun: Beginning, salt: str) -> None:
        self.begun = begun
        self.parts = [begun.tokens]
        self.size = len(begun.tokens)
        self.starts = begun.starts[:]
        self.offsets = begun.offsets[:]
        self.spelled: list[Spelled] = []
        self._heads: list[bytes] = []
        self._digest = head_digest(salt)
        self._hashed = 0, 0  # parts and tokens in the digest

    def begin(self, at: int) -> None:
        """A piece begins."""
        self.starts.append(at)
        self.offsets.append(self.size)

    def add(self, *parts: Tokens) -> None:
        self.parts += parts
        self.size += sum(map(len, parts))

    def head(self) -> bytes:
        """What the piece at hand hangs on."""
        self._digest.update(np.concatenate(self.parts[self._hashed[0] :]).tobytes())
        self._hashed = len(self.parts), self.size
        self._heads.append(self._digest.digest())
        return self._heads[-1]

    def last_head(self, before: Tokens) -> bytes:
        """What comes behind all these tokens hangs on."""
        return self._digest.update(before[self._hashed[1] :].tobytes()).digest()

    def mark(self, at: int, control: Control | None) -> _Mark:
        return _Mark(at, control, self.size, len(self.starts), len(self._heads), len(self.spelled))

    def until(self, mark: _Mark, rendered: str, tokens: Tokens, version: int) -> Beginning:
        """What comes before a mark."""
        return Beginning(
            rendered[: mark.at],
            mark.control,
            as_tokens(tokens[: mark.size]),  # a view would keep all of them
            self.starts[: mark.pieces],
            self.offsets[: mark.pieces],
            self.begun.heads.union(self._heads[: mark.heads]),
            (*self.begun.spelled, *self.spelled[: mark.spelled]),
            version,
        )
