"""Shell completion: what a shell offers for the value of an option or argument (`headstart --install-completion`).

An empty answer leaves the word to the shell, which then completes the names of files.

Bash breaks words at `:` and `=` before it asks: `owner/name:Q8` comes as three words, and an answer replaces the last one only.
So `take_line` joins such words again, and answers begin where bash replaces. zsh and fish leave words whole:
`whole_words` makes the answers for a value fit a word like `--reuse=e`.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

from headstart.config import Settings

Completer = Callable[[str], list[str]]
"""From the beginning of a word to the words that it may become."""

VARIABLE = "_HEADSTART_COMPLETE"
"""Set when a shell runs headstart for completions. Its answer is all that may be printed then."""
_WORDS, _CURRENT = "COMP_WORDS", "COMP_CWORD"
"""Bash's words of the line, one below the other, and the number of the one to complete."""
_KEPT = "_HEADSTART_KEPT"
"""The beginning of the word to complete that bash keeps. Set by `take_line`."""
_BREAKS = ":="
_TYPED = "_TYPER_COMPLETE_ARGS"
"""The line up to the cursor, from zsh and fish."""
_OPTION = re.compile(r"\s(--[a-z][a-z-]*=)\S*$")
"""A last word that has an option and its value."""


_FIRST = '[[ $zsh_eval_context[-1] == loadautofunc ]] && _headstart_completion "$@"'
"""The last line of the file that zsh loads at the first Tab."""


def complete_installation() -> None:
    """Lets the first Tab in a new zsh complete too: typer's file only defines a function, which the next Tab calls."""
    script = Path.home() / ".zfunc" / "_headstart"
    with suppress(OSError):
        text = script.read_text("utf-8")
        if _FIRST not in text:
            script.write_text(f"{text.rstrip()}\n\n{_FIRST}\n", "utf-8")


def completing() -> bool:
    """Whether a shell asks for completions."""
    return VARIABLE in os.environ


def take_line(environ: MutableMapping[str, str]) -> None:
    """Writes the line that bash hands on as the user's words. Of the last one it leaves what bash replaces.

    Changes nothing where another shell asks, or none, and where bash has broken no word.
    """
    if environ.get(VARIABLE) != "complete_bash" or not {_WORDS, _CURRENT} <= environ.keys():
        return
    parts = environ[_WORDS].split("\n")[: int(environ[_CURRENT]) + 1]
    line = joined(parts)
    if line == parts:
        return
    word, end = line.pop(), parts[-1].lstrip(_BREAKS)
    if word.startswith("-") and word != end:  # --option=value
        option, _, word = word.partition("=")
        line.append(option)
    line.append(end)
    environ.update({_WORDS: "\n".join(line), _CURRENT: str(len(line) - 1), _KEPT: word.removesuffix(end)})


@contextmanager
def whole_words(environ: Mapping[str, str]) -> Iterator[None]:
    """Makes the answers that are printed inside fit a last word like `--reuse=e`, where zsh or fish asks.

    typer answers with values (`exact`). zsh is told to keep the option and to complete what follows it. fish replaces the whole
    word.
    """
    shell, option = environ.get(VARIABLE), _OPTION.search(environ.get(_TYPED, ""))
    if option is None or shell not in ("complete_zsh", "complete_fish"):
        yield
        return
    if shell == "complete_zsh":
        print(f"compset -P {option[1]};")  # the shell joins lines
        yield
        return
    answers = io.StringIO()
    try:
        with redirect_stdout(answers):
            yield
    finally:
        for answer in answers.getvalue().splitlines():
            print(option[1] + answer)


def joined(parts: Iterable[str]) -> list[str]:
    """The words of a line, of the parts into which bash broke them."""
    line: list[str] = []
    goes_on = False
    for part in parts:
        is_break = part != "" and set(part) <= set(_BREAKS)
        if line and (is_break or goes_on):
            line[-1] += part
        else:
            line.append(part)
        goes_on = is_break
    return line


def words(known: Iterable[str]) -> Completer:
    """A completer of these words."""
    ordered = sorted(known)

    def complete(incomplete: str) -> list[str]:
        return [word for word in ordered if word.startswith(incomplete)]

    return complete


def models(incomplete: str) -> list[str]:
    """The models that are found on this machine, and for an empty word the model files and folders of the current folder.

    A name of the user's own may stand before, as in `mine=owner/name`. The shell completes paths itself.
    """
    from headstart.hub.names import local_models

    kept = os.environ.get(_KEPT, "")
    own, equals, model = (kept + incomplete).rpartition("=")
    here = [] if model else [*Path().glob("*.gguf"), *(path.parent for path in Path().glob("*/config.json"))]
    names = {Settings().model, *(found.name for found in local_models())}
    answers = [*words(names)(model), *sorted(map(str, here))]
    return [(own + equals + answer).removeprefix(kept) for answer in answers]
