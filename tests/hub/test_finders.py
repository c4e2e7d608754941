from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from headstart.hub.finders import hugging_face, in_folder, llama_cpp, lm_studio, ollama, pulled
from headstart.hub.record import Fetched, FetchRecord
from model_folders import COMMIT, cached, folders, hf_files, hf_folder, in_ollama, weights

DIGEST = "ab" * 32


def test_hugging_faces_cache(tmp_path: Path) -> None:
    places = folders(tmp_path)
    parts = {"BF16/n-BF16-00001-of-00002.gguf": 20, "BF16/n-BF16-00002-of-00002.gguf": 21}
    files = {"n-Q4_K_M.gguf": 10, **parts, "mmproj-n.gguf": 5}
    snapshot = cached(places.hub, "o/n", files)
    found = {model.name: model for model in hugging_face(places)}
    assert {name: model.size for name, model in found.items()} == {"o/n:Q4_K_M": 10, "o/n:BF16": 41}
    assert found["o/n:BF16"].paths == tuple(snapshot / name for name in parts)
    assert {model.source for model in found.values()} == {"Hugging Face"}
    assert found["o/n:Q4_K_M"].names == ("o/n:Q4_K_M", "o/n", "o/n:n-Q4_K_M")


def test_what_headstart_has_fetched_is_told_from_what_others_have(tmp_path: Path) -> None:
    places = folders(tmp_path)
    snapshot = cached(places.hub, "o/n", {"n-Q4_0.gguf": 10, "n-Q8_0.gguf": 11})
    FetchRecord(places.state, places.hub).add((snapshot / "n-Q4_0.gguf").resolve().name, Fetched("o/n", "n-Q4_0.gguf", 10))
    assert {model.name: model.source for model in hugging_face(places)} == {
        "o/n:Q4_0": "headstart",
        "o/n:Q8_0": "Hugging Face",
    }


def test_what_headstart_was_asked_to_fetch_is_found_in_the_order_in_which_it_came(tmp_path: Path) -> None:
    places = folders(tmp_path)
    record = FetchRecord(places.state, places.hub)
    for repo, when, own in (("o/late", 2e9, True), ("o/early", 1e9, False), ("o/other", 1e9, None)):
        blob = (cached(places.hub, repo, {"n-Q8_0.gguf": 10}) / "n-Q8_0.gguf").resolve()
        os.utime(blob, (when, when))
        if own is not None:
            record.add(blob.name, Fetched(repo, "n-Q8_0.gguf", 10, own=own))
    assert [(model.name, model.source) for model in pulled(places)] == [
        ("o/early:Q8_0", "Hugging Face"),
        ("o/late:Q8_0", "headstart"),
    ]


def test_the_main_branch_comes_before_other_commits(tmp_path: Path) -> None:
    places = folders(tmp_path)
    cached(places.hub, "o/n", {"n-Q4_0.gguf": 10, "n-Q8_0.gguf": 30})
    later = cached(places.hub, "o/n", {"n-Q4_0.gguf": 20}, "f" + COMMIT[1:], main=False)
    os.utime(later, (2e9, 2e9))
    assert {model.name: model.size for model in hugging_face(places)} == {"o/n:Q4_0": 10, "o/n:Q8_0": 30}


def test_what_is_unfinished_or_no_repository_is_passed_over(tmp_path: Path) -> None:
    places = folders(tmp_path)
    snapshot = cached(places.hub, "o/n", {"n-Q4_0.gguf": 10})
    (snapshot / "n-Q4_0.gguf").resolve().unlink()
    for odd in ("models--gpt2", "models--..--n", "models--a--b--c", "datasets--o--n"):
        weights(places.hub / odd / "snapshots" / COMMIT / "n-Q4_0.gguf")
    weights(places.hub / "models--o--m" / "snapshots" / "not-a-commit" / "n-Q4_0.gguf")
    (places.hub / "models--o--x").write_text("")
    assert [model.name for model in hugging_face(places)] == []


def test_two_models_of_one_quantisation_are_named_by_their_files(tmp_path: Path) -> None:
    places = folders(tmp_path)
    cached(places.hub, "o/n", {"a-Q4_0.gguf": 1, "b-Q4_0.gguf": 2, "c.gguf": 3})
    assert [model.name for model in hugging_face(places)] == ["o/n:a-Q4_0", "o/n:b-Q4_0", "o/n:c"]


def test_lm_studio(tmp_path: Path) -> None:
    places = folders(tmp_path)
    path = weights(places.lm_studio[0] / "o" / "n" / "n-Q8_0.gguf", 7)
    weights(places.lm_studio[0] / "o" / "n" / "mmproj-n.gguf")
    (found,) = lm_studio(places)
    assert (found.name, found.paths, found.source, found.size) == ("o/n:Q8_0", (path,), "LM Studio", 7)


def test_llama_cpp(tmp_path: Path) -> None:
    places = folders(tmp_path)
    root = places.llama_cpp[0]
    weights(root / "my_org_some_n_n-Q8_0.gguf", 7)
    weights(root / "other_m_m-Q4_0.gguf", 8)
    weights(root / "half.gguf.downloadInProgress")
    (root / "manifest=my_org=some_n=latest.json").write_text("{}")
    found = {model.name: model for model in llama_cpp(places)}
    assert {name: model.repo for name, model in found.items()} == {"my_org/some_n:Q8_0": "my_org/some_n", "other_m_m-Q4_0": ""}


def test_ollama(tmp_path: Path) -> None:
    places = folders(tmp_path)
    root = places.ollama[0]
    blob = in_ollama(root, "registry.ollama.ai/library/llama3.2/1b", [("model", DIGEST), ("params", "cd" * 32)], 9)
    in_ollama(root, "registry.ollama.ai/me/mine/8b-q4_K_M", [("model", DIGEST)])
    in_ollama(root, "hf.co/o/n/Q8_0", [("model", DIGEST), ("projector", "cd" * 32)])
    found = {model.name: model for model in ollama(places)}
    assert list(found) == ["hf.co/o/n:Q8_0", "llama3.2:1b", "me/mine:8b-q4_K_M"]
    assert found["llama3.2:1b"].paths == (blob,)
    assert (found["hf.co/o/n:Q8_0"].repo, found["hf.co/o/n:Q8_0"].quantization) == ("o/n", "Q8_0")
    assert found["me/mine:8b-q4_K_M"].quantization == "Q4_K_M"


@pytest.mark.parametrize("digest", ["../../../etc/passwd", "../" + "a" * 61, "", "AB" * 32])
def test_no_manifest_leads_out_of_ollamas_blobs(digest: str, tmp_path: Path) -> None:
    places = folders(tmp_path)
    root = places.ollama[0]
    (root / "blobs").mkdir(parents=True)
    manifest = root / "manifests/registry.ollama.ai/library/n/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:' + digest + '"}]}')
    assert [*ollama(places)] == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": 3}', '{"layers": [3]}', '{"layers": [{}]}', "[" * 100_000])
def test_broken_manifests_are_passed_over(text: str, tmp_path: Path) -> None:
    places = folders(tmp_path)
    manifest = places.ollama[0] / "manifests/registry.ollama.ai/library/n/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(text)
    assert [*ollama(places)] == []


def test_what_is_no_single_file_for_ollama_is_passed_over(tmp_path: Path) -> None:
    root = folders(tmp_path).ollama[0]
    in_ollama(root, "registry.ollama.ai/library/tuned/latest", [("model", DIGEST), ("adapter", "cd" * 32)])
    in_ollama(root, "registry.ollama.ai/library/split/latest", [("model", DIGEST), ("model", "cd" * 32)])
    assert [*ollama(folders(tmp_path))] == []


def test_a_folder_of_the_users_own(tmp_path: Path) -> None:
    weights(tmp_path / "big-00002-of-00002.gguf", 6)
    first = weights(tmp_path / "big-00001-of-00002.gguf", 5)
    inner = weights(tmp_path / "sub" / "small-Q4_0.gguf", 4)
    weights(tmp_path / "mmproj.gguf")
    found = in_folder(tmp_path)
    assert [(model.name, model.path, model.size) for model in found] == [("big", first, 11), ("small-Q4_0", inner, 4)]
    assert in_folder(tmp_path / "nowhere") == []


# ── folders in Hugging Face's form ───────────────────────────────────────────────────────────────────────────────────


def in_hub(hub: Path, repo: str, **config: object) -> Path:
    """A repository in Hugging Face's form in its cache. Returns the snapshot."""
    files = hf_files(**config)
    snapshot = cached(hub, repo, {name: len(data) for name, data in files.items()})
    for name, data in files.items():
        (snapshot / name).resolve().write_bytes(data)
    return snapshot


def test_a_snapshot_is_a_model_if_it_writes_text(tmp_path: Path) -> None:
    places = folders(tmp_path)
    snapshot = in_hub(places.hub, "o/n")
    in_hub(places.hub, "o/embeds", architectures=["BertModel"])
    in_hub(places.hub, "o/hears", architectures=["WhisperForConditionalGeneration"], is_encoder_decoder=True)
    (in_hub(places.hub, "o/broken") / "config.json").resolve().write_text("[" * 100_000)
    (in_hub(places.hub, "o/partial") / "model-00002-of-00002.safetensors").resolve().unlink()
    (found,) = hugging_face(places)
    assert (found.name, found.path, found.form, found.source) == ("o/n", snapshot, "safetensors", "Hugging Face")
    assert {path.name for path in found.paths} == {*hf_files()} - {"README.md", "code.py"}
    assert found.names == ("o/n",)


def test_where_a_repository_has_both_forms_names_say_which(tmp_path: Path) -> None:
    places = folders(tmp_path)
    weights(in_hub(places.hub, "o/n") / "n-Q4_0.gguf")
    assert [model.name for model in hugging_face(places)] == ["o/n:Q4_0", "o/n:safetensors"]


def test_weights_that_headstart_has_fetched_make_a_model_its_own(tmp_path: Path) -> None:
    places = folders(tmp_path)
    snapshot = in_hub(places.hub, "o/n")
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        FetchRecord(places.state, places.hub).add((snapshot / name).resolve().name, Fetched("o/n", name, 10))
    assert [model.source for model in hugging_face(places)] == ["headstart"]


def test_lm_studio_has_folders_too(tmp_path: Path) -> None:
    places = folders(tmp_path)
    folder = hf_folder(places.lm_studio[0] / "mlx-community" / "n-4bit")
    (found,) = lm_studio(places)
    assert (found.name, found.path, found.source) == ("mlx-community/n-4bit", folder, "LM Studio")


def test_folders_in_a_folder_of_the_users_own(tmp_path: Path) -> None:
    root = tmp_path / "models"
    small = weights(root / "small-Q4_0.gguf", 4)
    inner, other = hf_folder(root / "org" / "n-4bit"), hf_folder(tmp_path / "elsewhere" / "m")
    hf_folder(root / "embeds", architectures=["BertModel"])
    (root / "linked").symlink_to(other)
    found = {model.name: model for model in in_folder(root)}
    assert {name: model.path for name, model in found.items()} == {
        "small-Q4_0": small,
        "n-4bit": inner,
        "linked": root / "linked",
    }
    assert {model.name for model in in_folder(inner)} == {"n-4bit"}


def test_what_may_not_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a folder that this user may not enter, like `lost+found`, ended every command that looks for models."""
    places = folders(tmp_path)
    root = places.lm_studio[0]
    weights(root / "o" / "n" / "n-Q8_0.gguf")
    (root / "o" / "closed").mkdir()
    (root / "lost+found").mkdir()
    stat = os.stat

    def refusing(path: Any, *rest: Any, **more: Any) -> os.stat_result:
        if any(one in str(path) for one in ("lost+found/", "o/closed")):  # tests may run as root, who may enter all folders
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *rest, **more)

    monkeypatch.setattr(os, "stat", refusing)
    assert [model.name for model in lm_studio(places)] == ["o/n:Q8_0"]
    assert [model.name for model in in_folder(root)] == ["n-Q8_0"]
