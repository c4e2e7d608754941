"""Conversation fingerprints: they recognise a conversation after a restart, when its text is no longer in memory.

A fingerprint is a digest of the beginning of a conversation: the tools, and all messages up to the first user message. It is
stored beside the conversation's first block, together with a digest of the chat template. So `explain` can find that the
template has changed, and nothing else. No text is stored.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from blake3 import blake3

from headstart.interfaces.tokens import utf8
from headstart.lru import Lru
from headstart.prompt.builder import Prompt

LIMIT = 1 << 15
"""Most fingerprints in memory: the latest ones."""
_FORM = struct.Struct("<16s16sI")


@dataclass(frozen=True, slots=True)
class ConversationFingerprint:
    """The fingerprint of a conversation's beginning.

    Attributes:
        key: digest of the salt, the tools and the messages.
        template: digest of the template and its options.
        tokens: length of the latest prompt with this beginning.
    """

    key: bytes
    template: bytes
    tokens: int

    @classmethod
    def of(cls, prompt: Prompt, template: str) -> ConversationFingerprint | None:
        """The fingerprint of a prompt's conversation; None for a raw text."""
        source = prompt.source
        if source is None:
            return None
        before = [*takewhile(lambda message: message.get("role") != "user", source.messages)]
        key = _digest("opening", prompt.salt, source.tools or None, source.messages[: len(before) + 1])
        return cls(key, _digest("template", template, dict(source.template_kwargs))[:16], len(prompt))

    def pack(self) -> bytes:
        """The fingerprint without its key, as bytes for the disk, with a checksum over both."""
        return _FORM.pack(self._check(), self.template, self.tokens)

    @classmethod
    def unpack(cls, key: bytes, packed: bytes) -> ConversationFingerprint:
        """The fingerprint that `pack` was called on. Raises ValueError if key or bytes are not those."""
        if len(key) != 32 or len(packed) != _FORM.size:
            raise ValueError("not the fingerprint that was packed")
        check, template, tokens = _FORM.unpack(packed)
        found = cls(key, template, tokens)
        if found._check() != check:
            raise ValueError("not the fingerprint that was packed")
        return found

    def _check(self) -> bytes:
        return blake3(self.key + self.template + self.tokens.to_bytes(4, "little")).digest(16)


class ConversationFingerprints:
    """The latest fingerprints. Used from one thread."""

    def __init__(self) -> None:
        self._known: Lru[bytes, ConversationFingerprint] = Lru(LIMIT)

    def learn(self, fingerprint: ConversationFingerprint) -> bool:
        """Adds a fingerprint. Returns whether it is new, or was known with another template."""
        before = self._known.get(fingerprint.key)
        self._known.put(fingerprint.key, fingerprint)
        return before is None or before.template != fingerprint.template

    def clearing(self) -> Iterator[None]:
        """Drops everything."""
        return self._known.clearing()

    def otherwise(self, fingerprint: ConversationFingerprint) -> int:
        """Tokens of the latest prompt with the same beginning and another template; 0 if there is none."""
        known = self._known.get(fingerprint.key)
        return known.tokens if known is not None and known.template != fingerprint.template else 0


def _digest(*values: object) -> bytes:
    return blake3(b"headstart.opening.1" + utf8(json.dumps(values, sort_keys=True, default=repr))).digest()
