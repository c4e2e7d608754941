"""Settings: what a user chooses. One frozen value from the command line, the environment or `headstart.open`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Literal, get_args

from platformdirs import user_cache_path, user_state_path

from headstart import templates
from headstart.errors import ConfigError
from headstart.names import option, suggesting
from headstart.units import parse_portion, parse_size, parse_time

GIB = 1 << 30

KvType = Literal["f16", "bf16", "q8_0"]
Reuse = Literal["fast", "exact"]
Overflow = Literal["error", "slide"]
Switch = Literal["on", "off"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to load a model and serve it. Paths may be given as texts, and sizes, shares and times like `8GiB`, `25%` or `7d`.

    Attributes:
        model: path of a `.gguf`, or `demo` for the bundled SmolLM2-135M-Instruct.
        ctx: tokens a conversation may hold; None for the model's own context, less if memory is short.
        slots: conversations computed at the same time; None for what fits in memory (at most 4).
        threads: CPU threads; None for the number of physical cores.
        gpu_layers: layers to put on a GPU; -1 for all.
        kv_type: type of keys and values in memory.
        chat_template: what replaces the model's own template: the name of a built-in one, or the path of a Jinja file.
        lora: adapter file.
        memory_budget: bytes of host memory for rows that no slot holds (hard); None for 4 GiB, or more if one conversation
            needs more to come back whole, or less if memory is short.
        cache_dir: folder of the disk tier; None for none.
        state_dir: folder where is remembered what was proved of engines, and what model files contain. No text of a
            conversation is there, and it is no part of the disk tier. None for this platform's folder for such state.
        disk_budget: bytes on disk (hard), and never more than half of what is free there.
        tenant_memory: the most that one tenant may hold of the memory tier when others want room: up to 1 a share of its
            budget, of which all is no limit; above that bytes.
        tenant_disk: the same of the disk tier.
        drain: seconds that closing may take to bring to disk what is not there yet, or that stopping a server may take in all.
        expire: seconds after which nothing is kept any more of what was written then, on disk or in memory, written like `7d`
            or `12h`; None for no such time.
        reuse: `fast` uses every row; `exact` only rows that make warm answers bit-identical to cold ones.
        settle: `on` makes finished turns canonical while the engine has nothing else to do.
        explain: `on` remembers the latest requests, in memory, to say why later ones computed what they did.
        overflow: what to do with a conversation longer than the context.
        queue: requests that may wait; beyond it they are refused with 429.
        stall: seconds for which a running reply may pause while another prompt is prefilled.
        temperature, top_k, top_p, min_p: of requests that name none; None for llama-server's (`Sampling`).

    Raises:
        ConfigError: a value that cannot work.
    """

    model: str = "demo"
    ctx: int | None = None
    slots: int | None = None
    threads: int | None = None
    gpu_layers: int = 0
    kv_type: KvType = "f16"
    chat_template: str | Path | None = None
    lora: Path | None = None
    memory_budget: int | None = None
    cache_dir: Path | None = None
    state_dir: Path | None = None
    disk_budget: int = 20 * GIB
    tenant_memory: float = 1.0
    tenant_disk: float = 1.0
    drain: float = 10.0
    expire: float | None = None
    reuse: Reuse = "fast"
    settle: Switch = "on"
    explain: Switch = "on"
    overflow: Overflow = "error"
    queue: int = 64
    stall: float = 0.25
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("chat_template", "lora", "cache_dir", "state_dir"):
            value = getattr(self, name)
            if value is None or isinstance(value, Path) or (name == "chat_template" and value in templates.BUILT_IN):
                continue
            if not isinstance(value, str | os.PathLike):
                raise ConfigError(f"{option(name)} must be a path, not {value!r}.")
            object.__setattr__(self, name, Path(value))  # the only change that a frozen value sees
        for name, parse in _WRITTEN.items():
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    object.__setattr__(self, name, parse(value))
                except ValueError as error:
                    raise ConfigError(f"{option(name)}: {error}.") from error
        for name, choices in (
            ("kv_type", KvType),
            ("reuse", Reuse),
            ("settle", Switch),
            ("explain", Switch),
            ("overflow", Overflow),
        ):
            allowed = get_args(choices)
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{option(name)} must be {' or '.join(allowed)}, not {getattr(self, name)!r}.")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPEN:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise ConfigError(f"{option(name)} must be a whole number, not {value!r:.100}.")
            if value < least:
                raise ConfigError(f"{option(name)} must be at least {least}, not {value}.")
        for name, most in (("temperature", 2.0), ("top_p", 1.0), ("min_p", 1.0)):
            value = getattr(self, name)
            if value is not None and not (value == 0 or (_is_between(0, value) and value <= most)):
                raise ConfigError(f"{option(name)} must be a number from 0 to {most:g}, not {value!r:.100}.")
        for name in ("tenant_memory", "tenant_disk"):
            if not _is_between(0, getattr(self, name)):
                raise ConfigError(f"{option(name)} must be a share like 25% or a size like 2GiB, not {getattr(self, name)!r}.")
        if not (self.drain == 0 or _is_between(0, self.drain)):
            raise ConfigError(f"{option('drain')} must be a number of seconds, not {self.drain!r}.")
        if not (self.expire is None or _is_between(0, self.expire)):
            raise ConfigError(f"{option('expire')} must be a time like 7d or 12h, not {self.expire!r}.")
        if not _is_between(0, self.stall):
            raise ConfigError(f"{option('stall')} must be a number of seconds, more than 0, not {self.stall!r}.")

    def template(self) -> templates.ChatTemplate | None:
        """The template that `chat_template` names, if it is given.

        Raises:
            ConfigError: there is no such file and no such built-in template, or the file cannot be read.
        """
        given = self.chat_template
        if given is None:
            return None
        if isinstance(given, str):
            return templates.built_in(given)
        try:
            return templates.ChatTemplate(given.read_text("utf-8"), "file")
        except FileNotFoundError as error:
            raise ConfigError(
                f"Cannot read {option('chat_template')} {given}: No such file or directory, and no built-in template "
                f"has that name: {templates.near(given.name)}."
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", error)
            raise ConfigError(f"Cannot read {option('chat_template')} {given}: {why}.") from error


Settings.__init__ = suggesting(Settings.__init__)  # type: ignore[method-assign]


def default_cache_dir() -> Path:
    """Where this platform keeps caches; HEADSTART_CACHE_DIR names another place."""
    return Path(os.environ.get("HEADSTART_CACHE_DIR") or user_cache_path("headstart"))


def default_state_dir() -> Path:
    """Where this platform keeps what programs have found out; HEADSTART_STATE_DIR names another place."""
    return Path(os.environ.get("HEADSTART_STATE_DIR") or user_state_path("headstart"))


_WRITTEN = {
    "memory_budget": parse_size,
    "disk_budget": parse_size,
    "tenant_memory": parse_portion,
    "tenant_disk": parse_portion,
    "expire": parse_time,
}
_LEAST = {"ctx": 1, "slots": 1, "threads": 1, "gpu_layers": -1, "memory_budget": 0, "disk_budget": 0, "queue": 1, "top_k": 0}
_OPEN = {"ctx", "slots", "threads", "memory_budget", "top_k"}


def _is_between(least: float, value: object) -> bool:
    """Whether it is a number above `least` that is not infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least < value < float("inf")
