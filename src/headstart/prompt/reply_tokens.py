"""Reply tokens: the tokens that a model really produced for a reply.

A model can produce other tokens for a text than the tokenizer would choose. When a later prompt sends the reply back, only the
tokens that the model produced match the KV that exists. `ReplyTokensMemo` remembers them, for replies where the two differ.

A reply is looked up by its *head* and by the text up to its end. The head is a digest of the salt and of all tokens up to the
control token before the reply (for example `<|im_start|>`). The text between that control token and the reply is its *lead*.
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
    """BLAKE3 of a text's bytes."""
    return blake3(utf8(text)).digest()


def head_digest(salt: str) -> blake3:
    """The digest of a head, before its tokens are added."""
    return blake3(b"headstart.head.2" + text_digest(salt))


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """The tokens of one part of a text.

    Attributes:
        start, end: the characters [start, end) of the text.
        tokens: the tokens of these characters.
        whole: the tokens have other bytes than the text, but the same meaning. They may then only replace the whole part, up to
            a control token, and never the beginning of another text.
    """

    start: int
    end: int
    tokens: Tokens
    whole: bool = False


_SPAN = struct.Struct("<QQ?")
_CHECK = 16


@dataclass(frozen=True, slots=True)
class ReplyTokensRecord:
    """Reply tokens with their key.

    Attributes:
        head: digest of the salt and of the tokens before.
        digest: digest of the text up to the end of the reply.
        reply: the tokens.
    """

    head: bytes
    digest: bytes
    reply: ReplyTokens

    @property
    def key(self) -> bytes:
        return self.head + self.digest

    def pack(self) -> bytes:
        """The record without its key, as bytes for the disk, with a checksum over both."""
        span = _SPAN.pack(self.reply.start, self.reply.end, self.reply.whole)
        data = span + self.reply.tokens.astype("<i4").tobytes()
        return blake3(self.key + data).digest(_CHECK) + data

    @classmethod
    def unpack(cls, key: bytes, packed: bytes) -> ReplyTokensRecord:
        """The record that `pack` was called on. Raises ValueError if key or bytes are not those."""
        check, data = packed[:_CHECK], packed[_CHECK:]
        if len(key) != 64 or len(data) < _SPAN.size or blake3(key + data).digest(_CHECK) != check:
            raise ValueError("not the reply tokens that were packed")
        start, end, whole = _SPAN.unpack_from(data)
        tokens = as_tokens(np.frombuffer(data[_SPAN.size :], "<i4"))
        return cls(key[:32], key[32:], ReplyTokens(start, end, tokens, whole))


class ReplyTokensMemo:
    """The tokens of recent replies, where they differ from the tokenizer's choice. The least recently used are dropped first.

    Texts are not stored, only their digests. Thread-safe.

    Args:
        limit: most replies.
        tokens: most tokens of all replies together.

    Attributes:
        version: number of changes so far.
    """

    def __init__(self, limit: int = 4096, tokens: int = 2_000_000) -> None:
        self._limit = limit
        self._left = tokens
        self._known: OrderedDict[tuple[bytes, bytes], ReplyTokens] = OrderedDict()
        self._ends: dict[bytes, list[int]] = {}  # by head: where its replies end, sorted; `find` hashes texts only up to these
        self._changed: deque[bytes] = deque(maxlen=256)  # heads, the latest change last
        self._lock = threading.Lock()
        self.version = 0

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, head: bytes, lead: str, reply: str, tokens: Tokens, *, whole: bool = False) -> ReplyTokensRecord:
        """Remembers that `reply`, after `lead`, consists of `tokens`. `whole`: see `ReplyTokens`."""
        found = ReplyTokens(len(lead), len(lead) + len(reply), tokens, whole)
        record = ReplyTokensRecord(head, text_digest(lead + reply), found)
        self.learn(record)
        return record

    def learn(self, record: ReplyTokensRecord) -> None:
        """Adds a record, for example one that was read from disk."""
        key, reply = (record.head, record.digest), record.reply
        with self._lock:
            self._drop(key)
            self._known[key] = reply
            self._note(record.head)
            insort(self._ends.setdefault(record.head, []), reply.end)
            self._left -= len(reply.tokens)
            while len(self._known) > self._limit or self._left < 0:
                self._drop(next(iter(self._known)))

    def forget(self, head: bytes, lead: str, reply: str) -> None:
        """Drops the tokens of one reply."""
        with self._lock:
            self._drop((head, text_digest(lead + reply)))

    def find(self, head: bytes, text: str, *, closed: bool = False) -> list[ReplyTokensRecord]:
        """The known replies in `text`, without overlaps, from the last to the first. The longest match is preferred.

        Args:
            closed: whether a control token follows the text.
        """
        found: list[ReplyTokensRecord] = []
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
                key = digest.digest()
                reply = self._known.get((head, key))
                if reply is not None and (not reply.whole or (closed and end == len(text))):
                    found.append(ReplyTokensRecord(head, key, reply))
        chosen: list[ReplyTokensRecord] = []
        limit = len(text)
        for record in reversed(found):
            if record.reply.end <= limit:
                chosen.append(record)
                limit = record.reply.start
        self.use(chosen)
        return chosen

    def use(self, records: Iterable[ReplyTokensRecord]) -> None:
        """Marks records as recently used."""
        with self._lock:
            for record in records:
                if (record.head, record.digest) in self._known:
                    self._known.move_to_end((record.head, record.digest))

    def drop(self, records: Iterable[ReplyTokensRecord]) -> None:
        """Drops these records."""
        with self._lock:
            for record in records:
                self._drop((record.head, record.digest))

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            for key in list(self._known):
                self._drop(key)

    def changed(self, version: int) -> Sequence[bytes] | None:
        """The heads whose `find` may return something else than at `version`; None if these are no longer known."""
        with self._lock:
            count = self.version - version
            return [*self._changed][len(self._changed) - count :] if count <= len(self._changed) else None

    def _note(self, head: bytes) -> None:
        self.version += 1
        self._changed.append(head)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        reply = self._known.pop(key, None)
        if reply is None:
            return
        self._note(key[0])
        self._left += len(reply.tokens)
        ends = self._ends[key[0]]
        del ends[bisect_left(ends, reply.end)]
        if not ends:
            del self._ends[key[0]]
