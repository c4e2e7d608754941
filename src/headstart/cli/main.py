"""Command line. Heavy imports are inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import typer.main
from typer.exceptions import TyperException

from headstart.cli import cache as cli_cache
from headstart.cli import explain as cli_explain
from headstart.cli import foreign as cli_foreign
from headstart.cli import replay as cli_replay
from headstart.cli.options import (
    CACHE,
    NETWORK,
    OPERATION,
    Alias,
    ApiKeyFile,
    Budget,
    CacheDir,
    ChatTemplateOption,
    Cors,
    Ctx,
    DiskBudget,
    Expire,
    GpuLayers,
    Host,
    Isolate,
    KeepNoise,
    Kv,
    Lora,
    MinP,
    ModelOption,
    PortOption,
    ReuseMode,
    Slots,
    Temperature,
    TenantDisk,
    TenantMemory,
    Threads,
    TlsCert,
    TlsKey,
    TopK,
    TopP,
    UnixSocketMode,
    UnixSocketOption,
)
from headstart.config import KvType, Overflow, Reuse, Settings, Switch, default_cache_dir
from headstart.errors import ConfigError, HeadstartError

if TYPE_CHECKING:
    from headstart.observe.logs import LogFormat
    from headstart.serving.runtime import Runtime

SERVE_EPILOG = """
**Examples**

`headstart serve` — the bundled demo model on http://127.0.0.1:8000/v1

`headstart serve qwen.gguf --ctx 32768 --slots 2 --memory-budget 8GiB`

`headstart serve qwen.gguf --reuse exact` — warm answers with the very bits of cold ones, or no start

`headstart serve qwen.gguf --host 0.0.0.0 --api-key "$KEY" --log-format json`

`headstart serve qwen.gguf --api-key-file keys.txt --tenant-memory 25%` — tenants share nothing, and none floods the cache

Every option can also be set in the environment, like `HEADSTART_MEMORY_BUDGET=8GiB`.

llama-server's names of options work too: `-m`, `-c`, `-np`, `-t`, `-ngl`, `-a`, `--ctx-size`, `--n-gpu-layers`, `--parallel`.
"""

WARM_EPILOG = """
**Examples**

`headstart warm handbook.txt qwen.gguf` — the text is a system message

`headstart warm requests.jsonl qwen.gguf` — bodies of chat requests, with their tools, one a line
"""

app = typer.Typer(
    name="headstart",
    help="A chat server for local LLMs that never computes the same prompt twice.",
    epilog="Begin with `headstart demo`, then `headstart serve MODEL.gguf`; what your machine can do: `headstart doctor`.",
    no_args_is_help=True,
    add_completion=False,
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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the versions and end.")
    ] = False,
) -> None:
    pass


@app.command(epilog=SERVE_EPILOG)
def serve(
    model: ModelOption = "demo",
    host: Host = None,
    port: PortOption = None,
    unix_socket: UnixSocketOption = None,
    unix_socket_mode: UnixSocketMode = cast(int, "600"),  # noqa: B008  (typer parses defaults too)
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="HEADSTART_API_KEY",
            metavar="KEY",
            rich_help_panel=NETWORK,
            help="Key that requests must send; give the option again for more keys (in the environment: between spaces).",
            show_default="none: open",
        ),
    ] = None,
    api_key_file: ApiKeyFile = None,
    isolate: Isolate = None,
    alias: Alias = None,
    cors: Cors = None,
    keep_noise: KeepNoise = None,
    tenant_memory: TenantMemory = cast(float, "100%"),  # noqa: B008
    tenant_disk: TenantDisk = cast(float, "100%"),  # noqa: B008
    expire: Expire = None,
    ctx: Ctx = None,
    slots: Slots = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    kv_type: Kv = "f16",
    chat_template: ChatTemplateOption = None,
    lora: Lora = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    memory_budget: Budget = None,
    cache_dir: CacheDir = None,
    disk_budget: DiskBudget = cast(int, "20GiB"),  # noqa: B008
    no_disk: Annotated[
        bool, typer.Option("--no-disk", envvar="HEADSTART_NO_DISK", rich_help_panel=CACHE, help="Store nothing on disk.")
    ] = False,
    reuse: ReuseMode = "fast",
    overflow: Annotated[
        str,
        typer.Option(
            envvar="HEADSTART_OVERFLOW",
            metavar="error|slide",
            rich_help_panel=CACHE,
            help="For a conversation longer than --ctx: `error` refuses it; `slide` drops its oldest exchanges and says so.",
        ),
    ] = "error",
    queue: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="HEADSTART_QUEUE",
            metavar="N",
            rich_help_panel=OPERATION,
            help="Requests that may wait; further ones get a 429.",
        ),
    ] = 64,
    settle: Annotated[
        str,
        typer.Option(
            envvar="HEADSTART_SETTLE",
            metavar="on|off",
            rich_help_panel=CACHE,
            help="When idle, prefill finished turns in the form of the next request, which then computes its new message only.",
        ),
    ] = "on",
    explain: Annotated[
        str,
        typer.Option(
            envvar="HEADSTART_EXPLAIN",
            metavar="on|off",
            rich_help_panel=OPERATION,
            help="Keep the latest requests in memory, to explain why later ones recompute tokens.",
        ),
    ] = "on",
    stall: Annotated[
        float,
        typer.Option(
            envvar="HEADSTART_STALL",
            metavar="SECONDS",
            rich_help_panel=OPERATION,
            help="Longest pause of a running reply while another prompt is computed.",
        ),
    ] = 0.25,
    drain_seconds: Annotated[
        float,
        typer.Option(
            envvar="HEADSTART_DRAIN_SECONDS",
            metavar="SECONDS",
            rich_help_panel=OPERATION,
            help="Longest time to stop: running replies continue for four fifths of it, the rest is for the disk.",
        ),
    ] = 10.0,
    log_format: Annotated[
        str,
        typer.Option(
            envvar="HEADSTART_LOG_FORMAT",
            metavar="console|json",
            rich_help_panel=OPERATION,
            help="Lines for people, or JSON objects for collectors. They go to stderr.",
        ),
    ] = "console",
) -> None:
    """Serves a model to clients of OpenAI's API (responses, chat completions, completions, models), Anthropic's (messages) and
    llama-server's. Also `/health` and `/metrics`; `/openapi.json` describes all routes.

    Stop it with Ctrl-C or SIGTERM. Running replies get --drain-seconds to end; then they end with an error. A second signal
    stops it at once. Exit code: 0; 130 after a second signal; 2 if the set-up cannot work.
    """
    if log_format not in ("console", "json"):
        raise ConfigError(f"--log-format must be console or json, not {log_format!r}.")
    if unix_socket is not None and (host is not None or port is not None):
        raise ConfigError("--unix-socket takes the place of --host and --port: leave them out, HEADSTART_HOST and _PORT too.")
    settings = Settings(
        model=model,
        ctx=ctx,
        slots=slots,
        threads=threads,
        gpu_layers=gpu_layers,
        kv_type=cast("KvType", kv_type),
        chat_template=chat_template,
        lora=lora,
        memory_budget=memory_budget,
        cache_dir=None if no_disk else cache_dir or default_cache_dir(),
        disk_budget=disk_budget,
        tenant_memory=tenant_memory,
        tenant_disk=tenant_disk,
        expire=expire,
        drain=drain_seconds,
        reuse=cast("Reuse", reuse),
        settle=cast("Switch", settle),
        explain=cast("Switch", explain),
        overflow=cast("Overflow", overflow),
        queue=queue,
        stall=stall,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    _check_files(settings)
    with _exit_on_signals():
        from headstart.api.serve import serve as run

        run(
            settings,
            host or "127.0.0.1",
            8000 if port is None else port,
            tuple(api_key or ()),
            cast("LogFormat", log_format),
            notices=_notices(),
            unix_socket=unix_socket,
            unix_socket_mode=unix_socket_mode,
            tls_cert=tls_cert,
            tls_key=tls_key,
            key_file=api_key_file,
            isolate=isolate,
            alias=alias or (),
            cors=cors or (),
            keep_noise=keep_noise or (),
            load=lambda s: _load(s, log_format),
        )


@app.command()
def demo(
    model: ModelOption = "demo",
    json: Annotated[bool, typer.Option("--json", help="Print data instead of a table.")] = False,
    turns: Annotated[int, typer.Option(min=1, max=10, hidden=True, help="Turns of the first user.")] = 10,
) -> None:
    """Chats with a model over HTTP, with and without reuse, and shows what was computed: about two minutes of work.

    A ten-turn chat behind a long system prompt, a second user in between, an edit of an earlier message, a regeneration;
    then the server is killed (`kill -9`) and started again, and the chat goes on.
    """
    from headstart.cli.demo import run

    run(model, turns=turns, as_json=json)


@app.command()
def doctor(
    model: ModelOption = "demo",
    ctx: Ctx = None,
    slots: Slots = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    kv_type: Kv = "f16",
    chat_template: ChatTemplateOption = None,
    lora: Lora = None,
    memory_budget: Budget = None,
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
            help="Print what an issue needs instead: versions, model facts, settings; no prompts or keys.",
        ),
    ] = False,
) -> None:
    """Shows the abilities of this machine with a model, and checks that a warm answer equals a cold one.

    It also shows the model's traits: whether its KV can be cut anywhere or it has state, and the size of a checkpoint.

    Exit code 0 if the check passes, 1 if it fails, 2 if the model cannot be used.
    """
    settings = Settings(
        model=model,
        ctx=ctx,
        slots=slots,
        threads=threads,
        gpu_layers=gpu_layers,
        kv_type=cast("KvType", kv_type),
        chat_template=chat_template,
        lora=lora,
        memory_budget=memory_budget,
    )
    if report:
        from headstart.cli import report as cli_report

        lines, good = cli_report.report(settings)
        typer.echo("\n".join(f"{topic}: {text}" for topic, text in lines))
        raise typer.Exit(0 if good else 2)
    _check_files(settings)
    from headstart.cli.doctor import examine

    raise typer.Exit(0 if examine(settings, seconds) else 1)


@app.command(epilog=WARM_EPILOG)
def warm(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A text, the JSON of a chat request, or one a line; `-`: standard input.")
    ],
    model: ModelOption = "demo",
    role: Annotated[str, typer.Option(metavar="system|user", help="Role of a text.")] = "system",
    salt: Annotated[str, typer.Option(metavar="TEXT", help="The `cache_salt` of its later requests.")] = "",
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the keys of its later requests.")] = None,
    ctx: Ctx = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    kv_type: Kv = "f16",
    chat_template: ChatTemplateOption = None,
    lora: Lora = None,
    memory_budget: Budget = None,
    cache_dir: CacheDir = None,
    disk_budget: DiskBudget = cast(int, "20GiB"),  # noqa: B008
) -> None:
    """Computes and stores prompts ahead of time: a system prompt, tools, a document, a conversation.

    Servers on the same folder find them at once, and later servers too. Give the same options as to the server.
    """
    if role not in ("system", "user"):
        raise ConfigError(f"--role must be system or user, not {role!r}.")
    settings = Settings(
        model=model,
        ctx=ctx,
        slots=1,
        threads=threads,
        gpu_layers=gpu_layers,
        kv_type=cast("KvType", kv_type),
        chat_template=chat_template,
        lora=lora,
        memory_budget=memory_budget,
        cache_dir=cache_dir or default_cache_dir(),
        disk_budget=disk_budget,
    )
    _check_files(settings)
    from headstart.cli.warm import run

    run(file, settings, role=role, salt=salt, tenant=tenant)


app.add_typer(cli_cache.app)
app.command(epilog=cli_explain.EPILOG)(cli_explain.explain)
app.command(epilog=cli_replay.EPILOG)(cli_replay.replay)


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
    """Runs the command line; whatever a user can mend is one line on stderr and exit code 2."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given[:1] != ["serve"]:  # which says it in its log
            for notice in _notices():
                _complain(notice, 0)
        code = app(cli_foreign.translate(given), standalone_mode=False)
    except TyperException as error:
        code = _complain(error.format_message(), error.exit_code)
    except HeadstartError as error:
        code = _complain(error.with_flags, 2 if isinstance(error, ConfigError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _notices() -> list[str]:
    """What in the environment looks like a setting, and is none."""
    if not any(name.startswith(cli_foreign.PREFIX) for name in os.environ):
        return []

    def variables(command: Any) -> Iterator[str]:
        yield from (parameter.envvar for parameter in command.params if isinstance(parameter.envvar, str))
        for inner in getattr(command, "commands", {}).values():
            yield from variables(inner)

    read_elsewhere = {"HEADSTART_STATE_DIR", "HEADSTART_DATA", "HEADSTART_SLOW"}
    return cli_foreign.strange_variables(os.environ, read_elsewhere | {*variables(typer.main.get_command(app))})


def _complain(message: str, code: int) -> int:
    line = " ".join(message.split())
    if line:  # without arguments the help was printed, and there is nothing to add
        print(f"headstart: {line}", file=sys.stderr)
    return code


def _check_files(settings: Settings) -> None:
    """Finds what is plainly wrong before anything is started."""
    from headstart.engines.llama import file as llama_file

    llama_file.locate(settings.model)
    if settings.lora is not None:
        llama_file.check(settings.lora, "adapter")
    settings.template()


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
    """The server handles signals while it runs. Before that they end the process, and so well; afterwards it is ending."""

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
