"""Memo: what one process has found out, for later ones. A JSON file in the cache folder.

Nothing depends on it: what cannot be read is found out again, what cannot be written is not remembered.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def recall(folder: Path | None, name: str) -> dict[str, Any]:
    """What is remembered under a file's name; nothing if that cannot be read. No folder remembers nothing."""
    if folder is None:
        return {}
    try:
        said = json.loads((folder / name).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def remember(folder: Path | None, name: str, known: dict[str, Any]) -> None:
    """Puts this in place of what was remembered."""
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = folder / f"{name}.{os.getpid()}"
        temporary.write_text(json.dumps(known, indent=1), "utf-8")
        temporary.chmod(0o600)  # it may name the user's files
        os.replace(temporary, folder / name)
