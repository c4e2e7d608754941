"""Foreign: options of other servers, and mistyped environment variables."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from headstart.errors import ConfigError

PREFIX = "HEADSTART_"
COMMANDS = frozenset({"serve"})
"""Commands that understand options of other servers."""
MODEL = "MODEL"
"""Stands for the model argument, which has no flag."""
MODEL_FILE = "FILE"
"""Stands for the part of the model argument behind the colon."""

SAME = {
    "-m": MODEL,
    "--model": MODEL,
    "-hf": MODEL,
    "-hfr": MODEL,
    "--hf-repo": MODEL,
    "-hff": MODEL_FILE,
    "--hf-file": MODEL_FILE,
    "-c": "--ctx",
    "--ctx-size": "--ctx",
    "--max-model-len": "--ctx",
    "-np": "--slots",
    "--parallel": "--slots",
    "--max-num-seqs": "--slots",
    "-t": "--threads",
    "-ngl": "--gpu-layers",
    "--ngl": "--gpu-layers",
    "--n-gpu-layers": "--gpu-layers",
    "-a": "--alias",
    "--served-model-name": "--alias",
    "--chat-template-file": "--chat-template",
    "--temp": "--temperature",
    "--ssl-cert-file": "--tls-cert",
    "--ssl-certfile": "--tls-cert",
    "--ssl-key-file": "--tls-key",
    "--ssl-keyfile": "--tls-key",
}
"""Options of other servers with the same meaning as an option of headstart. All take a value."""

VALUES = {("--gpu-layers", "all"): "-1"}
"""Values of other servers, and headstart's value for them."""
NOTHING = frozenset({("--ctx", "0"), ("--gpu-layers", "auto")})
"""Values that mean: as without the option."""

_URL = "give OWNER/NAME of its repository, or download the .gguf file and give its path"
_KV = "give --kv-type f16, bf16 or q8_0: one type for keys and values"
_ALWAYS = "leave it out: headstart always does that"
_BATCH = "leave it out: the size of calls is chosen so that cached answers are exact"
HINTS = {
    "-mu": _URL,
    "--model-url": _URL,
    "-hft": "put the token into HF_TOKEN",
    "--hf-token": "put the token into HF_TOKEN",
    "--offline": "set HF_HUB_OFFLINE=1",
    "-ctk": _KV,
    "-ctv": _KV,
    "--cache-type-k": _KV,
    "--cache-type-v": _KV,
    "-fa": _ALWAYS,
    "--flash-attn": _ALWAYS,
    "--jinja": _ALWAYS,
    "-cb": _ALWAYS,
    "--cont-batching": _ALWAYS,
    "--enable-prefix-caching": _ALWAYS,
    "--metrics": _ALWAYS,
    "--slot-save-path": "give --cache-dir: conversations are kept there automatically",
    "-b": _BATCH,
    "--batch-size": _BATCH,
    "-ub": _BATCH,
    "--ubatch-size": _BATCH,
}
"""Options without a counterpart, and what to do instead."""


def translate(arguments: Sequence[str]) -> list[str]:
    """The command line with other servers' options replaced by headstart's.

    Raises:
        ConfigError: an option has no counterpart; the message says what to do instead.
    """
    if not arguments or arguments[0] not in COMMANDS:
        return list(arguments)
    found, rest = [arguments[0]], list(arguments[1:])
    model, file = "", ""
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            rest.insert(0, argument)
            break
        name, equals, value = argument.partition("=")
        if name in HINTS:
            raise ConfigError(f"There is no option {name}: {HINTS[name]}.")
        own = SAME.get(name)
        if own is None:
            found.append(argument)
            continue
        if not equals:
            if not rest:
                raise ConfigError(f"{name} needs a value.")
            value = rest.pop(0)
        if own == MODEL:
            model = value
        elif own == MODEL_FILE:
            file = value
        elif (own, value) not in NOTHING:
            found += [own, VALUES.get((own, value), value)]
    if file and not model:
        raise ConfigError("-hff needs -hf: give the repository as OWNER/NAME:FILE.")
    named = [f"{model.partition(':')[0]}:{file}" if file else model] if model else []
    return [found[0], *named, *found[1:], *rest]


def strange_variables(environment: Iterable[str], known: Iterable[str]) -> list[str]:
    """A sentence for each `HEADSTART_…` variable that headstart does not read, with a suggestion."""
    names = {name.removeprefix(PREFIX) for name in known}
    suggestions = []
    for name in sorted(name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX)):
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), 1, 0.6)
            meant = f"did you mean {PREFIX}{near[0]}?" if near else "it has no effect; `headstart serve --help` lists them all."
            suggestions.append(f"There is no variable {PREFIX}{name}: {meant}")
    return suggestions
