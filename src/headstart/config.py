"""Settings: what a user chooses, as one frozen value.

The fields of `Settings` are the only table of settings: each has its default, its help and the kind of its values. The command
line makes its options from it (`cli/options.py`), the library its documentation, and `doctor --report` its list of variables.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

from platformdirs import user_cache_path

from headstart import templates
from headstart.engines.options import EngineOptions, KvType
from headstart.errors import ConfigError
from headstart.names import as_argument, option, suggesting
from headstart.paths import default_state_dir, expanded
from headstart.units import parse_portion, parse_size, parse_time

Reuse = Literal["fast", "exact"]
Overflow = Literal["error", "truncate"]
Switch = Literal["on", "off"]
SharedMode = Literal["readwrite", "read"]
Group = Literal["Speed and memory", "Model", "Reuse", "Shared cache", "Operation"]


@dataclass(frozen=True, slots=True)
class Kind:
    """The values that a setting takes. It also takes None if that is the default.

    Attributes:
        wanted: description of the values, for errors.
        takes: whether something is such a value.
        metavar: placeholder of the value in a command's help.
        read_as: type of the value on the command line, without `parse`.
        parse: reads a value of one of the types `written`, or raises ValueError; None if values are not parsed.
        least, most: limits of a number; None for no limit.
        number: the unit of a number in the library, for settings that people write with a unit.
        words: all words that are values, or those with a meaning of their own where others are values too.
    """

    wanted: str
    takes: Callable[[Any], bool]
    metavar: str
    read_as: type = str
    parse: Callable[[Any], Any] | None = None
    written: tuple[type, ...] = (str,)
    least: int | None = None
    most: float | None = None
    number: str = ""
    words: tuple[str, ...] = ()

    @property
    def is_path(self) -> bool:
        return os.PathLike in self.written

    @property
    def is_address(self) -> bool:
        return self.metavar == "URL"


def _is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def parse_layers(text: str) -> int | None:
    """Reads a number of layers, or `auto`. Raises ValueError."""
    try:
        return None if text.strip().lower() == "auto" else int(text)
    except ValueError:
        raise ValueError(f"'{text:.100}' is neither a whole number nor auto") from None


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _whole(least: int, metavar: str = "N") -> Kind:
    return Kind("a whole number", _is_whole, metavar, int, least=least)


def _up_to(most: float) -> Kind:
    wanted = f"a number from 0 to {most:g}"
    return Kind(wanted, lambda value: _is_number(value) and 0 <= value <= most, "X", float, least=0, most=most)


def _above_zero(wanted: str, metavar: str, parse: Callable[[Any], Any] | None = None, number: str = "") -> Kind:
    return Kind(wanted, lambda value: _is_number(value) and value > 0, metavar, float, parse, number=number)


def _words(literal: object) -> Kind:
    """One of the words of a Literal."""
    words = get_args(literal)
    return Kind(" or ".join(words), lambda value: isinstance(value, str) and value in words, "|".join(words), words=words)


def _path(metavar: str, *, words: tuple[str, ...] = ()) -> Kind:
    """A path, or one of these words, which are not paths."""

    def parse(value: Any) -> str | Path:
        if value in words:
            return str(value)
        if not os.fspath(value):
            raise ValueError("the path is empty; give one, or leave the setting out")
        return Path(expanded(value))  # of the class that this module knows: the simulation replaces it

    taken = (str, os.PathLike)
    return Kind("a path", lambda value: isinstance(value, Path) or value in words, metavar, str, parse, taken, words=words)


_FLAG = Kind("true or false", lambda value: isinstance(value, bool), "", bool)
_ADDRESS = Kind("an address", lambda value: isinstance(value, str), "URL")
_SIZE = Kind("a whole number", _is_whole, "SIZE", int, parse_size, least=0, number="bytes")
_LAYERS = Kind("a whole number or auto", lambda value: value is None or _is_whole(value), "N|auto", int, parse_layers, least=-1)
_PORTION = _above_zero("a share like 25% or a size like 2GiB", "SHARE|SIZE", parse_portion, "a share up to 1, bytes above")
_TIME = _above_zero("a time like 7d or 12h", "TIME", parse_time, "seconds")
_SECONDS = Kind("a number of seconds", lambda value: _is_number(value) and value >= 0, "SECONDS", float, number="seconds")
_PAUSE = _above_zero("a number of seconds, more than 0", "SECONDS", number="seconds")
_MODEL = Kind("a path", lambda value: True, "MODEL", written=(str, os.PathLike))  # the engine says what is wrong with one


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of a field of `Settings`.

    Attributes:
        help: what it does. It names other settings by `option`, so that each surface can write them in its own form.
        group: heading in a command's help.
        unset: what the command line does without it, or its default as people write it; "" if the default shows that.
        none: what None means in the library; "" if `unset` says that.
    """

    kind: Kind
    group: Group
    help: str
    unset: str = ""
    none: str = ""


def _setting(default: Any, kind: Kind, group: Group, help: str, *, unset: str = "", none: str = "") -> Any:
    """A field of `Settings`. A default may be written as a text that its kind parses."""
    if kind.parse is not None and isinstance(default, str):
        default, unset = kind.parse(default), default
    return field(default=default, metadata={"setting": Setting(kind, group, help, unset, none)})


@dataclass(frozen=True, slots=True)
class Settings:
    """How to load a model and serve it. Paths may be texts. Sizes, shares and times may be texts like `8GiB`, `25%` or `7d`.

    Raises:
        ConfigError: a value cannot work.
    """

    model: str = _setting(
        "demo",
        _MODEL,
        "Model",
        "Path of a `.gguf` file, or of a folder with `config.json` and `*.safetensors` (for MLX); OWNER/NAME[:QUANTISATION] on "
        "Hugging Face's hub, fetched if it is not here; a name that `headstart models` lists; or `demo` for the bundled "
        "SmolLM2-135M-Instruct.",
    )
    ctx: int | None = _setting(
        None,
        _whole(1, "TOKENS"),
        "Speed and memory",
        "Most tokens of one conversation.",
        unset="the model's own, less if memory is short",
    )
    slots: int | None = _setting(
        None,
        _whole(1),
        "Speed and memory",
        f"Conversations computed at the same time. Others are stored within {option('memory_budget')}.",
        unset="what fits, at most 4",
    )
    threads: int | None = _setting(
        None,
        _whole(1),
        "Speed and memory",
        "CPU threads. Leave some cores to other busy programs.",
        unset="all physical cores",
    )
    gpu_layers: int | None = _setting(
        None,
        _LAYERS,
        "Speed and memory",
        "Layers to put on a GPU; -1 for all, `auto` for what fits. Needs llama-cpp-python built for a GPU.",
        unset="auto",
        none="what fits",
    )
    kv_type: KvType = _setting(
        "f16",
        _words(KvType),
        "Speed and memory",
        "Type of keys and values. q8_0 needs half the memory. With bf16 and q8_0 exact mode can often reuse replies.",
    )
    chat_template: str | Path | None = _setting(
        None,
        _path("NAME|FILE", words=tuple(templates.BUILT_IN)),
        "Model",
        f"Chat template, instead of the model's own: a Jinja file, or one of {', '.join(templates.BUILT_IN)}.",
        unset="the model's own; chatml if it has none",
    )
    lora: Path | None = _setting(None, _path("FILE"), "Model", "LoRA adapter (`.gguf`).")
    llama_lib: Path | None = _setting(
        None,
        _path("PATH"),
        "Model",
        "llama.cpp's own library (`libllama`), or the folder that has it. What it can do is proved at the first load.",
        unset="the one that llama-cpp-python brings",
    )
    temperature: float | None = _setting(
        None,
        _up_to(2.0),
        "Model",
        "Temperature of requests without one; see the model's recommendation. 0 is greedy.",
        unset="0.8, as llama-server's",
    )
    top_k: int | None = _setting(
        None, _whole(0), "Model", "Default of requests: sample from the N likeliest tokens; 0 for all.", unset="40"
    )
    top_p: float | None = _setting(
        None,
        _up_to(1.0),
        "Model",
        "Default of requests: sample from the likeliest tokens with this total probability.",
        unset="0.95",
    )
    min_p: float | None = _setting(
        None,
        _up_to(1.0),
        "Model",
        "Default of requests: least probability of a token, as a share of the likeliest token's.",
        unset="0.05",
    )
    memory: int | None = _setting(
        None,
        _SIZE,
        "Speed and memory",
        "Most host memory for weights, slots and stored conversations together, like 16GiB. With several models it is for all "
        "of them.",
        unset="what is free",
    )
    memory_budget: int | None = _setting(
        None,
        _SIZE,
        "Reuse",
        "Hard limit of host memory for stored conversations, outside the slots, like 4GiB, 512MiB or 2G.",
        unset="4GiB; more if restoring one conversation needs it, less if memory is short",
    )
    cache_dir: Path | None = _setting(
        None,
        _path("FOLDER"),
        "Reuse",
        "Folder for conversations that survive a restart. Several servers may share it.",
        unset="this platform's cache folder",
        none="nothing is stored on disk; if it is left out, `headstart.open` takes this platform's cache folder",
    )
    disk_budget: int = _setting(
        "20GiB",
        _SIZE,
        "Reuse",
        "Hard limit of the folder's size, and never more than half of the free space. What is pinned stays when it is lowered.",
    )
    tenant_memory: float = _setting(
        "100%",
        _PORTION,
        "Reuse",
        f"Most of {option('memory_budget')} that one tenant keeps when others need room, like 25% or 2GiB.",
    )
    tenant_disk: float = _setting(
        "100%",
        _PORTION,
        "Reuse",
        f"Most of {option('disk_budget')} that one tenant keeps when others need room, like 25% or 2GiB.",
    )
    expire: float | None = _setting(
        None,
        _TIME,
        "Reuse",
        "Delete everything after this time, on disk and in memory, like 7d, 12h or 90min (docs/privacy.md).",
        unset="until room is needed",
        none="everything is kept until room is needed",
    )
    reuse: Reuse = _setting(
        "fast",
        _words(Reuse),
        "Reuse",
        "`fast` reuses everything. `exact` reuses only KV that keeps answers bit-identical to those of an empty cache. "
        "It refuses to start if that cannot be proved.",
    )
    settle: Switch = _setting(
        "on",
        _words(Switch),
        "Reuse",
        "When idle, prefill finished turns in the form of the next request, which then computes only its new message.",
    )
    overflow: Overflow = _setting(
        "error",
        _words(Overflow),
        "Reuse",
        f"If a conversation exceeds {option('ctx')}, `error` refuses it; `truncate` drops its oldest exchanges, and says so.",
    )
    shared: str | None = _setting(
        None,
        _ADDRESS,
        "Shared cache",
        "Store of a fleet: what one server has computed, no other computes again. valkey://HOST:6379, valkeys://HOST:6379, "
        "s3://BUCKET/PREFIX or file:///PATH (docs/shared.md).",
        unset="no other server's cache is used",
    )
    shared_key_file: Path | None = _setting(
        None,
        _path("FILE"),
        "Shared cache",
        f"Keys of the fleet, from `headstart fleet keygen`. {option('shared')} needs it.",
        unset="none",
    )
    shared_mode: SharedMode = _setting(
        "readwrite", _words(SharedMode), "Shared cache", "`read` stores nothing in the shared store."
    )
    shared_encrypt: bool = _setting(
        False,
        _FLAG,
        "Shared cache",
        "Encrypt what goes to the shared store, with a key for each tenant. Otherwise the store's operator can read prompts.",
    )
    shared_expire: float | None = _setting(
        None,
        _TIME,
        "Shared cache",
        f"Delete from the shared store after this time, like 7d. {option('expire')} applies to it too.",
        unset="until the store needs room",
        none="the store keeps everything until it needs room",
    )
    queue: int = _setting(64, _whole(1), "Operation", "Requests that may wait; further ones get a 429.")
    explain: Switch = _setting(
        "on", _words(Switch), "Operation", "Keep the latest requests in memory, to explain why later ones recompute tokens."
    )
    stall: float = _setting(0.25, _PAUSE, "Operation", "Longest pause of a running reply while another prompt is computed.")
    drain: float = _setting(
        10.0,
        _SECONDS,
        "Operation",
        "Longest time to stop: running replies continue for four fifths of it, the rest is for the disk and the shared store.",
    )
    no_web: bool = _setting(
        False, _FLAG, "Operation", "Of a server: no page for people at `/` (docs/web.md). The library ignores it."
    )
    state_dir: Path | None = _setting(
        None,
        _path("FOLDER"),
        "Operation",
        "Folder for the results of engines' proofs and of trials of llama.cpp's builds, and for digests of model files. It is "
        "not part of the disk tier and has no text of conversations. The record of fetched models is always in this platform's "
        "folder for state, or in HEADSTART_STATE_DIR (docs/privacy.md).",
        none="this platform's folder for such state",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            name, kind, value = item.name, SETTINGS[item.name].kind, getattr(self, item.name)
            if value is None and item.default is None:
                continue
            if kind.parse is not None and isinstance(value, kind.written):
                try:
                    value = kind.parse(value)
                except ValueError as error:
                    raise ConfigError(f"{option(name)}: {error}.") from error
                object.__setattr__(self, name, value)  # the only change that a frozen value sees
                if value is None:
                    continue
            if not kind.takes(value):
                raise ConfigError(f"{option(name)} must be {kind.wanted}, not {value!r:.100}.")
            if kind.least is not None and value < kind.least:
                raise ConfigError(f"{option(name)} must be at least {kind.least}, not {value}.")

    def engine_options(self) -> EngineOptions:
        """The settings that an engine needs."""
        return EngineOptions(
            self.model,
            ctx=self.ctx,
            slots=self.slots,
            threads=self.threads,
            gpu_layers=self.gpu_layers,
            kv_type=self.kv_type,
            lora=self.lora,
            llama_lib=self.llama_lib,
            reserve=self.memory_budget,
            memory=self.memory,
            exact=self.reuse == "exact",
            state_dir=(self.state_dir or default_state_dir()).absolute(),
        )

    def template(self) -> templates.ChatTemplate | None:
        """The template that `chat_template` names; None without it.

        Raises:
            ConfigError: there is no such built-in template, or the file cannot be read.
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


SETTINGS: dict[str, Setting] = {one.name: one.metadata["setting"] for one in fields(Settings)}
"""The descriptions of the fields of `Settings`, in their order."""


def _documented(doc: str) -> str:
    """A docstring with the fields, which are described in the table only."""
    text, _, raises = doc.partition("    Raises:")
    items = []
    for one in fields(Settings):
        row = SETTINGS[one.name]
        none = (row.none or row.unset) if one.default is None else ""
        number = row.kind.number
        meaning = f"{as_argument(row.help)}{number and f' A number: {number}.'}{none and f' None: {none}.'}"
        items.append(f"        {one.name}: {meaning}")
    return "\n".join([f"{text}    Attributes:", *items, "", f"    Raises:{raises}"])


Settings.__doc__ = _documented(Settings.__doc__ or "")
Settings.__init__ = suggesting(Settings.__init__)  # type: ignore[method-assign]


def default_cache_dir() -> Path:
    """This platform's folder for caches, or HEADSTART_CACHE_DIR."""
    return expanded(os.environ.get("HEADSTART_CACHE_DIR") or user_cache_path("headstart"))
