from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headstart.errors import ModelError
from headstart.hub.folders import Folders
from headstart.hub.names import find, local_models, look_up
from model_folders import cached, folders, in_ollama, weights

DIGEST = "ab" * 32


@pytest.fixture
def places(tmp_path: Path) -> Folders:
    """One repository in two programs' folders, with different quantisations, and models of each program."""
    found = folders(tmp_path)
    cached(found.hub, "Own/Tiny-GGUF", {"tiny-Q8_0.gguf": 80, "tiny-Q4_K_M.gguf": 40})
    weights(found.lm_studio[0] / "Own/Tiny-GGUF/tiny-Q8_0.gguf", 81)
    weights(found.lm_studio[0] / "Own/Tiny-GGUF/tiny-Q6_K.gguf", 60)
    weights(found.llama_cpp[0] / "other_m_m-Q4_0.gguf", 30)
    in_ollama(found.ollama[0], "registry.ollama.ai/library/llama3.2/latest", [("model", DIGEST)])
    in_ollama(found.ollama[0], "registry.ollama.ai/library/llama3.2/1b", [("model", DIGEST)])
    return found


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("Own/Tiny-GGUF:Q8_0", "Own/Tiny-GGUF:Q8_0", "Hugging Face"),
        ("own/tiny-gguf:q8_0", "Own/Tiny-GGUF:Q8_0", "Hugging Face"),
        ("hf.co/Own/Tiny-GGUF:Q6_K", "Own/Tiny-GGUF:Q6_K", "LM Studio"),
        ("Own/Tiny-GGUF:tiny-Q6_K.gguf", "Own/Tiny-GGUF:Q6_K", "LM Studio"),
        ("Own/Tiny-GGUF", "Own/Tiny-GGUF:Q4_K_M", "Hugging Face"),
        ("other/m", "other_m_m-Q4_0", "llama.cpp"),
        ("other/m:Q4_0", "other_m_m-Q4_0", "llama.cpp"),
        ("other_m_m-Q4_0", "other_m_m-Q4_0", "llama.cpp"),
        ("demo", "demo", "bundled"),
        ("Demo", "demo", "bundled"),
        ("llama3.2", "llama3.2:latest", "Ollama"),
        ("llama3.2:1B", "llama3.2:1b", "Ollama"),
        ("tiny-q6_k", "Own/Tiny-GGUF:Q6_K", "LM Studio"),
    ],
)
def test_a_name_finds_its_model(text: str, name: str, source: str, places: Folders) -> None:
    found = find(text, places, lambda size: True)
    assert (found.name, found.source) == (name, source)


def test_every_listed_name_finds_its_model(places: Folders) -> None:
    listed = [model for model in local_models(places) if model.source != "bundled"]
    assert len(listed) == 7
    for model in listed:
        twin = (model.name, model.source) == ("Own/Tiny-GGUF:Q8_0", "LM Studio")
        assert (find(model.name, places) == model) is not twin


def test_the_best_of_those_here_that_fits(places: Folders) -> None:
    assert find("Own/Tiny-GGUF", places, lambda size: size > 40).quantization == "Q6_K"
    with pytest.raises(ModelError, match=r"fits into .* Q4_K_M \(40 B\), Q6_K \(60 B\), Q8_0 \(80 B\)"):
        find("Own/Tiny-GGUF", places, lambda size: False)
    assert find("other/m", places, lambda size: False).quantization == "Q4_0"  # the only one


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights(tmp_path / "a-00001-of-00002.gguf", 5)
    second = weights(tmp_path / "a-00002-of-00002.gguf", 6)
    found = find(str(first), folders(tmp_path))
    assert (found.name, found.paths, found.source, found.size) == (str(first), (first, second), "path", 11)
    assert found.names == ()
    weights(tmp_path / "own" / "file")
    monkeypatch.chdir(tmp_path)
    assert find("own/file", folders(tmp_path)).path == Path("own/file")  # a file that is there comes before a repository


def test_what_is_not_here(places: Folders) -> None:
    assert look_up("Own/Tiny-GGUF:Q2_K", places) is None
    assert look_up("nobody/nothing", places) is None
    with pytest.raises(ModelError, match="`headstart pull nobody/nothing` fetches it"):
        find("nobody/nothing", places)
    with pytest.raises(ModelError, match=r"There is no model 'nowhere\.gguf'"):
        look_up("nowhere.gguf", places)
    with pytest.raises(ModelError, match=r"did you mean 'llama3\.2:1b'"):
        look_up("lama3.2:1b", places)
    with pytest.raises(ModelError, match="`headstart models` lists"):
        look_up("zzz", places)


def test_finding_loads_no_engine_and_no_client() -> None:
    code = "import sys, headstart.hub.names as n; n.local_models(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "headstart.hub.finders" in loaded
    assert not {"huggingface_hub", "httpx2", "llama_cpp", "numpy", "rich"} & set(loaded)
