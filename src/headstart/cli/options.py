"""Options that the commands share: those of settings, from the table in `config`, and the network options of `serve`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from headstart.cli import completion
from headstart.config import SETTINGS, Settings, default_cache_dir
from headstart.names import as_flag, as_variable, option

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
NETWORK, CACHE, OPERATION = "Network", "Reuse", "Operation"
SERVED = tuple(name for name in SETTINGS if name != "state_dir")
"""Settings that have an option. The folder for state has only a variable, because it belongs to the machine, not a command."""


def reader(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser for Typer, which raises BadParameter where `parse` raises ValueError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(f"{error}.") from None

    return read


def setting(name: str, *, group: str | None = None, help: str = "") -> Any:
    """The option (or argument) of a setting, for Typer.

    Args:
        group: heading in the command's help.
        help: help text in place of the table's.
    """
    row, kind, text = SETTINGS[name], SETTINGS[name].kind, help or as_flag(SETTINGS[name].help)
    if name == "model":
        return typer.Argument(envvar=as_variable(name), help=text, autocompletion=completion.models)
    return typer.Option(
        as_flag(option(name)),
        parser=None if kind.parse is None or kind.is_path else reader(kind.parse),
        min=kind.least if kind.parse is None else None,
        max=kind.most,
        envvar=as_variable(name),
        metavar=kind.metavar or None,
        rich_help_panel=group,
        help=text,
        show_default=row.unset or True,
        autocompletion=completion.words(kind.words) if kind.words else None,
    )


def written_default(name: str) -> Any:
    """The default of a setting as people write it, because Typer also parses defaults."""
    default = next(field.default for field in fields(Settings) if field.name == name)
    return default if default is None or SETTINGS[name].kind.parse is None else SETTINGS[name].unset


def again(annotation: Any, group: str, help: str, **changed: Any) -> Any:
    """What Typer must know of an option of `serve` in a command that asks a server: only what is given here differs."""
    info = copy(get_args(annotation)[1])
    for name, value in {"rich_help_panel": group, "help": help, **changed}.items():
        setattr(info, name, value)
    return info


def replaced(name: str, options: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], Any]) -> Decorator:
    """A decorator: the command gets these options in place of its parameter `name`, which receives what `make` makes of them.

    Args:
        make: takes the values of the options by name.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            chosen = {option.name: given.pop(option.name) for option in options}
            command(**{name: make(chosen)}, **given)

        signature = inspect.signature(command, eval_str=True)
        parameters = [
            new
            for parameter in signature.parameters.values()
            for new in ([one.replace(kind=parameter.kind) for one in options] if parameter.name == name else [parameter])
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def cli_option(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """An option for `replaced`."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def takes_settings(*names: str) -> Decorator:
    """A decorator: the command gets the options of these settings in place of its parameter `settings`, which receives their
    values as `Settings`. By default the disk tier is in this platform's cache folder.
    """

    def make(chosen: dict[str, Any]) -> Settings:
        if "cache_dir" in chosen:
            chosen["cache_dir"] = chosen["cache_dir"] or default_cache_dir()
        return Settings(**chosen)

    def of(name: str) -> inspect.Parameter:
        row = SETTINGS[name]
        return cli_option(name, Annotated[row.kind.read_as | None, setting(name, group=row.group)], written_default(name))

    return replaced("settings", [of(name) for name in names], make)


ModelOption = Annotated[str, setting("model")]
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
    """Parses a file's mode like 660 or 0660. Raises BadParameter if it is not one."""
    if not re.fullmatch("0?[0-7]{3}", str(text)):
        raise typer.BadParameter(f"'{text}' is not a file mode; write it like 600 or 660")
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
        help="Certificate in PEM, with the intermediate ones. The server then uses HTTPS only. It loads a renewed file while "
        "it runs.",
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
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HEADSTART_API_KEY",
        metavar="KEY",
        rich_help_panel=NETWORK,
        help="Key that requests must send; give the option again for more keys (in the environment: separated by spaces).",
        show_default="none: open",
    ),
]
NoDiskOption = Annotated[
    bool, typer.Option("--no-disk", envvar="HEADSTART_NO_DISK", rich_help_panel=CACHE, help="Store nothing on disk.")
]
LogFormatOption = Annotated[
    str,
    typer.Option(
        envvar="HEADSTART_LOG_FORMAT",
        metavar="console|json",
        autocompletion=completion.words(["console", "json"]),
        rich_help_panel=OPERATION,
        help="Lines for people, or JSON objects for collectors. They go to stderr.",
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
        autocompletion=completion.words(["user", "key", "none"]),
        rich_help_panel=NETWORK,
        help="`key` isolates each key. `user` also isolates each user that requests name (`safety_identifier`, `user`, "
        "`metadata.user_id`). `none` isolates only each `cache_salt`.",
        show_default="`key` with several keys or a key file, else `none`",
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HEADSTART_ALIAS",
        metavar="NAME",
        rich_help_panel=NETWORK,
        help="Name of the model for callers; the file's name works too. Give it again for more names; answers use the first. "
        "Names ignore case.",
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
        show_default="none: pages of other origins are refused",
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HEADSTART_ALLOW_HOST",
        metavar="NAME",
        rich_help_panel=NETWORK,
        help="Name of this server in the Host header of requests, like `llm.example.com`, beside --host, `localhost` and IP "
        "addresses; `*.example.com` for all names below one, `*` for any. Give it again for more.",
        show_default="none: other names get 403",
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
