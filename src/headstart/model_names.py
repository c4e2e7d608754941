"""Names of models: what a file is called to callers, and when two names mean the same."""

from __future__ import annotations

import re
from pathlib import PurePath

SPLIT = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
"""What the name of a part of a split model has in front of its suffix."""
_SUFFIX = re.compile(r"\.gguf$", re.IGNORECASE)


def model_name(model: str) -> str:
    """What a model is called: its file's name without folder, suffix and the number of its part."""
    return _SUFFIX.sub("", SPLIT.sub("", _file(model))) or model


def model_names(model: str) -> tuple[str, ...]:
    """All that callers may call a model of this path: its name, those of its first file, and the path."""
    file = _file(model)
    return tuple(dict.fromkeys(name for name in (model_name(model), _SUFFIX.sub("", file), file, model) if name))


def _file(model: str) -> str:
    return PurePath(model).name


def same(one: str, other: str) -> bool:
    """Whether two names mean the same model: upper and lower case make no difference."""
    return one.casefold() == other.casefold()
