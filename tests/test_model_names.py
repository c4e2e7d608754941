"""Names that people type: of models and their files, on the command line and to a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from gguf import GGUFReader, GGUFWriter

from headstart.api.auth import Keys
from headstart.config import Settings
from headstart.engines import model_file
from headstart.errors import ModelError
from headstart.model_names import model_name, model_names, same
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import serving
from process import Here
from process import serving as starting

SMALL = ("--ctx", "512", "--slots", "1", "--threads", "1", "--memory-budget", "16MiB", "--port", "0", "--no-disk")


SNAPSHOT = f"hub/models--mlx-community--Qwen3-4B-4bit/snapshots/{'0a' * 20}"


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("demo", ["demo"]),
        ("/models/qwen.gguf", ["qwen", "qwen.gguf", "/models/qwen.gguf"]),
        ("Qwen2.5-7B.Q4_K_M.GGUF", ["Qwen2.5-7B.Q4_K_M", "Qwen2.5-7B.Q4_K_M.GGUF"]),
        ("m/x-00001-of-00003.gguf", ["x", "x-00001-of-00003", "x-00001-of-00003.gguf", "m/x-00001-of-00003.gguf"]),
        ("x-00001-of-00003.GGUF", ["x", "x-00001-of-00003", "x-00001-of-00003.GGUF"]),
        ("x-00001-of-00003", ["x-00001-of-00003"]),
        ("x-1-of-3.gguf", ["x-1-of-3", "x-1-of-3.gguf"]),
        ("/blobs/sha256-0a1b", ["sha256-0a1b", "/blobs/sha256-0a1b"]),
        ("/m/Qwen3-4B-4bit", ["Qwen3-4B-4bit", "/m/Qwen3-4B-4bit"]),
        (SNAPSHOT, ["Qwen3-4B-4bit", SNAPSHOT]),
    ],
)
def test_what_a_model_is_called(model: str, names: list[str]) -> None:
    assert list(model_names(model)) == names
    assert model_name(model) == names[0]


def test_case_makes_no_difference() -> None:
    assert same("Qwen/STRASSE", "qwen/straße")
    assert not same("qwen", "qwen2")


def split(model: Path, folder: Path, parts: int = 2) -> list[Path]:
    """The model in several files, as llama-gguf-split writes them."""
    reader = GGUFReader(model)
    found = []
    for number in range(parts):
        path = folder / f"Tiny-{number + 1:05d}-of-{parts:05d}.gguf"
        writer = GGUFWriter(path, "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.name"):
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found.append(path)
    return found


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[Path]:
    return split(tiny_model, tmp_path_factory.mktemp("split"))


def test_a_model_in_parts_is_served_under_its_own_name(parts: list[Path]) -> None:
    with starting(str(parts[0]), *SMALL) as server:
        assert "Tiny (" in server.line("  model ")
        url = server.line("listening").split("url=")[1].split()[0]
        (card,) = httpx.get(f"{url}/models").json()["data"]
        assert card["id"] == "Tiny"
        assert card["aliases"] == ["Tiny", "Tiny-00001-of-00002", "Tiny-00001-of-00002.gguf"]
        for name in (*card["aliases"], str(parts[0]), "TINY", "tiny-00001-of-00002.GGUF"):
            answer = httpx.post(f"{url}/completions", json={"model": name, "prompt": "a", "max_tokens": 1}, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "Tiny"
        assert httpx.post(f"{url}/completions", json={"model": "Tiny-00002-of-00002", "prompt": "a"}).status_code == 404
        assert httpx.get(f"{url[:-3]}/props").json()["model_path"] == str(parts[0])
        assert server.end() == 0


def test_what_is_given_in_place_of_the_first_part(parts: list[Path]) -> None:
    with pytest.raises(ModelError, match=r"is part 2 of 2 of a model; give its first part, 'Tiny-00001-of-00002\.gguf'"):
        model_file.parts(model_file.locate(str(parts[1])))
    for wrong in ("Tiny.gguf", "Tiny-00001-of-00003.gguf"):
        with pytest.raises(ModelError, match=r"did you mean '.*Tiny-00001-of-00002\.gguf'"):
            model_file.locate(str(parts[0].with_name(wrong)))


def test_several_aliases(tiny_model: Path, here: Here) -> None:
    with starting(str(tiny_model), *SMALL, "--alias", "Local/Coder", "--alias", "gpt-oss-120b") as server:
        url = server.line("listening").split("url=")[1].split()[0]
        (card,) = httpx.get(f"{url}/models").json()["data"]
        assert card["id"] == "Local/Coder"
        assert card["aliases"] == ["Local/Coder", "gpt-oss-120b", "tiny-llama", "tiny-llama.gguf"]
        for name in ("local/coder", "GPT-OSS-120B", "Tiny-Llama"):
            assert httpx.get(f"{url}/models/{name}").json()["id"] == "Local/Coder"
        assert server.end() == 0
    result = here("serve", str(tiny_model), *SMALL, "--alias", " ")
    assert result.returncode == 2
    assert "--alias" in result.stderr


# ── where files lie ──────────────────────────────────────────────────────────────────────────────────────────────────


def everywhere(http: httpx.Client) -> dict[str, str]:
    """What each route that reads says, and what some faults are answered with."""
    paths = "/ /health /props /v1/models /v1/models/fake /openapi.json /docs /nope /slots /metrics /headstart/explain".split()
    told = {path: http.get(path).text for path in paths}
    for body in ({}, {"messages": "x"}, {"model": "other"}, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}):
        told[str(body)] = http.post("/v1/chat/completions", json=body).text
    return told


@pytest.mark.parametrize("several", [True, False])
def test_only_the_operator_is_told_where_files_lie(several: bool, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("operator = chef\nalice = a\n")
    keys.chmod(0o600)
    engine = FakeEngine()
    engine.facts.details.update(path="/secret/place/model.gguf", lora="/secret/place/style.gguf")
    settings = Settings(model="/secret/place/model.gguf", memory_budget=1 << 20)
    given: Any = Keys((), keys) if several else ()
    key, also = "chef" if several else "", model_names(settings.model)
    with Runtime(lambda: engine, settings) as rt, serving(rt, key=key, api_keys=given, aliases=also) as server:
        assert server.http.get("/props").json()["model_path"] == "/secret/place/model.gguf"
        headers = {"authorization": "Bearer a"} if several else {}
        with httpx.Client(base_url=server.url, headers=headers) as http:
            told = everywhere(http)
            assert (http.get("/props").json()["model_path"] == "model.gguf") is several
            assert http.get("/v1/models").json()["data"][0]["meta"]["lora"] == "style.gguf"
            assert "model.gguf" in told["/v1/models"]
            if not several:
                told.pop("/props")
        for what, text in told.items():
            assert "/secret" not in text, what


def test_why_a_model_could_not_be_loaded_is_for_the_log_where_there_are_keys() -> None:
    def load() -> Runtime:
        raise ModelError("There is no model '/secret/x.gguf'")

    with serving(load, wait=False, api_keys=["k"]) as server:
        while (health := server.http.get("/health")).json()["error"]["message"] == "Loading model":
            pass
        asked = server.http.get("/v1/models", headers={"x-api-key": "k"})
        for answer in (health, asked):
            assert answer.status_code == 503
            assert "the server's log says why" in answer.json()["error"]["message"]
            assert "/secret" not in answer.text
