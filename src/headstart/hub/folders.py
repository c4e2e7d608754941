"""Folders: where this program and others keep models on this machine, as their environment variables say."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from headstart.paths import default_state_dir

_MOST = 1 << 20  # bytes of another program's settings


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders of models. One need not exist.

    Attributes:
        hub: the cache of Hugging Face's programs, into which headstart downloads too.
        state: headstart's own folder for state, which has the record of what it has fetched.
        lm_studio, llama_cpp, ollama: those of the programs with these names, the first one first.
    """

    hub: Path
    state: Path
    lm_studio: tuple[Path, ...]
    llama_cpp: tuple[Path, ...]
    ollama: tuple[Path, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str] | None = None, state: Path | None = None) -> Folders:
        """The folders that an environment names; by default that of this process.

        Args:
            state: in place of the folder that HEADSTART_STATE_DIR or the platform names.
        """
        named = os.environ if environment is None else environment
        home = Path(named.get("HOME") or Path.home())
        cache = Path(named.get("XDG_CACHE_HOME") or home / ".cache")
        hugging_face = Path(named.get("HF_HOME") or cache / "huggingface")
        hub = named.get("HF_HUB_CACHE") or named.get("HUGGINGFACE_HUB_CACHE") or hugging_face / "hub"
        llama_cpp: list[str | Path] = [cache / "llama.cpp", user_cache_path("llama.cpp")]
        if named.get("LLAMA_CACHE"):
            llama_cpp = [named["LLAMA_CACHE"]]
        ollama: list[str | Path] = [home / ".ollama/models", _OLLAMA_SERVICE]
        if named.get("OLLAMA_MODELS"):
            ollama = [named["OLLAMA_MODELS"]]
        own = state or default_state_dir(named)
        return cls(_path(hub, home), own, _lm_studio(home), _paths(llama_cpp, home), _paths(ollama, home))


_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")
"""Of an Ollama that its installer set up as a service."""


def _lm_studio(home: Path) -> tuple[Path, ...]:
    """Its home may be elsewhere, and its folder of models may be one that the user chose."""
    base = home / ".lmstudio"
    if pointed := _text(home / ".lmstudio-home-pointer").strip():
        base = Path(pointed)
    found = [base / "models", home / ".cache/lm-studio/models"]
    try:
        chosen = json.loads(_text(base / "settings.json") or "{}").get("downloadsFolder")
    except (ValueError, AttributeError, RecursionError):
        chosen = None
    first = [chosen] if isinstance(chosen, str) and chosen else []
    return _paths([*first, *found], home)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _path(given: str | Path, home: Path) -> Path:
    """With `~` and variables replaced, as Hugging Face's programs do it."""
    text = os.path.expandvars(given)
    return home / text[2:] if text.startswith("~/") else Path(text)


def _paths(given: Sequence[str | Path], home: Path) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(_path(one, home) for one in given))
