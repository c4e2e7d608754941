"""Names: writes options in the library's or the command line's form, and suggests a name for an unknown one.

A text for both library and command line contains `option("ctx")`. The code that shows it calls `as_argument`, which writes
`ctx=`, or `as_flag`, which writes `--ctx`. Log calls pass an `OptionText`, because only the logging set-up knows the form.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_MARKED = re.compile("\x02([a-z_]+)(?:=([^\x02\x03]*))?\x03")
_FLAGS = {"drain": "--drain-seconds"}
"""Flags whose name differs from the field of `Settings`."""
_ELSEWHERE = {
    "chat_template_kwargs": "template",
    "functions": "tools",
    "n_predict": "max_tokens",
    "reasoning_effort": "template",
    "response_format": "json_schema",
    "stop_sequences": "stop",
    "thinking": "template",
}
"""Names of HTTP APIs for options of the library, where the likeliest name by its letters is another option."""


def option(name: str, value: str = "") -> str:
    """A placeholder for a field of `Settings`, perhaps with a value, in a text for `as_argument` or `as_flag`."""
    return f"\x02{name}={value}\x03" if value else f"\x02{name}\x03"


def as_argument(text: str) -> str:
    """The text with options in the library's form: `ctx=`, `reuse="fast"`."""
    return _MARKED.sub(lambda found: f'{found[1]}="{found[2]}"' if found[2] else f"{found[1]}=", text)


def as_flag(text: str) -> str:
    """The text with options in the command line's form: `--ctx`, `--reuse fast`."""

    def as_written(found: re.Match[str]) -> str:
        flag = _FLAGS.get(found[1], "--" + found[1].replace("_", "-"))
        return f"{flag} {found[2]}" if found[2] else flag

    return _MARKED.sub(as_written, text)


def as_variable(name: str) -> str:
    """The environment variable of a field of `Settings`: `HEADSTART_CTX`."""
    return "HEADSTART_" + as_flag(option(name)).removeprefix("--").replace("-", "_").upper()


@dataclass(frozen=True, slots=True)
class OptionText:
    """A text with options, for arguments of log calls. Its `str` has the library's form; logs of the server ask for flags."""

    text: str

    def __str__(self) -> str:
        return as_argument(self.text)

    @property
    def with_flags(self) -> str:
        return as_flag(self.text)


def unknown(what: str, given: Iterable[str], known: Iterable[str]) -> str | None:
    """A sentence about unknown names, with a suggestion or all known names; None if all names are known.

    Args:
        what: what the names are, like `option`.
    """
    names = list(known)
    strange = sorted(set(given) - {*names})
    if not strange:
        return None
    sentences = []
    for name in strange:
        known_as = _ELSEWHERE.get(name)
        near = [known_as] if known_as in names else difflib.get_close_matches(name, names, 1, 0.5)
        remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
        sentences.append(f"There is no {what} {name}: {remedy}")
    return " ".join(sentences)


def suggesting(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the TypeError for an unknown keyword argument then suggests a name."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if wrong := unknown("option", kwargs, names):
            raise TypeError(wrong)
        return function(*args, **kwargs)

    return checked
