"""Naming: the names under which a server knows its models, and which model a name means. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from headstart.api.served_models import meant_for_vendor, plain
from headstart.errors import ConfigError, NotFound

SHOWN = 20
"""Most names in a message."""
TAG = 8
"""Hexadecimal digits of a model's tag."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that a server can load.

    Attributes:
        name: in answers and logs.
        file: path of its file.
        size: bytes of its files.
        aliases: other names that requests may use.
        fetched: whether it is served because headstart has fetched it: no command and no folder names it.
    """

    name: str
    file: str
    size: int
    aliases: tuple[str, ...] = ()
    fetched: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases

    @property
    def tag(self) -> str:
        """Digits that the ids of its responses begin with, so that an id alone says which model made it."""
        return blake3(self.name.casefold().encode()).hexdigest()[:TAG]


class ModelNames:
    """The models of a server by name. Case is ignored. A model's own name wins over another model's alias.

    Args:
        default: name of the model of requests that name none; None for the first model.

    Attributes:
        models: in the order in which they were given.
        default: the model of requests that name none.

    Raises:
        ConfigError: there is no model, two have one name or one alias, or the default is none of them.
    """

    def __init__(self, models: Sequence[NamedModel], default: str | None = None) -> None:
        if not models:
            raise ConfigError("There is no model to serve.")
        self.models = tuple(models)
        self._known: dict[str, NamedModel] = {}
        for model in models:
            if not model.name.strip():
                raise ConfigError(f"The model {model.file} needs a name: write NAME={model.file}.")
            if (other := self._known.setdefault(model.name.casefold(), model)) is not model:
                raise ConfigError(f"Two models have the name '{model.name}': {other.file} and {model.file}.")
        own = frozenset(self._known)
        for model in models:
            for alias in model.aliases:
                key = alias.casefold()
                if key not in own and (other := self._known.setdefault(key, model)) is not model:
                    raise ConfigError(f"The alias '{alias}' means both '{other.name}' and '{model.name}'.")
        self._by_tag = {model.tag: model for model in models}
        found = self.models[0] if default is None else self._known.get(default.casefold())
        if found is None:
            raise ConfigError(f"--default-model {default} is not served; {self._served()}.")
        self.default = found

    def added(self, model: NamedModel) -> ModelNames:
        """These models and one more, without those of its aliases that are taken.

        Raises:
            ConfigError: its name is taken.
        """
        if model.name.casefold() in self._known:
            raise ConfigError(f"The name '{model.name}' is taken.")
        return ModelNames(joined(self.models, [model]), self.default.name)

    def without(self, gone: Collection[NamedModel]) -> ModelNames:
        """These models but some. At least one stays, and another one is the default if that is gone."""
        rest = [model for model in self.models if model not in gone] or [self.default]
        return ModelNames(rest, self.default.name if self.default in rest else None)

    def find(self, name: str | None) -> NamedModel:
        """The model that a request names. No name and names of vendors' models mean the default.

        Raises:
            NotFound: no model has this name. The message has the names there are.
        """
        if not name:
            return self.default
        found = self.named(name)
        if found is None and meant_for_vendor(name):
            return self.default
        if found is None:
            raise NotFound(f"The model '{name[:200]}' is not served here; {self._served()}.", param="model")
        return found

    def named(self, name: str) -> NamedModel | None:
        """The model with this name or alias; None if there is none. What `plain` leaves out of a name is ignored."""
        return self._known.get(name.casefold()) or self._known.get(plain(name).casefold())

    def of_id(self, id: str) -> NamedModel | None:
        """The model that made the response, or the item of one, with this id; None if the id does not say so."""
        return self._by_tag.get(id.partition("_")[2][:TAG])

    def below(self, path: str) -> tuple[NamedModel, str] | None:
        """The model whose name a path begins with, and the rest of the path, which is "" or begins with a slash."""
        for name in sorted(self._known, key=len, reverse=True):
            rest = path[len(name) :]
            if path[: len(name)].casefold() == name and (not rest or rest.startswith("/")):
                return self._known[name], rest
        return None

    def _served(self) -> str:
        names = [f"'{model.name}'" for model in self.models]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"served are {', '.join(names[:SHOWN])}{more}"


def joined(models: Iterable[NamedModel], more: Iterable[NamedModel]) -> list[NamedModel]:
    """These models, and of others those whose names are free, without the aliases that are taken. The first one wins."""
    found = list(models)
    taken = {name.casefold() for model in found for name in model.names}
    for model in more:
        if model.name.casefold() not in taken:
            free = tuple(alias for alias in model.aliases if alias.casefold() not in taken)
            found.append(replace(model, aliases=free))
            taken |= {name.casefold() for name in found[-1].names}
    return found


def claimed(model: NamedModel) -> NamedModel:
    """A fetched model with the aliases that it may have: no name of a vendor's model.

    Clients send those by default, and callers choose what is fetched: a file `gpt-4o.gguf` would take everybody's requests.
    """
    aliases = tuple(alias for alias in model.aliases if not meant_for_vendor(alias))
    return replace(model, aliases=aliases, fetched=True)


def split_name(text: str) -> tuple[str, str]:
    """A model argument `NAME=FILE`, or a file alone, as (name, file). The name is "" if there is none."""
    name, equals, file = text.partition("=")
    if not equals or ("/" in name.removeprefix("~") and name.startswith(("/", ".", "~"))):
        return "", text
    return name, file


def aliased(models: Iterable[NamedModel], aliases: Iterable[str]) -> list[NamedModel]:
    """The models with the aliases `ALIAS=NAME`, and with the names of their files.

    Raises:
        ConfigError: an alias has another form, or names no model.
    """
    models = list(models)
    found: dict[str, list[str]] = {model.name: [] for model in models}
    for text in aliases:
        alias, equals, name = text.partition("=")
        of = next((model.name for model in models if model.name.casefold() == name.casefold()), None)
        if not equals or not alias.strip() or of is None:
            names = ", ".join(model.name for model in models[:SHOWN])
            raise ConfigError(f"With several models write --alias ALIAS=NAME, where NAME is one of {names}; not {text!r:.100}.")
        found[of].append(alias)
    every = {model.name: dict.fromkeys((*model.aliases, *found[model.name])) for model in models}
    return [replace(model, aliases=tuple(name for name in every[model.name] if name != model.name)) for model in models]
