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

ModelOption = Annotated[str, typer.Argument(envvar="HEADSTART_MODEL", help=MODEL_HELP)]
Ctx = Annotated[
    int | None,
    typer.Option(
        min=1,
        envvar="HEADSTART_CTX",
        metavar="TOKENS",
        rich_help_panel=COMPUTE,
        help="Most tokens of one conversation.",
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
        help="Conversations computed at the same time. Others are stored within --memory-budget.",
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
        help="Layers to put on a GPU; -1 for all. Needs llama-cpp-python built for a GPU; set --ctx and --slots too.",
    ),
]
Kv = Annotated[
    str,
    typer.Option(
        envvar="HEADSTART_KV_TYPE",
        metavar="f16|bf16|q8_0",
        rich_help_panel=COMPUTE,
        help="Type of keys and values. q8_0 needs half the memory. With bf16 and q8_0 exact mode can often reuse replies.",
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        parser=cli_cache.size,
        envvar="HEADSTART_MEMORY_BUDGET",
        metavar="SIZE",
        rich_help_panel=CACHE,
        help="Hard limit of host memory for stored conversations, outside the slots, like 4GiB, 512MiB or 2G.",
        show_default="4GiB; more if restoring one conversation needs it, less if memory is short",
    ),
]
ReuseMode = Annotated[
    str,
    typer.Option(
        envvar="HEADSTART_REUSE",
        metavar="fast|exact",
        rich_help_panel=CACHE,
        help="`fast` reuses everything. `exact` reuses only KV that keeps answers bit-identical to those of an empty cache. "
        "It refuses to start if that cannot be proved.",
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_CACHE_DIR",
        metavar="FOLDER",
        rich_help_panel=CACHE,
        help="Folder for conversations that survive a restart. Several servers may share it.",
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
        help="Hard limit of the folder's size, and never more than half of the free space.",
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
        help="Most of --memory-budget that one tenant keeps when others need room, like 25% or 2GiB.",
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
        help="The same for --disk-budget.",
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
        help="Delete everything after this time, on disk and in memory, like 7d, 12h or 90min (docs/privacy.md).",
        show_default="until room is needed",
    ),
]
ChatTemplateOption = Annotated[
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
        help="Temperature of requests without one; models come with a recommendation. 0 is greedy.",
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
        help="Default of requests: sample from the N likeliest tokens; 0 for all.",
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
        help="Default of requests: sample from the likeliest tokens with this total probability.",
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
        help="Default of requests: least probability of a token, as a share of the likeliest one's.",
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
PortOption = Annotated[
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
UnixSocketOption = Annotated[
    Path | None,
    typer.Option(
        envvar="HEADSTART_UNIX_SOCKET",
        metavar="PATH",
        rich_help_panel=NETWORK,
        help="Unix socket to listen on, instead of --host and --port (docs/service.md).",
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
        help="Certificate in PEM, with the intermediate ones. The server then speaks HTTPS only. A renewed file is loaded "
        "while the server runs.",
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
        help="File of keys, one a line: `key` or `name = key`, `#` begins a comment. It is read again when it changes. With "
        "isolation on, only the key named `operator` may read server-wide data: `/metrics`, `/slots`.",
    ),
]
Isolate = Annotated[
    str | None,
    typer.Option(
        envvar="HEADSTART_ISOLATE",
        metavar="user|key|none",
        rich_help_panel=NETWORK,
        help="Isolate each key; each user that a key's requests name (`safety_identifier`, `user`, "
        "`metadata.user_id`); or only each `cache_salt`.",
        show_default="`key` with several keys or a file of them, else `none`",
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HEADSTART_ALIAS",
        metavar="NAME",
        rich_help_panel=NETWORK,
        help="Name of the model for callers; the file's name works too. Give it again for more names; answers have the "
        "first. Upper and lower case make no difference.",
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
        show_default="none: browsers block pages of other origins",
    ),
]
KeepNoise = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HEADSTART_KEEP_NOISE",
        metavar="RULE",
        rich_help_panel=CACHE,
        help="Noise of clients to leave in prompts (docs/clients.md lists the rules); give the option again for more.",
        show_default="none: all noise is removed",
    ),
]
