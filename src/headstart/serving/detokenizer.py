"""Reply: sampled tokens → text, as far as it is certain. Holds back split characters and what may become a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, field

from headstart.interfaces.tokens import utf8


@dataclass(slots=True)
class Detokenizer:
    """One growing reply.

    Attributes:
        tokens: all that was sampled, an end token included.
        text: what was delivered.
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
        """Takes a token; returns the text that is certain now. After it, look at `stopped_by`."""
        self.tokens.append(token)
        return self._settle(self._held + self._decoder.decode(self.token_bytes(token)), final=False)

    def end(self, token: int | None = None) -> str:
        """The reply ends, by `token` if given (it has no text); returns what was held back."""
        if token is not None:
            self.tokens.append(token)
        if self.stopped_by is not None:
            return ""
        return self._settle(self._held + self._decoder.decode(b"", final=True), final=True)

    def _settle(self, pending: str, *, final: bool) -> str:
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
        """The leading tokens whose bytes were wholly delivered as text, up to a whole character."""
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
    """Length of the longest end of `text` that a beginning of `stop` continues."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
