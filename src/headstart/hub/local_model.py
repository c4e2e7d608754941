"""Local model: a model whose files are on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headstart.hub.variants import SAFETENSORS, ModelForm
from headstart.model_names import model_name

ModelSource = Literal["path", "bundled", "headstart", "Hugging Face", "LM Studio", "llama.cpp", "Ollama"]
"""Who brought a model here. `headstart`: `headstart pull` did, into Hugging Face's cache. `path`: the user named a file."""

_NAMED_BY_FILE = ("headstart", "Hugging Face", "LM Studio")
"""The sources where files have the names that they have on the hub."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        name: a name that finds it again: `OWNER/NAME:QUANTISATION`, `OWNER/NAME` of a folder in Hugging Face's form, a name in
            Ollama's list, a path, or `demo`.
        paths: its files. Of a GGUF the first part is first; the files of a folder are directly in it.
        source: who brought it here.
        size: bytes of all its files.
        repo: `OWNER/NAME` on a hub; "" if unknown.
        quantization: as names say it; "" if they do not.
        form: what its files are.
        pulled: whether headstart was asked to fetch it into Hugging Face's cache, by a command or over HTTP.
    """

    name: str
    paths: tuple[Path, ...]
    source: ModelSource
    size: int
    repo: str = ""
    quantization: str = ""
    form: ModelForm = "gguf"
    pulled: bool = False

    @property
    def path(self) -> Path:
        """What an engine is given: the first file of a GGUF, or the folder of a model in Hugging Face's form."""
        return self.paths[0].parent if self.form == SAFETENSORS else self.paths[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names that callers may use for it beside those of its file, the one that answers use first."""
        if self.source == "path":
            return ()
        short = self.name.removesuffix(":latest") if self.source == "Ollama" else self.repo
        by_file = f"{self.repo}:{model_name(str(self.path))}" if self.source in _NAMED_BY_FILE and self.form == "gguf" else ""
        return tuple(dict.fromkeys(name for name in (self.name, short, by_file) if name))
