"""The options of settings come from the table in `config`, for every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headstart.cli.cache import place_of
from headstart.cli.network import AccessOptions, ListenOptions, OperationOptions, network_of
from headstart.cli.options import SERVED, takes_settings
from headstart.config import SETTINGS, Settings, default_cache_dir
from headstart.errors import ConfigError
from headstart.names import as_flag, as_variable, option
from headstart.paths import default_state_dir
from process import Here

WRITTEN = {
    "model": "a.gguf",
    "chat_template": "own.jinja",
    "lora": "b.gguf",
    "llama_lib": "libllama.so",
    "cache_dir": "folder",
    "kv_type": "q8_0",
    "reuse": "exact",
    "settle": "off",
    "explain": "off",
    "overflow": "truncate",
    "disk_budget": "5GiB",
    "memory_budget": "512MiB",
    "tenant_memory": "25%",
    "tenant_disk": "2GiB",
    "expire": "7d",
    "shared": "valkey://localhost",
    "shared_key_file": "fleet.key",
    "shared_mode": "read",
    "shared_expire": "12h",
}
"""Values other than the defaults; of all other settings it is 1."""


def chosen(*arguments: str, **environment: str) -> Settings:
    """What a command with all options of settings gets."""
    app, found = typer.Typer(), list[Settings]()

    @app.command()
    @takes_settings(*SERVED)
    def command(settings: Settings) -> None:
        found.append(settings)

    result = CliRunner().invoke(app, arguments, env=environment, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_what_is_not_given_has_the_default() -> None:
    assert chosen() == Settings(cache_dir=default_cache_dir())


@pytest.mark.parametrize("name", SERVED)
def test_a_setting_is_the_same_by_option_by_variable_and_in_the_library(name: str) -> None:
    written = WRITTEN.get(name, "1")
    typed = {} if name in WRITTEN else {name: type(getattr(Settings(), name) or 1)(1)}
    typed |= {name: True} if SETTINGS[name].kind.read_as is bool else {}
    wanted = Settings(**{"cache_dir": default_cache_dir(), name: written, **typed})  # type: ignore[arg-type]
    assert wanted != Settings(cache_dir=default_cache_dir())
    flag = [] if name == "model" else [as_flag(option(name))]
    assert chosen(*flag, *([] if SETTINGS[name].kind.read_as is bool else [written])) == wanted
    assert chosen(**{as_variable(name): written}) == wanted


def test_everything_is_said_of_every_setting() -> None:
    for name, row in SETTINGS.items():
        assert row.help.endswith("."), name
        assert f"{name}: " in (Settings.__doc__ or "")
        assert row.kind.metavar.isupper() or "|" in row.kind.metavar or row.kind.read_as is bool


def test_a_setting_that_may_be_none_says_what_that_means() -> None:
    plain = Settings()
    for name, row in SETTINGS.items():
        if getattr(plain, name) is None and name != "lora":
            assert row.none or row.unset, name
    assert isinstance(Settings(cache_dir="a").cache_dir, Path)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, row in SETTINGS.items() if row.kind.is_path and name != "model"])
def test_a_path_may_begin_with_a_tilde_and_is_not_empty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: `~/cache` made a folder `~`, and an empty path made files in the current folder."""
    monkeypatch.setenv("HOME", "/home/jo")
    for written in ("~/a", Path("~/a")):
        assert getattr(Settings(**{name: written}), name) == Path("/home/jo/a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name}=: the path is empty; give one, or leave the setting out"):
        Settings(**{name: ""})  # type: ignore[arg-type]


def test_an_empty_folder_is_refused_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match="the path is empty"):
        chosen("--cache-dir", "")


def test_a_folder_in_the_environment_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in systemd's `EnvironmentFile`, which expands nothing."""
    monkeypatch.setenv("HOME", "/home/jo")
    monkeypatch.setenv("HEADSTART_CACHE_DIR", "~/cache")
    monkeypatch.setenv("HEADSTART_STATE_DIR", "~/state")
    assert default_cache_dir() == place_of(None) == place_of(Path("~/cache")) == Path("/home/jo/cache")
    assert default_state_dir() == Settings().engine_options().state_dir == Path("/home/jo/state")
    network = network_of(ListenOptions(), AccessOptions(api_key_file=Path("~/keys")), OperationOptions(), ())
    assert network.key_file == Path("/home/jo/keys")


SOCKET = Path("/run/a.sock")


@pytest.mark.parametrize(
    ("given", "from_line", "socket", "port"),
    [
        ({"unix_socket": SOCKET, "port": 1}, {"port"}, None, 1),
        ({"unix_socket": SOCKET, "port": 1, "host": "::"}, {"host"}, None, 1),
        ({"unix_socket": SOCKET, "port": 1, "host": "::"}, {"unix_socket"}, SOCKET, 8000),
        ({"unix_socket": SOCKET}, set[str](), SOCKET, 8000),
    ],
)
def test_what_is_typed_overrides_where_the_environment_lets_a_server_listen(
    given: dict[str, Any], from_line: set[str], socket: Path | None, port: int
) -> None:
    """Fault: with a variable for a socket, `--port` was refused, and the error named variables that were not set."""
    network = network_of(ListenOptions(**given), AccessOptions(), OperationOptions(), (), from_line)
    assert (network.unix_socket, network.port) == (socket, port)


@pytest.mark.parametrize(
    ("given", "from_line", "says"),
    [
        ({"port": 1}, {"port", "unix_socket"}, "--unix-socket replaces --host and --port: leave them out"),
        ({"port": 1}, set[str](), "HEADSTART_UNIX_SOCKET replaces HEADSTART_PORT: unset one or the other"),
        ({"port": 1, "host": "::"}, set[str](), "replaces HEADSTART_HOST and HEADSTART_PORT"),
    ],
)
def test_a_socket_and_an_address_given_in_one_way_are_refused(given: dict[str, Any], from_line: set[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        network_of(ListenOptions(unix_socket=SOCKET, **given), AccessOptions(), OperationOptions(), (), from_line)


def test_serve_knows_what_is_typed(here: Here) -> None:
    found = here("serve", "no-such.gguf", "--port", "1", HEADSTART_UNIX_SOCKET=str(SOCKET))
    assert "no-such.gguf" in found.stderr


def test_a_relative_folder_for_state_is_that_of_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings(state_dir=Path("state")).engine_options().state_dir == tmp_path / "state"
    monkeypatch.setenv("HEADSTART_STATE_DIR", "other")
    assert Settings().engine_options().state_dir == tmp_path / "other"
