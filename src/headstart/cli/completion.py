"""Shell completion: what a shell offers for the value of an option or argument (`headstart --install-completion`).

An empty answer leaves the word to the shell, which then completes the names of files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from headstart.config import Settings

Completer = Callable[[str], list[str]]
"""From the beginning of a word to the words that it may become."""

VARIABLE = "_HEADSTART_COMPLETE"
"""Set when a shell runs headstart for completions. Its answer is all that may be printed then."""


def completing() -> bool:
    """Whether a shell asks for completions."""
    return VARIABLE in os.environ


def words(known: Iterable[str]) -> Completer:
    """A completer of these words."""
    ordered = sorted(known)

    def complete(incomplete: str) -> list[str]:
        return [word for word in ordered if word.startswith(incomplete)]

    return complete


def models(incomplete: str) -> list[str]:
    """The models that are found on this machine, and for an empty word the model files of the current folder.

    The shell completes paths itself.
    """
    from headstart.hub.names import local_models

    files = [] if incomplete else sorted(path.name for path in Path().glob("*.gguf"))
    names = {Settings().model, *(model.name for model in local_models())}
    return [*words(names)(incomplete), *files]
