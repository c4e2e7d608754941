"""Local model: a model whose files are on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ModelSource = Literal["path", "bundled", "headstart", "Hugging Face", "LM Studio", "llama.cpp", "Ollama"]
"""Who brought a model here. `headstart`: `headstart pull` did, into Hugging Face's cache. `path`: the user named a file."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        name: a name that finds it again: `OWNER/NAME:QUANTISATION`, a name in Ollama's list, a path, or `demo`.
        paths: its files. An engine is given the first one; the others are further parts of the same model.
        source: who brought it here.
        size: bytes of all its files.
        repo: `OWNER/NAME` on a hub; "" if unknown.
        quantization: as names say it; "" if they do not.
    """

    name: str
    paths: tuple[Path, ...]
    source: ModelSource
    size: int
    repo: str = ""
    quantization: str = ""

    @property
    def path(self) -> Path:
        """The file that an engine is given."""
        return self.paths[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names that callers may use for it beside those of its file, the one that answers use first."""
        if self.source == "path":
            return ()
        short = self.name.removesuffix(":latest") if self.source == "Ollama" else self.repo
        return tuple(dict.fromkeys(name for name in (self.name, short) if name))
