"""`headstart models` and `headstart rm`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import headstart
from headstart.cli.main import main
from headstart.cli.models import print_models
from headstart.hub.pull import pull
from hub_server import HubRepo, HubServer, hub_server
from model_folders import in_ollama

NAME = "Own/Tiny-GGUF"


@pytest.fixture(scope="module")
def running_hub() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def fetched(running_hub: HubServer, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a model that headstart has fetched, for a user who has nothing else."""
    running_hub.repos[NAME] = HubRepo({"tiny-F16.gguf": tiny_model.read_bytes()})
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LLAMA_CACHE", "HF_TOKEN", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folders = {"HOME": "home", "HF_HOME": "hf", "HEADSTART_STATE_DIR": "state", "HEADSTART_CACHE_DIR": "cache"}
    folders["OLLAMA_MODELS"] = "ollama"
    for name, folder in folders.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("HF_ENDPOINT", running_hub.url)
    return pull(NAME).path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_list(fetched: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    in_ollama(tmp_path / "ollama", "registry.ollama.ai/library/llama3.2/1b", [("model", "ab" * 32)])
    with fetched.open("rb"):
        assert run("models", "--json") == 0
    found = {model["name"]: model for model in json.loads(capfd.readouterr().out)["models"]}
    assert set(found) == {"demo", "llama3.2:1b", f"{NAME}:F16"}
    own = found[f"{NAME}:F16"]
    assert (own["source"], own["bytes"], own["files"]) == ("headstart", fetched.stat().st_size, [str(fetched)])
    assert own["ctx"] == own["fits_ctx"] > 0
    assert [user["pid"] for user in own["used_by"]] == [os.getpid()]
    assert found["llama3.2:1b"]["used_by"] == []
    assert found["llama3.2:1b"]["ctx"] is None  # its file is no whole GGUF
    assert run("models") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split("\t")[:4] == ["name", "size", "quantisation", "context"]
    assert f"{NAME}:F16" in "".join(lines)


def test_on_a_terminal_names_are_whole_and_empty_columns_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    name = "owner/a-long-name-of-a-model-GGUF:Q4_K_M"
    print_models([(name, "3 MiB", "Q4_K_M", "8,192", "yes", "", "", "headstart"), ("b", "", "", "", "no", "", "", "Ollama")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "size", "quantisation", "context", "fits", "from"]
    assert lines[1].startswith(f"{name}  3 MiB  Q4_K_M ")
    assert lines[2].index("Ollama") == lines[0].index("from")


def test_removing_says_what_goes_and_asks(fetched: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("rm", NAME) == 2
    said = capfd.readouterr().err
    assert f"Delete {NAME}:F16, " in said
    assert "fetched by headstart?" in said
    assert "Give --yes" in said
    assert fetched.exists()
    for name, why in (
        ("demo", "belongs to a package"),
        ("nobody/nothing", "is not on this machine"),
        ("nope", "nope is not on this machine; `headstart models` lists those that are."),
        (str(fetched), "your own"),
    ):
        assert run("rm", "--yes", name) == 2
        assert why in capfd.readouterr().err
    with fetched.open("rb"):
        assert run("rm", "--yes", NAME) == 2
    assert "is in use by" in capfd.readouterr().err
    assert run("rm", "--yes", NAME) == 0
    assert not fetched.exists()


@pytest.mark.slow
def test_conversations_go_only_if_that_is_said(fetched: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"ctx": 512, "slots": 1, "threads": 1, "memory_budget": 16 << 20}
    text = "Once upon a time there was a long prompt. " * 8
    for _ in range(2):
        with headstart.open(NAME, **options) as hs:
            report = hs.chat(text, max_tokens=1).report
        capfd.readouterr()
        run("models", "--json")
        (own,) = (model for model in json.loads(capfd.readouterr().out)["models"] if model["name"] == f"{NAME}:F16")
        assert own["conversations"] == 1
        assert own["conversation_bytes"] > 0
        assert run("rm", "--yes", NAME) == 0
        pull(NAME)
    assert report.cached > 0  # the conversation has waited for its model
    assert run("rm", "--yes", "--conversations", NAME) == 0
    assert "of conversations" in capfd.readouterr().out
    assert not [path for path in (tmp_path / "cache" / "objects").rglob("*") if path.is_file()]
