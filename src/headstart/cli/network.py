"""Network: the options of servers, be it one or a fleet: where they listen, who may enter, and how they run."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from headstart.cli import completion
from headstart.cli.options import CACHE, NETWORK, OPERATION
from headstart.errors import ConfigError
from headstart.names import as_variable
from headstart.paths import expanded

if TYPE_CHECKING:
    from headstart.api.entrance import Network

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
        "Names ignore case. With several models: ALIAS=NAME.",
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


AllowPull = Annotated[
    bool,
    typer.Option(
        "--allow-pull",
        envvar="HEADSTART_ALLOW_PULL",
        rich_help_panel=NETWORK,
        help="Also serve the models that headstart has fetched. Without keys, let clients on other machines fetch models too "
        "(`/api/pull`), which fills the disk. With keys, the operator may.",
    ),
]


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Where a server listens. None for the default."""

    host: Host = None
    port: PortOption = None


@dataclass(frozen=True, slots=True)
class ListenOptions(HostOptions):
    """Where a server of one machine listens."""

    unix_socket: UnixSocketOption = None
    unix_socket_mode: UnixSocketMode = cast(int, "600")  # noqa: RUF009  (Typer parses defaults too)
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    allow_pull: AllowPull = False

    def without_overridden(self, typed: Collection[str]) -> ListenOptions:
        """A socket or an address. `typed`: the options on the command line, which override the environment.

        Raises:
            ConfigError: both are given in the same way.
        """
        if self.unix_socket is None or (self.host is None and self.port is None):
            return self
        by_socket, by_address = "unix_socket" in typed, not {"host", "port"}.isdisjoint(typed)
        if by_socket and by_address:
            raise ConfigError("--unix-socket replaces --host and --port: leave them out.")
        if by_socket:
            return replace(self, host=None, port=None)
        if by_address:
            return replace(self, unix_socket=None)
        others = " and ".join(as_variable(name) for name in ("host", "port") if getattr(self, name) is not None)
        raise ConfigError(f"{as_variable('unix_socket')} replaces {others}: unset one or the other.")


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Who may enter, and how callers are told apart."""

    api_key: ApiKeys = None
    api_key_file: ApiKeyFile = None
    isolate: Isolate = None
    alias: Alias = None
    allow_host: AllowHost = None
    cors: Cors = None
    keep_noise: KeepNoise = None


@dataclass(frozen=True, slots=True)
class OperationOptions:
    """How a server runs."""

    no_disk: NoDiskOption = False
    log_format: LogFormatOption = "console"

    def checked_format(self) -> Literal["console", "json"]:
        """The format of the log. Raises ConfigError for an unknown one."""
        if self.log_format not in ("console", "json"):
            raise ConfigError(f"--log-format must be console or json, not {self.log_format!r}.")
        return cast("Literal['console', 'json']", self.log_format)


def network_of(
    listen: ListenOptions,
    access: AccessOptions,
    operation: OperationOptions,
    notices: Sequence[str],
    typed: Collection[str] = (),
) -> Network:
    """How a server of one machine is reached.

    Args:
        notices: warnings for its log.
        typed: the options on the command line.

    Raises:
        ConfigError: the options do not fit together.
    """
    from headstart.api.entrance import Network

    listen = listen.without_overridden(typed)
    return Network(
        host=listen.host or "127.0.0.1",
        port=8000 if listen.port is None else listen.port,
        api_keys=tuple(access.api_key or ()),
        unix_socket=listen.unix_socket,
        unix_socket_mode=listen.unix_socket_mode,
        tls_cert=listen.tls_cert,
        tls_key=listen.tls_key,
        key_file=access.api_key_file and expanded(access.api_key_file),
        isolate=access.isolate,
        allow_host=tuple(access.allow_host or ()),
        cors=tuple(access.cors or ()),
        keep_noise=tuple(access.keep_noise or ()),
        pullers="all" if listen.allow_pull else "local",
        log_format=operation.checked_format(),
        notices=notices,
    )
