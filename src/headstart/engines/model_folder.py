"""Model folders in Hugging Face's form. Whoever looks for models asks here: nothing heavy is loaded, but by `check_kind`."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headstart.errors import ModelError
from headstart.paths import expanded, is_file

CONFIG = "config.json"
_ENGINE = "mlx_lm"
_KIND = re.compile(r"[\w-]+")
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_REPLIES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""How the classes of models end that write text."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file; an empty one if there is no file. Raises ModelError."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"'{path}' cannot be read ({error}): download it again.") from None
    if not isinstance(found, dict):
        raise ModelError(f"'{path}' is not a JSON object: download it again.")
    return found


def is_model_folder(model: str) -> bool:
    """Whether `model` is the path of a folder with a `config.json`."""
    return is_file(expanded(model) / CONFIG)


def weights(folder: Path) -> list[Path]:
    """The files with weights, in order. Raises ModelError if there is none."""
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise ModelError(f"'{folder}' has no model*.safetensors: download the whole repository.")
    return found


def check(model: str) -> None:
    """Raises ModelError unless the folder has weights and a config that says its kind."""
    folder = expanded(model)
    config(folder)
    weights(folder)


def check_engine(model: str) -> None:
    """Raises ModelError if the engine for such folders is not installed. `model` names the one that needs it."""
    if importlib.util.find_spec(_ENGINE) is None:
        raise ModelError(
            f"{model} is in Hugging Face's form, and MLX, which loads it, is not installed: pip install 'headstart[mlx]', or "
            "choose a model in GGUF."
        )


def check_kind(config: Mapping[str, Any], model: str) -> None:
    """Raises ModelError if mlx-lm has no code for the kind of a model. `model` names it.

    MLX is loaded only for a kind that mlx-lm has no module of its own for, to ask whether it is another name of one.
    """
    kind = str(config["model_type"])
    if _has_module(kind):
        return
    from mlx_lm.utils import MODEL_REMAPPING

    if not _has_module(MODEL_REMAPPING.get(kind, kind)):
        own = " It brings Python code of its own, which headstart does not run." if config.get("auto_map") else ""
        raise ModelError(
            f"mlx-lm {version('mlx-lm')} does not know models of the kind '{kind}' ({model}): it may be too old for them, or "
            f"they are no language models.{own} Choose another model, or its GGUF file."
        )


def _has_module(kind: str) -> bool:
    spec = importlib.util.find_spec(_ENGINE)
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    return _KIND.fullmatch(kind) is not None and any(Path(place, "models", f"{kind}.py").is_file() for place in places)


def config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`. Raises ModelError, as `read_config` does."""
    return read_config(folder / CONFIG, f"'{folder}'")


def read_config(path: Path, model: str) -> dict[str, Any]:
    """A `config.json`. `model` names its model in errors.

    Raises:
        ModelError: it is broken, is not a language model's, or names code of its own in place of mlx-lm's, which headstart does
            not run. (An `auto_map` names code for another library. mlx-lm does not read it.)
    """
    found = read_json(path)
    if "model_type" not in found or not writes_text(found):
        raise ModelError(f"{model} is no language model in Hugging Face's form, as its config.json says; choose another model.")
    if found.get("model_file"):
        raise ModelError(f"{model} brings Python code of its own, which headstart does not run; choose another model.")
    return found


def writes_text(config: Mapping[str, Any]) -> bool:
    """Whether a config may be that of a model which continues text. Embedders, and models that translate, are none."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return True
    return not config.get("is_encoder_decoder") and any(str(name).endswith(_REPLIES) for name in classes)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the language model, which may be a part of a model that also sees or hears."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else {**config}


def trained_ctx(config: Mapping[str, Any]) -> int:
    """Tokens that the model was trained on; 0 if unknown."""
    for part in (config, text_config(config)):
        for name in ("max_position_embeddings", "max_sequence_length", "seq_length", "n_positions"):
            if isinstance(part.get(name), int):
                return int(part[name])
    return 0


def quantization(config: Mapping[str, Any]) -> str:
    """The form of most weights: `4bit`, as mlx-community names it, or a type like `BF16`; "" if unknown."""
    for name in ("quantization", "quantization_config"):
        found = config.get(name)
        if isinstance(found, dict) and isinstance(found.get("bits"), int):
            return f"{found['bits']}bit"
    text = text_config(config)
    named = text.get("dtype") or text.get("torch_dtype")
    return _TYPES.get(named, "") if isinstance(named, str) else ""
