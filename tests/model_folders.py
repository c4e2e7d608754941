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


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "quantization": {"bits": 4, "group_size": 64},
}


def hf_files(**config: object) -> dict[str, bytes]:
    """A repository in Hugging Face's form, whose weights are in two parts. `config`: what differs from `CONFIG`."""
    parts = {f"model-0000{number}-of-00002.safetensors": bytes([number]) * 1000 * number for number in (1, 2)}
    small = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{} ", "chat_template.jinja": b"{{ messages }}"}
    return {"README.md": b"Hello.", **parts, **small, "config.json": json.dumps(CONFIG | config).encode(), "code.py": b"1 / 0"}


def hf_folder(folder: Path, **config: object) -> Path:
    """Such files in a folder. Returns the folder."""
    folder.mkdir(parents=True)
    for name, data in hf_files(**config).items():
        (folder / name).write_bytes(data)
    return folder


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
