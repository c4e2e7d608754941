"""The command line as a user runs it: in processes of its own."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

import headstart
import tiny
from headstart.cli.foreign import COMMANDS, HINTS, MODEL, MODEL_FILE, SAME, translate
from headstart.cli.main import app
from headstart.engines.llama import LlamaEngine
from headstart.errors import ConfigError
from headstart.observe.prefill import PrefillLog
from headstart.serving.request import Progress, Request
from headstart.tiers.shared.keys import FleetKeys
from headstart.units import parse_size, show_size, show_span, show_time
from process import BUNDLED, Here, run, serving

SMALL = ("--ctx", "512", "--slots", "1", "--threads", "1", "--memory-budget", "16MiB", "--port", "0")
# ── a server ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["tiny", pytest.param("bundled", marks=pytest.mark.slow)])
def test_serves_a_model_and_ends_well(tiny_model: Path, kind: str) -> None:
    """By default `make demo` is what serves the bundled model: see test_demo."""
    model = [] if kind == "bundled" else [str(tiny_model)]
    with serving(*model, *BUNDLED, "--port", "0", "--log-format", "json") as server:
        ready = json.loads(server.line('"ready"'))
        assert (ready["slots"], ready["ctx"], ready["threads"]) == (2, 512, 2)
        assert ready["memory_budget_bytes"] == 256 << 20
        assert ready["memory_budget_tokens"] == (256 << 20) // ready["kv_bytes_per_token"]
        assert ready["disk_budget_bytes"] > ready["disk_blocks"] >= 0
        assert (ready["kv_type"], ready["reuse"]) == ("f16", "fast")
        numbers = ("ctx_train", "weights_bytes", "slots_bytes", "gpu_layers", "block_size", "checkpoint_bytes")
        assert all(isinstance(ready[name], int) for name in numbers)
        url = json.loads(server.line('"listening"'))["url"]
        chat: list[dict[str, str]] = [{"role": "user", "content": "Say hello."}]
        body: dict[str, Any] = {"messages": chat, "max_tokens": 8, "temperature": 0}
        first = httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()
        chat += [first["choices"][0]["message"], {"role": "user", "content": "Again."}]
        second = httpx.post(f"{url}/chat/completions", json=body, timeout=60).json()
        assert second["headstart"]["cached"] >= first["usage"]["prompt_tokens"]
        assert server.end() == 0


def test_environment_keys_and_ctrl_c(tiny_model: Path) -> None:
    environment = {
        "HEADSTART_MODEL": str(tiny_model),
        "HEADSTART_PORT": "0",
        "HEADSTART_CTX": "512",
        "HEADSTART_SLOTS": "2",
        "HEADSTART_THREADS": "1",
        "HEADSTART_MEMORY_BUDGET": "8MiB",
        "HEADSTART_API_KEY": "one two",
        "HEADSTART_ALIAS": "local/coder",
    }
    with serving(**environment) as server:
        assert "2 conversations at a time, 512 tokens each" in server.line("slots")
        assert "8 MiB" in server.line("cache")
        url = server.line("listening").split("url=")[1].split()[0]
        for key, status in (("one", 200), ("two", 200), ("three", 401)):
            models = httpx.get(f"{url}/models", headers={"authorization": f"Bearer {key}"})
            assert models.status_code == status
            assert status == 401 or models.json()["data"][0]["id"] == "local/coder"
        assert server.end(signal.SIGINT) == 0


# ── one line that names the remedy, and exit code 2 ────────────────────────────────────────────────────────────────────


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("headstart: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "mend"), [(["no-such.gguf"], "give the path of a .gguf file"), ([*SMALL, "--ctx", "2000000000"], "--ctx")]
)
def test_what_a_user_can_mend(arguments: list[str], mend: str, tiny_model: Path) -> None:
    model = [str(tiny_model)] if arguments[0].startswith("-") else []
    assert mend in complaint(run("serve", *model, *arguments))


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        ([*SMALL, "--host", "192.0.2.1"], "--host"),
        (["."], "give the path of a .gguf file"),
        (["--memory-budget", "4XB"], "4GiB"),
        (["--cors", "localhost:3000"], "--cors must be an origin like http://localhost:3000"),
        (["--cors", "http://localhost:3000/"], "--cors must be an origin like http://localhost:3000"),
        (["--api-key", ""], "--api-key"),
        (["--no-such-option"], "--no-such-option"),
        (["--api-key-file", "no-such.keys"], "No such file or directory"),
        ([__file__], "download it as .gguf"),
        (["--memory-budget", "-1"], "4GiB"),
        (["--memory-budget", "9" * 400], "more than any machine"),
        (["--stall", "inf"], "--stall"),
        (["--port", "70000"], "'--port'"),
        (["--slots", "0"], "'--slots'"),
        (["--kv-type", "q2"], "f16 or bf16 or q8_0"),
        (["--reuse", "perhaps"], "fast or exact"),
        (["--log-format", "xml"], "console or json"),
        (["-hff", "gemma.gguf"], "-hff needs -hf"),
        (["-mu", "https://example.com/gemma.gguf"], "give OWNER/NAME of its repository"),
        (["--flash-attn=on"], "leave it out: headstart always does that"),
        (["-ctk", "q8_0"], "--kv-type"),
        (["-c"], "-c needs a value"),
        (["-np", "0"], "'--slots'"),
        (["--lora", "no-such.gguf"], "There is no adapter 'no-such.gguf'; give the path of its .gguf file."),
        (["--chat-template", "no-such.jinja"], "No such file or directory"),
        ([*SMALL, "--chat-template", "no-such.jinja"], "--chat-template"),
        (["--shared", "valkey://localhost"], "--shared-key-file"),
        (["--shared", "valkey://localhost", "--shared-key-file", "no-such.key"], "headstart fleet keygen no-such.key"),
    ],
)
def test_what_a_user_can_mend_before_anything_is_started(arguments: list[str], mend: str, tiny_model: Path, here: Here) -> None:
    model = [str(tiny_model)] if arguments[0].startswith("-") else []
    assert mend in complaint(here("serve", *model, *arguments))


@pytest.mark.parametrize(
    "command",
    [
        *(("serve", model) for model in ("~nosuch/m.gguf", "x" * 300)),
        *(("doctor", model) for model in ("~nosuch/m.gguf", "x" * 300)),
        *(("rm", model) for model in ("~nosuch/m.gguf", "x" * 300)),
        ("serve", "--models-dir", "~nosuch/x"),
        ("stats", "--unix-socket", "~nosuch/x"),
        ("explain", "--port", "1", "x" * 300),
        ("serve", "--models-dir", "x" * 300),
        ("cache", "ls", "--cache-dir", "x" * 300),
        ("fleet", "keygen", f"{'x' * 300}/k"),
        ("replay", "x" * 300),
        ("doctor", "--llama-lib", "x" * 300),
    ],
    ids=range(14),
)
def test_what_can_be_no_path_is_no_traceback(command: tuple[str, ...], here: Here) -> None:
    found = here(*command)
    assert found.returncode == 2, found.stdout + found.stderr
    assert "Traceback" not in found.stderr
    assert "headstart: " in found.stderr


@pytest.mark.parametrize("command", ["replay", "explain", "warm"])
def test_a_file_that_is_nested_too_deeply_is_no_traceback(command: str, tmp_path: Path, here: Here) -> None:
    (file := tmp_path / "deep.json").write_text("[" * 100_000)
    found = here(command, str(file), *([str(file)] if command == "explain" else []))
    assert found.returncode == 2, found.stdout + found.stderr
    assert "nested too deeply" in found.stderr
    assert "Traceback" not in found.stderr


def test_options_of_llama_server() -> None:
    typed = "serve -m a.gguf -c 4096 -ngl 99 -np=2 --ctx-size=512 --n-gpu-layers 3 --port 1 -- -m"
    ours = "serve a.gguf --ctx 4096 --gpu-layers 99 --slots 2 --ctx 512 --gpu-layers 3 --port 1 -- -m"
    assert translate(typed.split()) == ours.split()
    assert translate("serve --ssl-cert-file a --ssl-key-file b".split()) == "serve --tls-cert a --tls-key b".split()
    assert translate("serve -c 0 -ngl auto -a x -a y".split()) == "serve --alias x --alias y".split()
    assert translate("serve -ngl all --gpu-layers 7".split()) == "serve --gpu-layers -1 --gpu-layers 7".split()
    assert translate("serve -c 9 -hf o/n:Q8_0".split()) == "serve o/n:Q8_0 --ctx 9".split()
    assert translate("serve --hf-repo o/n --hf-file a/b.gguf".split()) == "serve o/n:a/b.gguf".split()
    for other in ([], ["cache", "-m"], ["doctor", "-c", "5"], ["--help"]):
        assert translate(other) == other
    commands: Any = typer.main.get_command(app)
    for command in COMMANDS:
        options = {option for parameter in commands.commands[command].params for option in parameter.opts}
        assert not options & {*SAME, *HINTS}, "an option of our own means what it says"
        assert options >= {*SAME.values()} - {MODEL, MODEL_FILE}


def test_variables_that_nothing_reads_are_named_and_one_thread_is_one_thread(tiny_model: Path, here: Here) -> None:
    strange = {"HEADSTART_CTXX": "7", "HEADSTART_ZZZZ": "1"}
    told = here("cache", "ls", **strange).stderr.splitlines()
    assert told[0] == "headstart: There is no variable HEADSTART_CTXX: did you mean HEADSTART_CTX?"
    assert told[1].startswith("headstart: There is no variable HEADSTART_ZZZZ: it has no effect")
    assert "There is no variable" not in here("cache", "ls").stderr
    foreign = ("-m", str(tiny_model), "-c", "512", "-np", "1", "-t", "1", "--port", "0", "--no-disk")
    with serving(*foreign, **strange) as server:
        server.line("listening")
        (warned,) = [line for line in server.lines if "HEADSTART_CTXX" in line]
        said = "".join(server.lines)
    assert "[warning" in warned
    assert "1 conversation at a time, 512 tokens each" in said
    assert "1 thread\n" in said
    assert not re.search(r"\b1 (threads|conversations|blocks|tokens)\b", said)


def test_every_variable_that_is_read_is_known(here: Here) -> None:
    """What the code reads from the environment is no typing error of the user."""
    source = Path(headstart.__file__).parent
    read = {name for path in source.rglob("*.py") for name in re.findall(r'"(HEADSTART_[A-Z_]+)"', path.read_text("utf-8"))}
    assert {"HEADSTART_API_KEY", "HEADSTART_SHARED_PASSWORD"} <= read
    assert "There is no variable" not in here("version", **dict.fromkeys(read, "1")).stderr


@pytest.mark.parametrize("url", ["ftp://host", "valkey://:hush-hush-hush@host", "s3://"])
def test_a_wrong_address_of_the_shared_store_is_said_before_the_model_is_loaded(
    url: str, tiny_model: Path, tmp_path: Path, here: Here
) -> None:
    FleetKeys.generate().save(tmp_path / "fleet.key")
    said = complaint(here("serve", str(tiny_model), *SMALL, "--shared", url, "--shared-key-file", str(tmp_path / "fleet.key")))
    assert "address" in said
    assert "hush" not in said


@pytest.mark.parametrize("name", ["HEADSTART_SHARED_PASSWORD", pytest.param("AWS_SECRET_ACCESS_KEY", marks=pytest.mark.slow)])
def test_secrets_of_the_shared_store_are_not_logged(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """The second line of defence: here a folder has the secret in its name, and the log names the folder."""
    (tmp_path / "store").mkdir()
    FleetKeys.generate().save(tmp_path / "fleet.key")
    shared = ("--shared", (tmp_path / "store").as_uri(), "--shared-key-file", str(tmp_path / "fleet.key"))
    folder = ("--cache-dir", str(tmp_path / "hush-hush-hush"), "--log-format", "json")
    with serving(str(tiny_model), *SMALL, *shared, *folder, **{name: "hush-hush-hush"}) as server:
        server.line("listening")
        assert server.end() == 0
        log = "".join(server.rest())
    assert "hush" not in log
    assert "[key]" in log


def test_a_broken_file(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:200_000])
    assert "download it again" in complaint(run("serve", str(broken), *SMALL))


def test_a_port_in_use(tiny_model: Path, here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another with --port" in complaint(here("serve", str(tiny_model), *SMALL, "--port", port))


def test_exact_reuse_is_refused_where_it_is_not_proved(tiny_model: Path) -> None:
    code = f"""
from headstart.cli.main import main
from headstart.testing.fake_engine import FakeEngine
from headstart.engines.llama import LlamaEngine
LlamaEngine.load = classmethod(lambda cls, options, progress=None, anew=False: FakeEngine(canonical=False))
main(["serve", {str(tiny_model)!r}, "--reuse", "exact", "--port", "0"])
"""
    assert "use --reuse fast" in complaint(run(code=code))


@pytest.mark.parametrize(("every", "seconds"), [(1, "0"), pytest.param(3, "5", marks=pytest.mark.slow)])
def test_doctor_fails_where_rows_do_not_survive(
    tiny_model: Path, every: int, seconds: str, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks can fail: some bytes of what is restored are changed; the long one finds what the first does not meet."""
    load = LlamaEngine.load

    def spoil(options: Any, **more: Any) -> LlamaEngine:
        engine = load(options, **more)
        inner, times = engine.import_kv, []

        def import_kv(slot: int, segments: Any) -> None:
            times.append(slot)
            for segment in segments[:1] if len(times) % every == 0 else ():
                segment.data[::997] ^= 1
            inner(slot, segments)

        monkeypatch.setattr(engine, "import_kv", import_kv)
        return engine

    monkeypatch.setattr(LlamaEngine, "load", spoil)
    options = ("--ctx", "512", "--threads", "1", "--memory-budget", "16MiB", "--seconds", seconds)
    result = here("doctor", str(tiny_model), *options)
    assert result.returncode == 1, result.stderr
    assert "check failed" in result.stdout


# ── the other commands ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["llama", pytest.param("lfm2", marks=pytest.mark.slow), "mamba2"])
def test_doctor(kind: str, tmp_path: Path, here: Here) -> None:
    model = tiny.write(tmp_path / "model.gguf", kind)
    options = ("--ctx", "512", "--slots", "2", "--threads", "1", "--memory-budget", "16MiB", "--seconds", "1")
    result = here("doctor", str(model), *options, COLUMNS="300")
    assert result.returncode == 0, result.stdout + result.stderr
    for topic in ("machine", "instructions", "model", "slots", "traits", "proof", "--reuse exact", "warm = cold"):
        assert topic in result.stdout
    assert ("keys and values" in result.stdout) is (kind != "mamba2")
    assert ("checkpoints" in result.stdout) is (kind != "llama")
    assert re.search(r"blocks, calls +blocks of 64 tokens; calls of up to 512", result.stdout)
    assert "equal to the last bit after restoring 192 tokens" in result.stdout
    assert re.search(
        r"[1-9]\d* prompts compared with cold runs, [1-9][\d,]* of their tokens from the cache: equal", result.stdout
    )


def test_doctor_proves_what_an_earlier_load_has_proved(tiny_model: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(options: Any, progress: Any = None, anew: bool = False) -> None:
        raise ConfigError(f"anew is {anew}")

    monkeypatch.setattr(LlamaEngine, "load", load)
    assert "anew is True" in complaint(here("doctor", str(tiny_model)))


def test_version(here: Here) -> None:
    result = run("version")
    assert result.stdout == here("--version").stdout
    assert result.returncode == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["headstart", "llama-cpp-python", "Python"]


def test_help_is_light() -> None:
    heavy = ("fastapi", "headstart.library", "jinja2", "llama_cpp", "numpy", "pydantic", "uvicorn")
    code = f"import sys, headstart.cli.main; print([name for name in {heavy} if name in sys.modules])"
    assert run(code=code).stdout == "[]\n"


def test_every_option_is_in_the_environment_and_explained() -> None:
    commands: Any = typer.main.get_command(app)
    for command in ("serve", "doctor"):
        for parameter in commands.commands[command].params:
            if parameter.name != "help":
                assert parameter.envvar == "HEADSTART_" + parameter.opts[0].removeprefix("--").replace("-", "_").upper()
                assert parameter.help
    options = {option for parameter in commands.commands["serve"].params for option in parameter.opts}
    assert options >= {
        *("--host", "--port", "--ctx", "--slots", "--threads", "--gpu-layers", "--kv-type", "--chat-template", "--lora"),
        *("--memory-budget", "--reuse", "--overflow", "--api-key", "--log-format", "--queue", "--stall"),
    }


def test_the_help_of_serve_names_all_that_is_served() -> None:
    commands: Any = typer.main.get_command(app)
    openai = ("responses", "chat completions", "completions", "models")
    for name in (*openai, "Anthropic's (messages)", "Ollama's", "llama-server's"):
        assert name in commands.commands["serve"].help


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("512 MiB", 512 << 20),
        ("2G", 2 << 30),
        ("1.5g", 3 << 29),
        ("2kb", 2000),
        ("3GB", 3_000_000_000),
        ("1000000", 1_000_000),
        ("12B", 12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4XB", "-1", "GiB", "4iB", "1e9", "nan", "4 Gi B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_sizes_as_shown() -> None:
    assert [show_size(size) for size in (12, 23_040, 96_576_768, 4 << 30, 5 << 40)] == [
        *("12 B", "22.5 KiB", "92.1 MiB", "4 GiB", "5,120 GiB")
    ]
    assert [show_size(size) for size in (999, 1000, 1023, 1023 << 10, 999.7 * 2**30)] == [
        *("999 B", "1,000 B", "1,023 B", "1,023 KiB", "1,000 GiB")
    ]


def test_times_as_shown() -> None:
    assert [show_time(seconds) for seconds in (0.1234, 60, 604_800, 98_765, 1234.5, 61)] == [
        *("0.123 s", "1 min", "1 w", "98,765 s", "1,234 s", "61 s")
    ]


def test_spans_as_shown() -> None:
    seconds = (0.2, 59.4, 60, 5400, 86_400 * 2.4)
    assert [show_span(one) for one in seconds] == ["0 s", "59 s", "1 min", "2 h", "2 d"]


@given(st.floats(0, 1e15))
def test_no_size_or_time_is_shown_with_an_exponent(value: float) -> None:
    assert "e" not in show_size(max(1.0, value))
    assert "e+" not in show_time(value)


def test_a_long_prefill_is_logged_at_intervals() -> None:
    now, lines = 0.0, []

    class Log:
        def info(self, event: str, **fields: Any) -> None:
            lines.append((now, event, fields))

    tell = PrefillLog(Log(), lambda: now)(Request.__new__(Request))
    for second in range(1, 14):
        now = float(second)
        tell(Progress(done=100 + 50 * second, total=1000, cached=100))
    assert [time for time, *_ in lines] == [3.0, 8.0, 13.0]
    assert lines[1][1:] == (
        "prefill",
        {"done": 500, "total": 1000, "cached": 100, "percent": 50, "tokens_per_s": 50, "seconds_left": 10},
    )
