from __future__ import annotations

import json
from pathlib import Path

import pytest

from headstart.hub.folders import Folders
from headstart.paths import default_state_dir


def test_other_programs_folders_by_default(tmp_path: Path) -> None:
    found = Folders.of({"HOME": str(tmp_path)}, tmp_path / "state")
    assert found.hub == tmp_path / ".cache/huggingface/hub"
    assert found.lm_studio == (tmp_path / ".lmstudio/models", tmp_path / ".cache/lm-studio/models")
    assert found.llama_cpp[0] == tmp_path / ".cache/llama.cpp"
    assert found.ollama[0] == tmp_path / ".ollama/models"
    assert found.state == tmp_path / "state"


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HUGGINGFACE_HUB_CACHE": "~/c"}, "/home/u/c"),
    ],
)
def test_the_hubs_cache_is_where_its_own_programs_look(variables: dict[str, str], wanted: str) -> None:
    assert str(Folders.of({"HOME": "/home/u"} | variables, Path("/s")).hub) == wanted


def test_the_folder_for_state_is_that_of_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: `~` in the variable meant a folder of that name, where the record of fetched models was not found again."""
    monkeypatch.setenv("HOME", "/home/jo")
    monkeypatch.setenv("HEADSTART_STATE_DIR", "~/state")
    assert Folders.of().state == default_state_dir() == Path("/home/jo/state")
    assert Folders.of({"HOME": "/home/jo", "HEADSTART_STATE_DIR": "/s"}).state == Path("/s")


def test_variables_of_the_other_programs() -> None:
    found = Folders.of({"HOME": "/h", "LLAMA_CACHE": "/l", "OLLAMA_MODELS": "/o"}, Path("/s"))
    assert (found.llama_cpp, found.ollama) == ((Path("/l"),), (Path("/o"),))


@pytest.mark.parametrize("settings", ["", "[]", "{", '{"downloadsFolder": 3}', "[" * 100_000])
def test_settings_that_cannot_be_read_change_nothing(settings: str, tmp_path: Path) -> None:
    (tmp_path / ".lmstudio").mkdir()
    (tmp_path / ".lmstudio/settings.json").write_text(settings)
    assert Folders.of({"HOME": str(tmp_path)}, tmp_path).lm_studio[0] == tmp_path / ".lmstudio/models"


def test_the_folder_that_lm_studio_was_told_to_use(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".lmstudio-home-pointer").write_text(f"{tmp_path / 'elsewhere'}\n")
    (tmp_path / "elsewhere/settings.json").write_text(json.dumps({"downloadsFolder": "/big/models"}))
    assert Folders.of({"HOME": str(tmp_path)}, tmp_path).lm_studio[:2] == (Path("/big/models"), tmp_path / "elsewhere/models")
