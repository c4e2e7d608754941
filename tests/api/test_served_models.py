"""Which models a server has, and which one a name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.api.served_models import OneModel
from headstart.config import Settings
from headstart.errors import NotFound
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine


def test_a_model_has_its_names_with_and_without_a_tag() -> None:
    models = OneModel("Mine", ("other", "/srv/models/mine.gguf"), lambda: None)
    for name in ("mine", "MINE:latest", "other:Latest", "/srv/models/mine.gguf", None, "", "claude-opus-4-1"):
        assert models.find(name).id == "Mine"
    for name in ("mine:q8_0", "llama3", "latest"):
        with pytest.raises(NotFound, match="the served one is 'Mine'"):
            models.find(name)
        assert models.named(name) is None
    assert models.named("claude-opus-4-1") is None


def test_a_name_may_have_its_hub_before_it() -> None:
    models = OneModel("Own/Tiny-GGUF:Q8_0", ("Own/Tiny-GGUF", "Own/Tiny-GGUF:tiny-Q8_0"), lambda: None)
    for name in ("hf.co/own/tiny-gguf:latest", "https://huggingface.co/Own/Tiny-GGUF:q8_0", "Own/Tiny-GGUF:tiny-Q8_0.gguf"):
        assert models.find(name).id == "Own/Tiny-GGUF:Q8_0"
    assert models.named("hf.co/Own/Other-GGUF") is None


def test_a_model_is_described_once_it_is_loaded(tmp_path: Path) -> None:
    loaded: list[Runtime] = []
    models = OneModel(None, ("alias", "/srv/x.gguf"), lambda: loaded[0] if loaded else None)
    (loading,) = models.all()
    assert (loading.id, loading.state, loading.ctx, loading.size) == ("", "loading", None, None)
    engine = FakeEngine(ctx=512)
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    engine.facts.details.update(path=str(file), weights_bytes=1000, gpus=["a"], gpu_layers=3, layers=12, lora="/srv/ab.gguf")
    with Runtime(lambda: engine, Settings(model="/srv/x.gguf", memory_budget=1 << 20)) as runtime:
        loaded.append(runtime)
        (model,) = models.all()
        assert models.find(None) is model
        assert (model.id, model.state, model.ctx, model.aliases) == ("fake", "loaded", 512, ("alias",))
        assert (model.size, model.device_size, model.modified) == (1000, 250, file.stat().st_mtime)
        assert model.digest == engine.fingerprint.hex()
        assert model.facts["lora"] == "ab.gguf"
        assert "/srv" not in str(model.facts)
