"""Redaction: removes API keys from all log lines.

No line of headstart contains a key on purpose. This is the second line of defence: every text of every line passes it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from structlog.typing import EventDict

from headstart.errors import for_log

HIDDEN = "[key]"
"""Replaces a key in the log."""

LONG = 8
"""A key with so many characters or more is hidden everywhere. A shorter one only as a whole word: it may be part of others."""

_HEADERS = re.compile(
    r"""(?ix)
    (?: \b(?:proxy-)?authorization | \bx-api-key | \bapi[-_]?key )
    (?: ["']? \s* [:=] | ["'] \s* , ) \s* (?: b(?=["']) )? ["']? (?: [a-z]+ [ ]+ (?=[^\s"',;)\]}]) )?
    (?P<one> [^\s"',;)\]}]+ )
    | \b(?:set-)?cookie (?: ["']? \s* [:=] | ["'] \s* , ) \s* (?: b(?=["']) )? ["']? (?P<four> [^"'\r\n]+ )
    | \bbearer \s+ (?P<two> [^\s"',;)\]}]+ )
    | \b (?P<three> sk-[\w-]{8,} )
    """
)

_lock = threading.Lock()
_known: dict[str, re.Pattern[str] | None] = {}
"""All encodings of all keys, each with the pattern that finds it if it is short."""


def hide(keys: Iterable[str]) -> None:
    """Hides these keys in all later log lines of this process. Thread-safe."""
    global _known
    found: dict[str, re.Pattern[str] | None] = {}
    for key in filter(None, keys):
        encoded = key.encode("utf-8", "surrogateescape")
        encodings = {key, ascii(key)[1:-1], repr(encoded)[2:-1], quote(encoded, safe=""), encoded.decode("latin-1")}
        for text in encodings:
            found[text] = None if len(text) >= LONG else re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
    with _lock:  # readers see the old table or the new one
        # The longest first, because one key may begin with another.
        _known = dict(sorted((_known | found).items(), key=lambda item: -len(item[0])))


def redact(text: str) -> str:
    """`text` without the keys given to `hide`, and without the values of key headers, also in printed dicts and lists."""
    for key, word in _known.items():
        if key in text:
            text = text.replace(key, HIDDEN) if word is None else word.sub(HIDDEN, text)
    return _HEADERS.sub(_without, text)


def redacted(value: Any) -> Any:
    """The same for a value of a log line, including texts in lists and mappings."""
    if isinstance(value, str):
        return redact(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {redacted(name): redacted(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redacted(item) for item in value]
    return redact(for_log(value) if isinstance(value, BaseException) else str(value))


def processor(_: Any, __: str, event: EventDict) -> EventDict:
    """A structlog processor: redacts all fields but level, logger and time."""
    kept = ("level", "logger", "timestamp")
    return {name: value if name in kept else redacted(value) for name, value in event.items()}


def _without(found: re.Match[str]) -> str:
    whole, key = found[0], found["one"] or found["two"] or found["three"] or found["four"]
    return whole[: len(whole) - len(key)] + HIDDEN
