"""Reference: the name of a model on a hub, `OWNER/NAME[:VARIANT]`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REFERENCE = re.compile(
    rf"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:(?://)?)?(?P<owner>{_WORD})/(?P<name>{_WORD})/?"
    r"(?::(?P<variant>[A-Za-z0-9][A-Za-z0-9._/+-]{0,255}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A repository of a hub, and which of its variants is meant.

    Attributes:
        owner, name: the two parts of the repository's name. Neither leads out of a folder: they have no `/` and no `..`.
        variant: a quantisation like `Q8_0`, or the name of a file; "" leaves the choice open.
    """

    owner: str
    name: str
    variant: str = ""

    @property
    def repo(self) -> str:
        return f"{self.owner}/{self.name}"

    def __str__(self) -> str:
        return f"{self.repo}:{self.variant}" if self.variant else self.repo


def parse(text: str) -> ModelRef | None:
    """The reference that a text is; None if it is none. A path of a `.gguf` file is none.

    It takes `OWNER/NAME`, `OWNER/NAME:Q8_0`, and the same behind `hf.co/`, `https://huggingface.co/` or `hf:`.
    """
    found = _REFERENCE.fullmatch(text.strip())
    if found is None:
        return None
    owner, name, variant = found["owner"], found["name"], found["variant"] or ""
    if name.casefold().endswith((".gguf", ".git")) or any(odd in part for odd in ("..", "--") for part in (owner, name)):
        return None
    if any(part in ("", ".", "..") for part in variant.split("/")) and variant:
        return None
    return ModelRef(owner, name, variant)
