"""Which models a command serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.cli.several import SeveralOptions, several_models
from headstart.config import Settings
from headstart.errors import ConfigError, ModelError
from headstart.hub.folders import Folders
from headstart.hub.record import Fetched, FetchRecord
from headstart.models.naming import ModelNames
from headstart.models.serve import SeveralModels
from model_folders import cached, weights

OWN, OTHER = "Own/Tiny-GGUF", "Own/Other-GGUF"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with two models in Hugging Face's cache, of which headstart has fetched one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HEADSTART_STATE_DIR", str(tmp_path / "state"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    places = Folders.of()
    for repo in (OWN, OTHER):
        blob = (cached(places.hub, repo, {"tiny-Q8_0.gguf": 100}) / "tiny-Q8_0.gguf").resolve()
        if repo == OWN:
            FetchRecord(places.state, places.hub).add(blob.name, Fetched(repo, "tiny-Q8_0.gguf", 100))
    return tmp_path


def served(*models: str, alias: tuple[str, ...] = (), allow_pull: bool = False, **options: Path) -> SeveralModels | None:
    first, *more = models or (Settings().model,)
    given = SeveralOptions(models=more, **options)
    return several_models(Settings(model=first, memory=1 << 30), given, alias, lambda text: None, allow_pull=allow_pull)


def names(several: SeveralModels | None) -> list[str]:
    assert several is not None
    return [model.name for model in several.models]


def test_what_was_fetched_is_served_beside_a_folder_and_where_everybody_may_fetch(home: Path) -> None:
    mine = weights(home / "models" / "mine.gguf")
    found = served(models_dir=mine.parent)
    assert names(found) == ["mine", f"{OWN}:Q8_0"]
    assert found is not None
    assert found.serves_pulled
    assert names(served(str(mine), allow_pull=True)) == ["mine", f"{OWN}:Q8_0"]
    assert names(served(f"a={mine}", allow_pull=True)) == ["a", f"{OWN}:Q8_0"]


def test_the_path_of_a_model_may_have_an_equals_sign(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: `lr=1e-4/m.gguf` was taken for a model `1e-4/m.gguf` with the name `lr`."""
    monkeypatch.chdir(home)
    weights(home / "lr=1e-4" / "m.gguf")
    assert served("lr=1e-4/m.gguf") is None
    assert names(served("a=lr=1e-4/m.gguf")) == ["a"]
    weights(home / "lr=1" / "n.gguf")
    assert names(served("lr=1e-4/m.gguf", "lr=1/n.gguf")) == ["m", "n"]


def test_what_was_fetched_is_not_served_unasked(home: Path) -> None:
    mine = weights(home / "models" / "mine.gguf")
    assert served(str(mine)) is None
    found = served(f"a={mine}")
    assert names(found) == ["a"]
    assert found is not None
    assert not found.serves_pulled


def test_a_folder_without_models_is_refused_unless_something_was_fetched(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = home / "empty"
    empty.mkdir()
    assert names(served(models_dir=empty)) == [f"{OWN}:Q8_0"]
    monkeypatch.setenv("HEADSTART_STATE_DIR", str(home / "other-state"))
    with pytest.raises(ModelError, match="has no"):
        served(models_dir=empty)


def test_a_model_is_served_once_and_the_users_own_names_come_first(home: Path) -> None:
    mine = weights(home / "models" / "tiny-Q8_0.gguf")
    found = served(models_dir=mine.parent, alias=(f"{OWN}=tiny-Q8_0", f"quick={OWN}:q8_0"))
    assert found is not None
    own, pulled = found.models
    assert (own.name, own.file) == ("tiny-Q8_0", str(mine))
    assert OWN in own.aliases
    assert pulled.name == f"{OWN}:Q8_0"
    assert "quick" in pulled.aliases
    assert not {OWN, "tiny-Q8_0"} & {*pulled.aliases}
    assert names(served(f"a={pulled.file}", allow_pull=True)) == ["a"]
    with pytest.raises(ConfigError, match="ALIAS=NAME"):
        served(models_dir=mine.parent, alias=("x=nobody",))


def test_an_alias_without_a_name_is_that_of_the_one_model_of_the_command(home: Path) -> None:
    mine = weights(home / "models" / "mine.gguf")
    for text, expected in ((str(mine), "x"), (f"a={mine}", "a")):
        found = served(text, allow_pull=True, alias=("x", f"quick={OWN}:q8_0"))
        assert found is not None
        own, pulled = found.models
        assert own.name == expected
        assert {"x", "mine"} <= set(own.names)
        assert (pulled.fetched, own.fetched) == (True, False)
        assert "quick" in pulled.aliases
    other = weights(home / "models" / "other.gguf")
    with pytest.raises(ConfigError, match="ALIAS=NAME"):
        served(str(mine), f"b={other}", alias=("x",))


def test_models_of_one_name_have_their_folders_in_theirs(home: Path) -> None:
    """Fault: the second one had the file's name too, as an alias, and the server refused to start."""
    folder, other = home / "models", weights(home / "other" / "x.gguf")
    first, second, third = (weights(folder / name) for name in ("a/x.gguf", "b/X.gguf", "y.gguf"))
    found = served(models_dir=folder)
    assert names(found) == ["x", "b/X", "y", f"{OWN}:Q8_0"]
    assert found is not None
    known = ModelNames(found.models)
    for name, file in (("x", first), ("X.gguf", first), ("b/x", second), (str(second), second), ("y.gguf", third)):
        assert known.find(name).file == str(file)

    assert names(served(f"mine={other}", models_dir=folder))[:3] == ["mine", "a/x", "b/X"]
    weights(folder / "x.gguf")
    found = served(f"mine={other}", models_dir=folder)
    assert names(found)[:5] == ["mine", "a/x", "b/X", "models/x", "y"]
    assert found is not None
    assert ModelNames(found.models).find("x.gguf").file == str(other)
