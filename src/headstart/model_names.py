"""Model names: the names of a model file in the API, and when two names are equal."""

from __future__ import annotations

import re
from pathlib import PurePath

SPLIT = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
"""The number in the name of a part of a split model, before the suffix."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SUFFIX = re.compile(r"\.gguf$", re.IGNORECASE)


def model_name(model: str) -> str:
    """The name of a model: that of its file without folder, suffix and part number, or that of its folder, or that of its
    repository if the folder is a snapshot in Hugging Face's cache."""
    return _SUFFIX.sub("", SPLIT.sub("", _file(model))) or model


def model_names(model: str) -> tuple[str, ...]:
    """All names that callers may use for the model at a path: its name, those of its first file, and the path."""
    file = _file(model)
    return tuple(dict.fromkeys(name for name in (model_name(model), _SUFFIX.sub("", file), file, model) if name))


def _file(model: str) -> str:
    path = PurePath(model)
    if _COMMIT.fullmatch(path.name) and path.parent.name == "snapshots":
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def same(one: str, other: str) -> bool:
    """Whether two names mean the same model. Case is ignored."""
    return one.casefold() == other.casefold()
