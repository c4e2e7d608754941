"""Model facts: what a model's files say of it, whatever their form. No weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.engines import model_folder
from headstart.engines.gguf import KV_BYTES, ModelFacts, read_facts
from headstart.errors import ModelError
from headstart.hub.local_model import LocalModel
from headstart.hub.variants import SAFETENSORS


def facts_of(model: LocalModel) -> ModelFacts:
    """The facts of a model. Those of files that are broken or of an unknown version are unknown."""
    return read_config_facts(model.path) if model.form == SAFETENSORS else read_facts(model.path)


def read_config_facts(folder: Path) -> ModelFacts:
    """The facts in the `config.json` of a folder in Hugging Face's form."""
    try:
        config = model_folder.config(folder)
    except ModelError:
        return ModelFacts()
    named = str(config["model_type"]), model_folder.trained_ctx(config), model_folder.quantization(config)
    return ModelFacts(*named, _kv(model_folder.text_config(config)))


def _kv(config: Mapping[str, Any]) -> int:
    """Bytes of a token, if each layer keeps keys and values of all tokens."""

    def number(*names: str) -> int:
        return next((config[name] for name in names if isinstance(config.get(name), int)), 0)

    heads = number("num_attention_heads", "n_head")
    width = number("head_dim") or (number("hidden_size", "n_embd") // heads if heads > 0 else 0)
    layers = number("num_hidden_layers", "n_layer", "n_layers")
    return max(0, 2 * layers * (number("num_key_value_heads") or heads) * width * KV_BYTES)
