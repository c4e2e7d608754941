"""Command line. Heavy imports are inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main
from typer.exceptions import TyperException

from headstart.cli import cache as cli_cache
from headstart.cli import explain as cli_explain
from headstart.cli import foreign as cli_foreign
from headstart.cli import install_gpu as cli_install_gpu
from headstart.cli import models as cli_models
from headstart.cli import ps as cli_ps
from headstart.cli import pull as cli_pull
from headstart.cli import replay as cli_replay
from headstart.cli import stats as cli_stats
from headstart.cli.completion import complete_installation, completing, take_line, whole_words, words
from headstart.cli.deferred import DeferredGroup
from headstart.cli.network import AccessOptions, ListenOptions, OperationOptions, network_of
from headstart.cli.options import SERVED, ModelOption, takes, takes_settings, typed
from headstart.cli.several import SeveralOptions, several_models
from headstart.cli.top import command as cli_top
from headstart.config import Settings
from headstart.errors import ConfigError, HeadstartError

if TYPE_CHECKING:
    from headstart.serving.runtime import Runtime

SERVE_EPILOG = """
**Examples**

`headstart serve` — the bundled demo model on http://127.0.0.1:8000/v1

`headstart serve qwen.gguf --ctx 32768 --slots 2 --memory-budget 8GiB`

`headstart serve Qwen/Qwen3-0.6B-GGUF:Q8_0` — fetched from Hugging Face's hub, if it is not here

`headstart serve mlx-community/Qwen3-0.6B-4bit` — with MLX (docs/mlx.md)

`headstart serve --models-dir ~/models` — every model in it by name, loaded when first asked for

`headstart serve a=qwen.gguf b=gemma.gguf --keep-loaded 2 --idle-unload 10min`

`headstart serve qwen.gguf --reuse exact` — warm answers are bit-identical to cold ones, or the server does not start

`headstart serve qwen.gguf --host 0.0.0.0 --api-key "$KEY" --log-format json`

`headstart serve qwen.gguf --api-key-file keys.txt --tenant-memory 25%` — tenants share nothing, and none fills the cache

Every option can also be set in the environment, like `HEADSTART_MEMORY_BUDGET=8GiB`.

Options of llama-server work too: `-m`, `-hf`, `-c`, `-np`, `-t`, `-ngl`, `-a`, `--ctx-size`, `--n-gpu-layers`, `--parallel`.
"""

WARM_EPILOG = """
**Examples**

`headstart warm handbook.txt qwen.gguf` — the text is a system message

`headstart warm requests.jsonl qwen.gguf` — chat requests with their tools, one JSON body a line
"""

ROLES = ("system", "user")
"""What a text to warm can be."""


class FleetCommands(DeferredGroup):
    """`headstart fleet`: other commands do not import it."""

    module = "headstart.cli.fleet"


app = typer.Typer(
    name="headstart",
    help="A chat server for local LLMs that never computes the same prompt twice. It has the APIs of OpenAI, Anthropic, Ollama "
    "and llama-server.",
    epilog="Begin with `headstart demo`, then `headstart serve MODEL.gguf`. `headstart doctor` checks your machine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _common(
    show: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog=SERVE_EPILOG)
@takes("operation", OperationOptions)
@takes("several", SeveralOptions)
@takes_settings(*SERVED)
@takes("access", AccessOptions)
@takes("listen", ListenOptions)
def serve(
    context: typer.Context,
    *,
    listen: ListenOptions,
    access: AccessOptions,
    settings: Settings,
    several: SeveralOptions,
    operation: OperationOptions,
) -> None:
    """Serves a model to clients of OpenAI's API (responses, chat completions, completions, models), Anthropic's (messages),
    Ollama's (chat, generate) and llama-server's. Also `/health` and `/metrics`; `/openapi.json` describes all routes.

    Stop it with Ctrl-C or SIGTERM. Running replies get --drain-seconds to end; then they end with an error. A second signal
    stops it at once. Exit code: 0; 130 after a second signal; 2 if the set-up cannot work.
    """
    network, log_format = network_of(listen, access, operation, _notices(), typed(context)), operation.checked_format()
    if operation.no_disk:
        settings = replace(settings, cache_dir=None)
    alias = access.alias or ()
    found = several_models(
        settings, several, alias, lambda text: cli_pull.named(text, _pull_log(log_format)), allow_pull=listen.allow_pull
    )
    names: tuple[str, ...] = ()
    if found is None:
        settings, names = cli_pull.located(settings, _pull_log(log_format))
        _check_files(settings)
    else:
        _check_others(settings)
    with _exit_on_signals():
        if found is None:
            from headstart.api.serve import serve as serve_one

            serve_one(settings, network, alias=(*alias, *names), load=lambda s: _load(s, log_format))
        else:
            from headstart.models.serve import serve as serve_several

            serve_several(found, network)


@app.command()
def demo(
    model: ModelOption = "demo",
    json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
    turns: Annotated[int, typer.Option(min=1, max=10, hidden=True, help="Turns of the first user.")] = 10,
) -> None:
    """Chats with a model over HTTP, with and without reuse, and shows what was computed. It takes about two minutes.

    A user chats for ten turns after a long system prompt, and a second user in between. The first user edits an earlier message
    and regenerates a reply. Then the server is killed (`kill -9`) and started again, and the chat continues.
    """
    from headstart.cli.demo import run

    found = cli_pull.named(model)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else its server would outlive it
    run(model if found is None else str(found.path), turns=turns, as_json=json)


@app.command()
@takes_settings(
    *("model", "ctx", "slots", "threads", "gpu_layers", "kv_type", "chat_template", "lora", "llama_lib", "memory_budget"),
    *("shared", "shared_key_file", "shared_encrypt", "shared_expire"),
)
def doctor(
    settings: Settings,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.0, envvar="HEADSTART_SECONDS", metavar="SECONDS", help="How long to compare warm answers with cold ones."
        ),
    ] = 60.0,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            envvar="HEADSTART_REPORT",
            help="Only print what an issue needs: versions, model facts, settings; no prompts or keys.",
        ),
    ] = False,
) -> None:
    """Shows the abilities of this machine with a model, and checks that a warm answer equals a cold one.

    With --shared, it also says which servers of the fleet can use each other's cache, and what differs between the others.

    It also shows the model's traits: whether its KV can be cut anywhere or it has state, and the size of a checkpoint.

    Exit code 0 if the check passes, 1 if it fails, 2 if the model cannot be used.
    """
    settings, _ = cli_pull.located(settings)
    if report:
        from headstart.cli import report as cli_report

        lines, good = cli_report.report(settings)
        typer.echo("\n".join(f"{topic}: {text}" for topic, text in lines))
        raise typer.Exit(0 if good else 2)
    _check_files(settings)
    from headstart.cli.doctor import examine

    raise typer.Exit(0 if examine(settings, seconds) else 1)


@app.command(epilog=WARM_EPILOG)
@takes_settings(
    *("model", "ctx", "threads", "gpu_layers", "kv_type", "chat_template", "lora", "llama_lib"),
    *("memory_budget", "cache_dir", "disk_budget"),
)
def warm(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A text, the JSON of a chat request, or one a line; `-`: standard input.")
    ],
    role: Annotated[str, typer.Option(metavar="|".join(ROLES), help="Role of a text.", autocompletion=words(ROLES))] = "system",
    salt: Annotated[str, typer.Option(metavar="TEXT", help="The `cache_salt` of its later requests.")] = "",
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the keys of its later requests.")] = None,
    *,
    settings: Settings,
) -> None:
    """Computes and stores prompts ahead of time: a system prompt, tools, a document, a conversation.

    Servers on the same folder find them at once, and later servers too. Give the same options as to the server.
    """
    if role not in ROLES:
        raise ConfigError(f"--role must be {' or '.join(ROLES)}, not {role!r}.")
    settings, _ = cli_pull.located(settings)
    _check_files(settings)
    from headstart.cli.warm import run

    run(file, replace(settings, slots=1), role=role, salt=salt, tenant=tenant)


app.add_typer(cli_cache.app)
app.add_typer(
    typer.Typer(name="fleet", cls=FleetCommands, help="Serves a model with several replicas, on one machine or many.")
)
app.command(epilog=cli_pull.EPILOG)(cli_pull.pull)
app.command()(cli_models.models)
app.command("rm")(cli_models.remove)
app.command(epilog=cli_explain.EPILOG)(cli_explain.explain)
app.command(epilog=cli_stats.EPILOG)(cli_stats.stats)
app.command()(cli_ps.ps)
app.command(epilog=cli_top.EPILOG)(cli_top.top)
app.command(epilog=cli_replay.EPILOG)(cli_replay.replay)
app.command(epilog=cli_install_gpu.EPILOG)(cli_install_gpu.install_gpu)


@app.command()
def version() -> None:
    """Prints the versions of headstart, its engine and Python."""
    import platform
    from importlib.metadata import version as installed

    from headstart.version import __version__

    typer.echo(f"headstart {__version__}")
    typer.echo(f"llama-cpp-python {installed('llama-cpp-python')}")
    typer.echo(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. An error that the user can correct is one line on stderr, with exit code 2."""
    given = sys.argv[1:] if arguments is None else arguments
    take_line(os.environ)
    try:
        if given[:1] != ["serve"] and not completing():  # `serve` writes them to its log
            for notice in _notices():
                _complain(notice, 0)
        with whole_words(os.environ):
            code = app(cli_foreign.translate(given), prog_name="headstart", standalone_mode=False)
    except TyperException as error:
        code = _complain(error.format_message() + _mend(error), error.exit_code)
    except HeadstartError as error:
        code = _complain(error.with_flags, 2 if isinstance(error, ConfigError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    finally:
        if "--install-completion" in given:
            complete_installation()
    sys.exit(code if isinstance(code, int) else 0)


def _notices() -> list[str]:
    """Sentences about environment variables that look like settings, but are not."""
    if not any(name.startswith(cli_foreign.PREFIX) for name in os.environ):
        return []

    def variables(command: Any, deferred: bool) -> Iterator[str]:
        yield from (parameter.envvar for parameter in command.params if isinstance(parameter.envvar, str))
        if deferred or not isinstance(command, DeferredGroup):
            for inner in getattr(command, "commands", {}).values():
                yield from variables(inner, deferred)

    read_elsewhere = {"HEADSTART_STATE_DIR", "HEADSTART_DATA", "HEADSTART_SLOW"}
    read_elsewhere |= {"HEADSTART_SHARED_PASSWORD", "HEADSTART_SHARED_PASSWORD_FILE"}
    root, strange = typer.main.get_command(app), list[str]()
    for deferred in (False, True):  # a group is imported only for variables that no other command has
        strange = cli_foreign.strange_variables(os.environ, read_elsewhere | {*variables(root, deferred)})
        if not strange:
            break
    return strange


def _mend(error: TyperException) -> str:
    """Where to find what an argument lacks; empty if nothing more is to be said."""
    parameter = getattr(error, "param", None)
    lacks_id = getattr(parameter, "name", "") == "identity" and error.format_message().startswith("Missing")
    return " `headstart cache ls` shows ids." if lacks_id else ""


def _complain(message: str, code: int) -> int:
    line = " ".join(message.split())
    if line:  # empty after the help text, which is printed without arguments
        print(f"headstart: {line}", file=sys.stderr)
    return code


def _check_files(settings: Settings) -> None:
    """Finds wrong files before anything is started."""
    from headstart.engines import registry

    registry.check(settings.engine_options())
    _check_others(settings)


def _check_others(settings: Settings) -> None:
    """Finds wrong files beside the model's."""
    from headstart.engines import model_file

    if settings.lora is not None:
        model_file.check(settings.lora, "adapter")
    settings.template()
    if settings.shared is not None:
        from headstart.observe import redaction
        from headstart.serving.runtime import check_shared
        from headstart.tiers.shared.address import secrets

        redaction.hide(secrets())
        check_shared(settings)


def _pull_log(log_format: str) -> cli_pull.Say | None:
    """Log lines about a download, for collectors; None for people."""
    if log_format != "json":
        return None
    from structlog import get_logger

    from headstart.observe import logs

    logs.configure("json")
    log = get_logger("headstart")
    return lambda progress: log.info("fetching", file=progress.file, bytes=progress.done, total_bytes=progress.total)


def _load(settings: Settings, log_format: str) -> Runtime:
    from headstart.cli.console import announce, loading
    from headstart.library.headstart import load
    from headstart.observe.prefill import PrefillLog

    with loading(settings.model) as progress:
        runtime = load(settings, progress).runtime
    runtime.watch(PrefillLog())
    announce(runtime, log_format)
    return runtime


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Before the server runs, signals end the process with code 0; afterwards they are ignored. The server handles its own."""

    def leave(*_: object) -> None:
        raise SystemExit(0)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
