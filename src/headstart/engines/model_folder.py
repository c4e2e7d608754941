"""Model folders in Hugging Face's form. Loads nothing heavy: whoever looks for models asks here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.errors import ModelError

CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; an empty one if there is no file. Raises ModelError."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' cannot be read ({error}): download it again.") from None
    if not isinstance(found, dict):
        raise ModelError(f"'{path}' is not a JSON object: download it again.")
    return found


def is_model_folder(model: str) -> bool:
    """Whether `model` is the path of a folder with a `config.json`."""
    return (Path(model).expanduser() / CONFIG).is_file()


def weights(folder: Path) -> list[Path]:
    """The files with weights, in order. Raises ModelError if there is none."""
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise ModelError(f"'{folder}' has no model*.safetensors: download the whole repository.")
    return found


def check(model: str) -> None:
    """Raises ModelError unless the folder has weights and a config that says its kind."""
    folder = Path(model).expanduser()
    config(folder)
    weights(folder)


def config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`.

    Raises:
        ModelError: it is broken, or asks for code of its own, which headstart does not run.
    """
    found = read_json(folder / CONFIG)
    if "model_type" not in found:
        raise ModelError(f"'{folder / CONFIG}' does not say its model_type: it is no language model in Hugging Face's form.")
    if found.get("model_file") or found.get("auto_map"):
        raise ModelError(f"'{folder}' brings Python code of its own, which headstart does not run; choose another model.")
    return found


def trained_ctx(config: dict[str, Any]) -> int:
    """Tokens that the model was trained on; 0 if unknown."""
    for part in (config, config.get("text_config") or {}):
        for name in ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions"):
            if isinstance(part.get(name), int):
                return int(part[name])
    return 0
