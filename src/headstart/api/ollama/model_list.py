"""Model list: the models of this server, as Ollama's clients read them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from headstart.api.ollama.encode import timestamp
from headstart.api.served_models import TAG, ServedModel

NEVER = "2318-01-01T00:00:00Z"
"""When a model expires that is never unloaded: Ollama's clients show a time that is far away as `Forever`."""
_FAR = datetime(2318, 1, 1, tzinfo=UTC).timestamp()
"""Later times count as never. Calendars end."""


def tagged(name: str) -> str:
    """A name with a tag: clients compare names with those of a list, and each has a tag there."""
    return name if ":" in name.rpartition("/")[2] else name + TAG


def listed(model: ServedModel) -> dict[str, Any]:
    """A model of /api/tags."""
    return {**_named(model), "modified_at": _time(model.modified)}


def running(model: ServedModel) -> dict[str, Any]:
    """A loaded model of /api/ps."""
    return {
        **_named(model),
        "expires_at": NEVER if model.expires is None or model.expires >= _FAR else _time(model.expires),
        "size_vram": model.device_size,
        "context_length": model.ctx or 0,
    }


def shown(model: ServedModel) -> dict[str, Any]:
    """The answer of /api/show. The template is in Jinja, not in Ollama's language."""
    facts, parameters = model.facts, _parameters(model)
    architecture = facts.get("architecture") or "unknown"
    info = {
        "general.architecture": architecture,
        "general.basename": model.id,
        "general.parameter_count": facts.get("parameters"),
        f"{architecture}.context_length": facts.get("ctx_train") or model.ctx,
        f"{architecture}.block_count": facts.get("layers"),
        f"{architecture}.embedding_length": facts.get("width"),
        f"{architecture}.vocab_size": facts.get("n_vocab"),
    }
    abilities = {"completion": True, "tools": model.tools, "thinking": model.thinking}
    return {
        "modelfile": "\n".join([f"FROM {model.id}", *(f"PARAMETER {line}" for line in parameters)]),
        "parameters": "\n".join(parameters),
        "template": model.template,
        "details": _details(model),
        "model_info": {name: value for name, value in info.items() if value is not None},
        "capabilities": [name for name, able in abilities.items() if able],
        "modified_at": _time(model.modified),
    }


def _named(model: ServedModel) -> dict[str, Any]:
    name = tagged(model.id)
    return {"name": name, "model": name, "size": model.size or 0, "digest": model.digest, "details": _details(model)}


def _details(model: ServedModel) -> dict[str, Any]:
    architecture = model.facts.get("architecture") or ""
    return {
        "parent_model": "",
        "format": model.facts.get("format") or "gguf",
        "family": architecture,
        "families": [architecture] if architecture else [],
        "parameter_size": _parameter_size(model.facts.get("parameters")),
        "quantization_level": model.facts.get("quantization") or "",
    }


def _parameter_size(count: int | None) -> str:
    """A number of parameters as people write it: `135M`, `7.6B`."""
    if count is None:
        return ""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}".removesuffix(".0") + letter
    return str(count)


def _parameters(model: ServedModel) -> list[str]:
    """The defaults of requests, as lines of a Modelfile."""
    sampling = model.sampling
    given = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")}
    return [f"{name} {value}" for name, value in ({"num_ctx": model.ctx} | given).items() if value is not None]


def _time(seconds: float) -> str:
    return timestamp(datetime.fromtimestamp(seconds, UTC))
