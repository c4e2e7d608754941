"""Folders with models as this and other programs leave them. The files are GGUF by their first bytes only."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from headstart.hub.folders import Folders
from headstart.hub.record import folder_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def folders(home: Path) -> Folders:
    """Those of a user whose home this is."""
    return Folders.of({"HOME": str(home), "OLLAMA_MODELS": str(home / ".ollama" / "models")}, home / "state")


def weights(path: Path, size: int = 64) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF".ljust(size, b"\0"))
    return path


def cached(hub: Path, repo: str, files: Mapping[str, int], commit: str = COMMIT, *, main: bool = True) -> Path:
    """A repository in Hugging Face's cache: blobs, and links to them. Returns the snapshot."""
    folder = hub / folder_name(repo)
    snapshot = folder / "snapshots" / commit
    for number, (name, size) in enumerate(files.items()):
        blob = weights(folder / "blobs" / f"{number:02x}{commit}{'0' * 22}", size)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return snapshot


def in_ollama(root: Path, name: str, layers: list[tuple[str, str]], size: int = 64) -> Path:
    """A manifest `HOST/OWNER/NAME/TAG`, with layers of kinds and digests. Returns the blob of the first."""
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    found = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"} for kind, digest in layers]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": found}))
    return weights(root / "blobs" / f"sha256-{layers[0][1]}", size)
