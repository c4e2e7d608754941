"""Redaction: API keys never reach a log, whatever a line was made of.

No line of headstart holds a key on purpose. This is the second line of defence: every text of every line goes through it.
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
"""What stands in a log in place of a key."""

LONG = 8
"""A key of so many characters is hidden wherever it occurs. A shorter one only as a whole word: it may be part of others."""

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
"""Every spelling of every key, and what finds a short one."""


def hide(keys: Iterable[str]) -> None:
    """From now on these keys are hidden in all logs of this process. Thread-safe."""
    global _known
    found: dict[str, re.Pattern[str] | None] = {}
    for key in filter(None, keys):
        encoded = key.encode("utf-8", "surrogateescape")
        forms = {key, ascii(key)[1:-1], repr(encoded)[2:-1], quote(encoded, safe=""), encoded.decode("latin-1")}
        for one in forms:
            found[one] = None if len(one) >= LONG else re.compile(rf"(?<!\w){re.escape(one)}(?!\w)")
    with _lock:  # readers see the old table or the new one
        # The longest first: a key may begin as another one does.
        _known = dict(sorted((_known | found).items(), key=lambda one: -len(one[0])))


def redact(text: str) -> str:
    """`text` without the keys that were told to `hide`, and without what headers and their printed forms call a key."""
    for key, word in _known.items():
        if key in text:
            text = text.replace(key, HIDDEN) if word is None else word.sub(HIDDEN, text)
    return _HEADERS.sub(_without, text)


def redacted(value: Any) -> Any:
    """The same for a value of a log line: its texts, and those inside of lists and mappings."""
    if isinstance(value, str):
        return redact(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {redacted(name): redacted(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [redacted(one) for one in value]
    return redact(for_log(value) if isinstance(value, BaseException) else str(value))


def processor(_: Any, __: str, event: EventDict) -> EventDict:
    """Of structlog: redacts what a line says; its level, logger and time are our own."""
    kept = ("level", "logger", "timestamp")
    return {name: value if name in kept else redacted(value) for name, value in event.items()}


def _without(found: re.Match[str]) -> str:
    whole, key = found[0], found["one"] or found["two"] or found["three"] or found["four"]
    return whole[: len(whole) - len(key)] + HIDDEN
