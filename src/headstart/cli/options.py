"""Options that the command line's commands share, and those of whom a server is for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli import cache as cli_cache
from headstart.templates import BUILT_IN

MODEL_HELP = "Path of a `.gguf` file, or `demo` for the bundled SmolLM2-135M-Instruct."
NETWORK, COMPUTE, MODEL_PANEL, CACHE, OPERATION = "Network", "Speed and memory", "Model", "Reuse", "Operation"

Model = Annotated[str, typer.Argument(envvar="HEADSTART_MODEL", help=MODEL_HELP)]
Ctx = Annotated[
    int | None,
    typer.Option(
        min=1,
        envvar="HEADSTART_CTX",
        metavar="TOKENS",
        rich_help_panel=COMPUTE,
        help="Tokens that one conversation may hold.",
        show_default="the model's own, less if memory is short",
    ),
]
Slots = Annotated[
    int | None,
    typer.Option(
        min=1,
        envvar="HEADSTART_SLOTS",
        metavar="N",
        rich_help_panel=COMPUTE,
        help="Conversations computed at the same time; any number of others is kept in --memory-budget.",
        show_default="what fits, at most 4",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        envvar="HEADSTART_THREADS",
        metavar="N",
        rich_help_panel=COMPUTE,
        help="CPU threads. Leave some cores to other busy programs.",
        show_default="all physical cores",
    ),
]
GpuLayers = Annotated[
    int,
    typer.Option(
        min=-1,
        envvar="HEADSTART_GPU_LAYERS",
        metavar="N",
        rich_help_panel=COMPUTE,
        help="Layers to put on a GPU; -1 for all. Needs llama-cpp-python built for it.",
    ),
]
Kv = Annotated[
    str,
    typer.Option(
        envvar="HEADSTART_KV_TYPE",
        metavar="f16|bf16|q8_0",
        rich_help_panel=COMPUTE,
        help="Type of keys and values. q8_0 takes half the memory; with bf16 and q8_0 exact mode can often reuse replies.",
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        parser=cli_cache.size,
        envvar="HEADSTART_MEMORY_BUDGET",
        metavar="SIZE",
        rich_help_panel=CACHE,
        help="Host memory for conversations that no slot holds: a hard limit. Written like 4GiB, 512MiB or 2G.",
        show_default="4GiB; more if one conversation needs more to come back, less if memory is short",
    ),
]
ReuseMode = Annotated[
    str,
    typer.Option(
        envvar="HEADSTART_REUSE",
        metavar="fast|exact",
        rich_help_panel=CACHE,
        help="`fast` reuses everything. `exact` only what leaves answers bit-identical to those of an empty cache; "
        "it refuses to start where that cannot be proved.",
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_CACHE_DIR",
        metavar="FOLDER",
        rich_help_panel=CACHE,
        help="Where conversations outlive the server. Several servers may share it.",
        show_default="this platform's cache folder",
    ),
]
DiskBudget = Annotated[
    int,
    typer.Option(
        parser=cli_cache.size,
        envvar="HEADSTART_DISK_BUDGET",
        metavar="SIZE",
        rich_help_panel=CACHE,
        help="The most that the folder may occupy: a hard limit, and never more than half of what is free there.",
        show_default="20GiB",
    ),
]
TenantMemory = Annotated[
    float,
    typer.Option(
        parser=cli_cache.portion,
        envvar="HEADSTART_TENANT_MEMORY",
        metavar="SHARE|SIZE",
        rich_help_panel=CACHE,
        help="The most that one tenant may hold of --memory-budget when others want room, like 25% or 2GiB.",
        show_default="100%",
    ),
]
TenantDisk = Annotated[
    float,
    typer.Option(
        parser=cli_cache.portion,
        envvar="HEADSTART_TENANT_DISK",
        metavar="SHARE|SIZE",
        rich_help_panel=CACHE,
        help="The same of --disk-budget.",
        show_default="100%",
    ),
]
Expire = Annotated[
    float | None,
    typer.Option(
        parser=cli_cache.duration,
        envvar="HEADSTART_EXPIRE",
        metavar="TIME",
        rich_help_panel=CACHE,
        help="Nothing that was written is kept longer, on disk or in memory: like 7d, 12h or 90min (docs/privacy.md).",
        show_default="kept until room is needed",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        envvar="HEADSTART_CHAT_TEMPLATE",
        metavar="NAME|FILE",
        rich_help_panel=MODEL_PANEL,
        help=f"Chat template, instead of the model's own: a Jinja file, or one of {', '.join(BUILT_IN)}.",
        show_default="the model's own; chatml if it has none",
    ),
]
Lora = Annotated[
    Path | None,
    typer.Option(envvar="HEADSTART_LORA", metavar="FILE", rich_help_panel=MODEL_PANEL, help="LoRA adapter (`.gguf`)."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=2,
        envvar="HEADSTART_TEMPERATURE",
        metavar="X",
        rich_help_panel=MODEL_PANEL,
        help="Of requests that name none; models come with a recommendation. 0 is greedy.",
        show_default="0.8, as llama-server's",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        min=0,
        envvar="HEADSTART_TOP_K",
        metavar="N",
        rich_help_panel=MODEL_PANEL,
        help="The same: only the N likeliest tokens; 0 for all.",
        show_default="40",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        envvar="HEADSTART_TOP_P",
        metavar="X",
        rich_help_panel=MODEL_PANEL,
        help="The same: only the likeliest tokens that make up so much together.",
        show_default="0.95",
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        envvar="HEADSTART_MIN_P",
        metavar="X",
        rich_help_panel=MODEL_PANEL,
        help="The same: only tokens that are at least so likely, as a share of the likeliest.",
        show_default="0.05",
    ),
]
Host = Annotated[
    str | None,
    typer.Option(
        envvar="HEADSTART_HOST",
        metavar="ADDRESS",
        rich_help_panel=NETWORK,
        help="Address to listen on; 0.0.0.0 for all.",
        show_default="127.0.0.1",
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        envvar="HEADSTART_PORT",
        metavar="N",
        rich_help_panel=NETWORK,
        help="Port; 0 for any free one.",
        show_default="8000",
    ),
]
UnixSocket = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_UNIX_SOCKET",
        metavar="PATH",
        rich_help_panel=NETWORK,
        help="Unix socket to listen on, in place of --host and --port (docs/service.md).",
    ),
]


def mode(text: str | int) -> int:
    """Typer's parser of a file's mode: 660 or 0660. Raises BadParameter if it is none."""
    if not re.fullmatch("0?[0-7]{3}", str(text)):
        raise typer.BadParameter(f"'{text}' is no mode of a file; write it like 600 or 660")
    return int(str(text), 8)


UnixSocketMode = Annotated[
    int,
    typer.Option(
        parser=mode,
        envvar="HEADSTART_UNIX_SOCKET_MODE",
        metavar="MODE",
        rich_help_panel=NETWORK,
        help="Who may connect to it: 600 for the server's own user, 660 for its group too.",
        show_default="600",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_TLS_CERT",
        metavar="FILE",
        rich_help_panel=NETWORK,
        help="Certificate in PEM, with those between it and the authority's: then the server speaks HTTPS only. A new one is "
        "taken while the server runs.",
        show_default="none: plain HTTP",
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_TLS_KEY",
        metavar="FILE",
        rich_help_panel=NETWORK,
        help="Private key of that certificate, in PEM and without a passphrase.",
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_API_KEY_FILE",
        metavar="FILE",
        rich_help_panel=NETWORK,
        help="File of keys, one a line: `key` or `name = key`, `#` begins a comment. Read again when it changes; who has "
        "the key named `operator` may also read what is told of all tenants: `/metrics`, `/slots`.",
    ),
]
Isolate = Annotated[
    str | None,
    typer.Option(
        envvar="HEADSTART_ISOLATE",
        metavar="user|key|none",
        rich_help_panel=NETWORK,
        help="Who shares nothing with others: each key; each user that a key's requests name (`safety_identifier`, `user`, "
        "`metadata.user_id`); nobody, but for `cache_salt`.",
        show_default="`key` with several keys or a file of them, else `none`",
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HEADSTART_ALIAS",
        metavar="NAME",
        rich_help_panel=NETWORK,
        help="Name of the model for callers, who may go on using the file's. Give it again for more names; the first is the "
        "one that is served. Case makes no difference.",
        show_default="the file's name",
    ),
]
Cors = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HEADSTART_CORS",
        metavar="ORIGIN",
        rich_help_panel=NETWORK,
        help="Origin of web pages that may send requests, like `http://localhost:3000`; `*` for all. Give it again for more.",
        show_default="none: browsers keep pages from other places out",
    ),
]
KeepNoise = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HEADSTART_KEEP_NOISE",
        metavar="RULE",
        rich_help_panel=CACHE,
        help="Noise of clients to leave in prompts (docs/clients.md lists the rules); give the option again for more.",
        show_default="none: all is undone",
    ),
]
