"""Spelling: with which tokens a model really wrote a text.

A model does not always spell a text with the tokens that the tokenizer would choose. `Spellings` remembers how a reply was
really spelled, so that a prompt which sends that reply back continues on the rows that exist.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from headstart.interfaces.tokens import Tokens, as_tokens, utf8


def text_digest(text: str) -> bytes:
    """BLAKE3 of its bytes."""
    return blake3(utf8(text)).digest()


def head_digest(salt: str) -> blake3:
    """The digest of a head, before its tokens are added."""
    return blake3(b"headstart.head.2" + text_digest(salt))


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the characters [start, end) of a text were spelled.

    `whole`: the tokens have other bytes than the text, which only means the same; so they stand for it as a whole, up to a
    control token, and never for the beginning of another text.
    """

    start: int
    end: int
    tokens: Tokens
    whole: bool = False


_SPAN = struct.Struct("<QQ?")
_CHECK = 16


@dataclass(frozen=True, slots=True)
class Spelled:
    """A spelling with what it is found by: a head, and the digest of the text up to its end."""

    head: bytes
    digest: bytes
    spelling: Spelling

    @property
    def key(self) -> bytes:
        return self.head + self.digest

    def pack(self) -> bytes:
        """All but the key, to be kept outside of this process, with a checksum over both."""
        span = _SPAN.pack(self.spelling.start, self.spelling.end, self.spelling.whole)
        data = span + self.spelling.tokens.astype("<i4").tobytes()
        return blake3(self.key + data).digest(_CHECK) + data

    @classmethod
    def unpack(cls, key: bytes, packed: bytes) -> Spelled:
        """What `pack` was called on. Raises ValueError if that is not what comes back."""
        check, data = packed[:_CHECK], packed[_CHECK:]
        if len(key) != 64 or len(data) < _SPAN.size or blake3(key + data).digest(_CHECK) != check:
            raise ValueError("not the spelling that was packed")
        start, end, whole = _SPAN.unpack_from(data)
        tokens = as_tokens(np.frombuffer(data[_SPAN.size :], "<i4"))
        return cls(key[:32], key[32:], Spelling(start, end, tokens, whole))


class Spellings:
    """Replies whose tokens differ from the tokenizer's choice, by what they hang on: a head and the text before them, of
    which only a digest is kept. The least recently used go first. Thread-safe.

    Args:
        limit: most replies.
        tokens: most tokens of all together.

    Attributes:
        version: how often anything was learned or dropped.
    """

    def __init__(self, limit: int = 4096, tokens: int = 2_000_000) -> None:
        self._limit = limit
        self._room = tokens
        self._known: OrderedDict[tuple[bytes, bytes], Spelling] = OrderedDict()
        self._ends: dict[bytes, list[int]] = {}  # sorted, one for each spelling of a head: the only places to look at
        self._changed: deque[bytes] = deque(maxlen=256)  # heads, the last change last
        self._lock = threading.Lock()
        self.version = 0

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, head: bytes, lead: str, reply: str, tokens: Tokens, *, whole: bool = False) -> Spelled:
        """`reply`, behind `lead`, is made of `tokens`. `whole`: see `Spelling`."""
        spelled = Spelled(head, text_digest(lead + reply), Spelling(len(lead), len(lead) + len(reply), tokens, whole))
        self.learn(spelled)
        return spelled

    def learn(self, spelled: Spelled) -> None:
        key, spelling = (spelled.head, spelled.digest), spelled.spelling
        with self._lock:
            self._drop(key)
            self._known[key] = spelling
            self._note(spelled.head)
            insort(self._ends.setdefault(spelled.head, []), spelling.end)
            self._room -= len(spelling.tokens)
            while len(self._known) > self._limit or self._room < 0:
                self._drop(next(iter(self._known)))

    def forget(self, head: bytes, lead: str, reply: str) -> None:
        with self._lock:
            self._drop((head, text_digest(lead + reply)))

    def find(self, head: bytes, text: str, *, closed: bool = False) -> list[Spelled]:
        """The longest spelling that `text` begins with, the longest one before where that starts, and so on.

        `closed`: a control token follows the text.
        """
        found: list[Spelled] = []
        with self._lock:
            ends = self._ends.get(head)
            if ends is None:
                return []
            digest, at = blake3(), 0
            for end in ends[: bisect_right(ends, len(text))]:
                if end == at:
                    continue
                digest.update(utf8(text[at:end]))
                at = end
                said = digest.digest()
                spelling = self._known.get((head, said))
                if spelling is not None and (not spelling.whole or (closed and end == len(text))):
                    found.append(Spelled(head, said, spelling))
        chosen: list[Spelled] = []
        limit = len(text)
        for one in reversed(found):
            if one.spelling.end <= limit:
                chosen.append(one)
                limit = one.spelling.start
        self.use(chosen)
        return chosen

    def use(self, spelled: Iterable[Spelled]) -> None:
        """Keeps these longer than others that were used before."""
        with self._lock:
            for one in spelled:
                if (one.head, one.digest) in self._known:
                    self._known.move_to_end((one.head, one.digest))

    def drop(self, spelled: Iterable[Spelled]) -> None:
        """Forgets these."""
        with self._lock:
            for one in spelled:
                self._drop((one.head, one.digest))

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            for key in list(self._known):
                self._drop(key)

    def changed(self, version: int) -> Sequence[bytes] | None:
        """The heads under which `find` may find something else than at that version; None if that is not known any more."""
        with self._lock:
            count = self.version - version
            return [*self._changed][len(self._changed) - count :] if count <= len(self._changed) else None

    def _note(self, head: bytes) -> None:
        self.version += 1
        self._changed.append(head)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        spelling = self._known.pop(key, None)
        if spelling is None:
            return
        self._note(key[0])
        self._room += len(spelling.tokens)
        ends = self._ends[key[0]]
        del ends[bisect_left(ends, spelling.end)]
        if not ends:
            del self._ends[key[0]]
