"""Names: of options, as each surface spells them, and what was meant by a name that does not exist.

A text that is shown to library users and to users of the command line says `option("ctx")`. Whoever shows it spells that:
`as_argument` gives `ctx=`, `as_flag` gives `--ctx`. A log is shown by whoever set logging up: what it says of options is a
`OptionText`.
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
"""Where the command line has another name than `Settings`."""


def option(name: str, value: str = "") -> str:
    """A field of `Settings`, and perhaps a text as its value, inside a text that is still to be spelled."""
    return f"\x02{name}={value}\x03" if value else f"\x02{name}\x03"


def as_argument(text: str) -> str:
    """The text with options as the library has them: `ctx=`, `reuse="fast"`."""
    return _MARKED.sub(lambda found: f'{found[1]}="{found[2]}"' if found[2] else f"{found[1]}=", text)


def as_flag(text: str) -> str:
    """The text with options as the command line has them: `--ctx`, `--reuse fast`."""

    def as_written(found: re.Match[str]) -> str:
        flag = _FLAGS.get(found[1], "--" + found[1].replace("_", "-"))
        return f"{flag} {found[2]}" if found[2] else flag

    return _MARKED.sub(as_written, text)


@dataclass(frozen=True, slots=True)
class OptionText:
    """A text with options, as an argument of a log call: spelled as the library does, unless the log asks for flags."""

    text: str

    def __str__(self) -> str:
        return as_argument(self.text)

    @property
    def with_flags(self) -> str:
        return as_flag(self.text)


def unknown(what: str, given: Iterable[str], known: Iterable[str]) -> str | None:
    """A sentence on the names that do not exist, with what was meant or what there is; None if all do.

    Args:
        what: what the names are of, as `option`.
    """
    names = list(known)
    strange = sorted(set(given) - {*names})
    if not strange:
        return None
    said = []
    for name in strange:
        near = difflib.get_close_matches(name, names, 1, 0.5)
        said.append(f"There is no {what} {name}: " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."))
    return " ".join(said)


def suggesting(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose TypeError for a name that it does not take says which one was meant."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if wrong := unknown("option", kwargs, names):
            raise TypeError(wrong)
        return function(*args, **kwargs)

    return checked
