"""Detokenizer: turns sampled tokens into text. It holds back incomplete characters and a possible beginning of a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, field

from headstart.interfaces.tokens import utf8


@dataclass(slots=True)
class Detokenizer:
    """One growing reply.

    Attributes:
        tokens: all sampled tokens, an end token included.
        text: the text that was delivered.
        stopped_by: the stop text that ended it.
    """

    token_bytes: Callable[[int], bytes]
    stop: tuple[str, ...] = ()
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stopped_by: str | None = None
    _held: str = ""
    _decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace"))

    def push(self, token: int) -> str:
        """Adds a token, and returns the text that is now certain. Check `stopped_by` afterwards."""
        self.tokens.append(token)
        return self._release(self._held + self._decoder.decode(self.token_bytes(token)), final=False)

    def end(self, token: int | None = None) -> str:
        """Ends the reply, and returns the text that was held back. `token`: the end token, which has no text."""
        if token is not None:
            self.tokens.append(token)
        if self.stopped_by is not None:
            return ""
        return self._release(self._held + self._decoder.decode(b"", final=True), final=True)

    def _release(self, pending: str, *, final: bool) -> str:
        found = [(at, text) for text in self.stop if (at := pending.find(text)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            ready, self._held = pending[:at], ""
        else:
            keep = 0 if final else max((_overlap(pending, text) for text in self.stop), default=0)
            ready, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += ready
        return ready

    def delivered(self) -> list[int]:
        """The leading tokens whose bytes were all delivered as text, up to the end of a character."""
        text = utf8(self.text)
        at = count = 0
        for number, token in enumerate(self.tokens):
            data = self.token_bytes(token)
            if not data or text[at : at + len(data)] != data:
                break
            at += len(data)
            if at == len(text) or text[at] & 0xC0 != 0x80:
                count = number + 1
        return self.tokens[:count]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
