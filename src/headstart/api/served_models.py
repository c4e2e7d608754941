"""Served models: which models this server has, what clients may know of each, and which one a request means.

Every list of models (`/v1/models`, `/api/tags`, …) and every check of a request's `model` asks `ServedModels`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol

from headstart import model_names
from headstart.errors import NotFound
from headstart.hub.reference import parse
from headstart.interfaces.sampling import Sampling
from headstart.serving.runtime import Runtime

ModelState = Literal["unloaded", "loading", "loaded"]

SERVES_GIVEN = "this server serves fetched models if it gets --allow-pull"
"""Why a server with the models of its command serves no others."""

TAG = ":latest"
"""The tag that Ollama's clients add to a name without one."""

_VENDORS = re.compile(r"(claude|gpt-\d|chatgpt|codex|o\d)([-.\w]|$)")
"""Names that clients send by default. They mean the default model here. gpt-oss is not among them: it can be served locally."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What every client may know of a model. It has no paths of files: only the operator may see those.

    Attributes:
        id: its name in the API.
        aliases: other names that requests may use.
        modified: when its file was last changed, in seconds since 1970.
        expires: when it is unloaded if nobody uses it, in seconds since 1970; None for never.
        size: bytes of its weights; None if unknown.
        device_size: the part of `size` on GPUs.
        digest: 64 hexadecimal digits that name its weights; "" if unknown.
        ctx: tokens that a conversation may hold; None before it was loaded.
        template: source of its chat template; "" if unknown.
        tools, thinking: whether its template has tools, and whether its replies have reasoning.
        sampling: the defaults for requests without sampling options.
        facts: further facts, by the names that `meta` of `/v1/models` has.
    """

    id: str
    state: ModelState
    aliases: tuple[str, ...] = ()
    modified: float = 0.0
    expires: float | None = None
    size: int | None = None
    device_size: int = 0
    digest: str = ""
    ctx: int | None = None
    template: str = ""
    tools: bool = False
    thinking: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    facts: Mapping[str, Any] = field(default_factory=dict)


class ServedModels(Protocol):
    """The models of a server. Thread-safe."""

    def all(self) -> Sequence[ServedModel]:
        """All models, loaded or not. The first one is the default."""

    def named(self, name: str) -> ServedModel | None:
        """The model with this name, which may be an alias; None if there is none, or its file was removed."""

    def find(self, name: str | None) -> ServedModel:
        """The model that a request means. No name and names of vendors' models mean the default.

        Raises:
            NotFound: there is no such model; the message names those there are.
        """

    def fetched(self, names: Sequence[str], file: str, size: int) -> str:
        """A caller has fetched a model. Returns why it is not served from now on; "" if it is. Called on the event loop.

        Args:
            names: its name, then others.
            size: bytes of its files.
        """


class OneModel:
    """`ServedModels` of a server with one model.

    Args:
        id: its name in the API; None for the engine's name, which is known when it is loaded.
        aliases: other names, maybe with the path of its file.
        runtime: returns the runtime; None while the model is not loaded.
    """

    def __init__(self, id: str | None, aliases: Sequence[str], runtime: Callable[[], Runtime | None]) -> None:
        self._id = id
        self._aliases = tuple(aliases)
        self._runtime = runtime
        self._described: tuple[Runtime, ServedModel] | None = None
        self._begun = time.time()

    @property
    def _model(self) -> ServedModel:
        runtime = self._runtime()
        if runtime is None:
            return ServedModel(self._id or "", "loading", modified=self._begun)
        if self._described is None or self._described[0] is not runtime:
            self._described = runtime, loaded_model(runtime, self._id, self._aliases, self._begun)
        return self._described[1]

    def all(self) -> Sequence[ServedModel]:
        return (self._model,)

    def named(self, name: str) -> ServedModel | None:
        model = self._model
        # Not `model.aliases`: a path is a name too, for those who know it.
        return model if any(same(name, known) for known in (model.id, *self._aliases)) else None

    def find(self, name: str | None) -> ServedModel:
        if not name or meant_for_vendor(name):
            return self._model
        if (found := self.named(name)) is None:
            served = self._model.id
            raise NotFound(f"The model '{name[:200]}' is not served here; the served one is '{served}'.", param="model")
        return found

    def fetched(self, names: Sequence[str], file: str, size: int) -> str:
        return SERVES_GIVEN


def same(one: str, other: str) -> bool:
    """Whether two names mean the same model. Case is ignored, and what `plain` leaves out."""
    return model_names.same(plain(one), plain(other))


def plain(name: str) -> str:
    """A name without Ollama's tag `:latest`, without the hub that may stand before it, and without the suffix of a file."""
    name = untagged(name)
    reference = parse(name)
    return name if reference is None else str(reference).removesuffix(".gguf")


def meant_for_vendor(name: str) -> bool:
    """Whether clients of other vendors send this name by default."""
    return _VENDORS.match(name.casefold()) is not None


def untagged(name: str) -> str:
    """A name without Ollama's tag `:latest`."""
    return name[: -len(TAG)] if name.casefold().endswith(TAG) else name


def loaded_model(runtime: Runtime, id: str | None, aliases: Sequence[str], begun: float) -> ServedModel:
    """What clients may know of a loaded model.

    Args:
        id: its name in the API; None for the engine's name.
        aliases: its other names. A path among them is left out.
        begun: stands for the time of its file, in seconds since 1970, if it has none.
    """
    engine, path = runtime.engine, runtime.settings.model
    details = {name: value for name, value in engine.facts.details.items() if name != "path"}
    if details.get("lora"):
        details["lora"] = PurePath(details["lora"]).name
    file = engine.facts.details.get("path")
    modified = begun
    with suppress(OSError):
        modified = Path(file).stat().st_mtime if file else begun
    weights = engine.identity.get("weights", "")
    family = runtime.prompter.family
    return ServedModel(
        id=id or engine.facts.name,
        state="loaded",
        aliases=tuple(name for name in aliases if name != path or PurePath(path).name == path),
        modified=modified,
        size=details.get("weights_bytes"),
        device_size=_on_devices(details),
        digest=weights if len(weights) == 64 else engine.fingerprint.hex()[:64],
        ctx=runtime.ctx,
        template=runtime.prompter.template.source,
        tools=family.calls is not None,
        thinking=family.reasoning is not None or (family.calls is not None and family.calls.syntax == "channels"),
        sampling=runtime.sampling,
        facts={
            "n_ctx": runtime.ctx,
            "n_vocab": engine.tokenizer.n_vocab,
            "chat_template": runtime.chat_template.as_json,
            **details,
        },
    )


def _on_devices(details: Mapping[str, Any]) -> int:
    """Bytes of weights on GPUs, if all layers have the same size."""
    chosen, layers, size = (details.get(name) or 0 for name in ("gpu_layers", "layers", "weights_bytes"))
    if not details.get("gpus"):
        return 0
    return size if chosen < 0 or chosen >= layers else size * chosen // layers
