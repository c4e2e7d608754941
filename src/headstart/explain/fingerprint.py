"""Opening: by what a conversation is recognised after a restart, when its text is no longer known.

Of each opening (tools, and all messages up to the user's first) only a digest is kept, beside its first block, with a digest
of the template that it was rendered by. So it can be told that a template has changed, and nothing else.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile

from blake3 import blake3

from headstart.interfaces.tokens import utf8
from headstart.prompt.builder import Prompt

LIMIT = 1 << 15
"""Openings that are known at a time: the latest."""
_FORM = struct.Struct("<16s16sI")


@dataclass(frozen=True, slots=True)
class ConversationFingerprint:
    """A conversation's beginning.

    Attributes:
        key: digest of salt, tools and messages.
        template: digest of the template and its options.
        tokens: length of the prompt that it was last seen in.
    """

    key: bytes
    template: bytes
    tokens: int

    @classmethod
    def of(cls, prompt: Prompt, template: str) -> ConversationFingerprint | None:
        """None for a raw text."""
        source = prompt.source
        if source is None:
            return None
        before = [*takewhile(lambda message: message.get("role") != "user", source.messages)]
        said = _digest("opening", prompt.salt, source.tools, source.messages[: len(before) + 1])
        return cls(said, _digest("template", template, dict(source.template_kwargs))[:16], len(prompt))

    def pack(self) -> bytes:
        """All but the key, to be kept outside of this process, with a checksum over both."""
        return _FORM.pack(self._check(), self.template, self.tokens)

    @classmethod
    def unpack(cls, key: bytes, packed: bytes) -> ConversationFingerprint:
        """What `pack` was called on. Raises ValueError if that is not what comes back."""
        if len(key) != 32 or len(packed) != _FORM.size:
            raise ValueError("not the opening that was packed")
        check, template, tokens = _FORM.unpack(packed)
        found = cls(key, template, tokens)
        if found._check() != check:
            raise ValueError("not the opening that was packed")
        return found

    def _check(self) -> bytes:
        return blake3(self.key + self.template + self.tokens.to_bytes(4, "little")).digest(16)


class ConversationFingerprints:
    """The latest openings. Used from one thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, ConversationFingerprint] = OrderedDict()

    def learn(self, fingerprint: ConversationFingerprint) -> bool:
        """Whether it is new, or was known with another template."""
        before = self._known.get(fingerprint.key)
        self._known[fingerprint.key] = fingerprint
        if len(self._known) > LIMIT:
            self._known.popitem(last=False)
        return before is None or before.template != fingerprint.template

    def clear(self) -> None:
        """Forgets everything."""
        self._known.clear()

    def otherwise(self, fingerprint: ConversationFingerprint) -> int:
        """Tokens of the prompt in which it was seen with another template; 0 if it was not."""
        known = self._known.get(fingerprint.key)
        return known.tokens if known is not None and known.template != fingerprint.template else 0


def _digest(*values: object) -> bytes:
    return blake3(b"headstart.opening.1" + utf8(json.dumps(values, sort_keys=True, default=repr))).digest()
