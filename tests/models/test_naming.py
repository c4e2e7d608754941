from __future__ import annotations

import pytest

from headstart.errors import ConfigError, NotFound
from headstart.models.naming import ModelNames, NamedModel, aliased, claimed, joined, split_name

QWEN = NamedModel("qwen", "/m/qwen.gguf", 10, ("small", "/m/qwen.gguf"))
GEMMA = NamedModel("Gemma", "/m/gemma.gguf", 20)
NAMES = ModelNames([QWEN, GEMMA])


@pytest.mark.parametrize("name", ["qwen", "QWEN", "small", "/m/qwen.gguf", "qwen:latest", None, "gpt-4o", "claude-opus-4"])
def test_a_request_means_the_model_with_that_name_or_else_the_default(name: str | None) -> None:
    assert NAMES.find(name) is QWEN


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(NotFound, match="'llama' is not served here; served are 'qwen', 'Gemma'"):
        NAMES.find("llama")


def test_the_default_may_be_any_model() -> None:
    assert ModelNames([QWEN, GEMMA], "gemma").find(None) is GEMMA
    with pytest.raises(ConfigError, match="--default-model x is not served"):
        ModelNames([QWEN], "x")


def test_two_models_need_two_names() -> None:
    with pytest.raises(ConfigError, match="Two models have the name"):
        ModelNames([QWEN, NamedModel("Qwen", "other.gguf", 1)])
    with pytest.raises(ConfigError, match="alias 'small' means both"):
        ModelNames([QWEN, NamedModel("other", "other.gguf", 1, ("small",))])


def test_of_models_that_join_others_the_free_names_count() -> None:
    late = NamedModel("o/n:Q8_0", "new.gguf", 1, ("o/n", "small", "new.gguf"))
    later = NamedModel("o/n:Q4_0", "newer.gguf", 1, ("o/n",))
    taken = NamedModel("GEMMA", "other.gguf", 1)
    names = ModelNames(joined([QWEN, GEMMA], [late, taken, later]))
    assert [model.name for model in names.models] == ["qwen", "Gemma", "o/n:Q8_0", "o/n:Q4_0"]
    assert names.models[2].aliases == ("o/n", "new.gguf")
    assert names.models[3].aliases == ()
    assert names.find("small") is QWEN


@pytest.mark.parametrize("name", ["o/n", "hf.co/o/n", "https://huggingface.co/o/n:q8_0", "O/N:latest", "hf.co/o/n:new.gguf"])
def test_a_name_may_have_its_hub_before_it(name: str) -> None:
    model = NamedModel("o/n:Q8_0", "/m/new.gguf", 1, ("o/n", "o/n:new"))
    assert ModelNames([QWEN, model]).find(name) is model


def test_a_name_wins_over_an_alias() -> None:
    other = NamedModel("other", "o.gguf", 1, ("gemma",))
    assert ModelNames([other, GEMMA]).find("gemma") is GEMMA


def test_the_id_of_a_response_names_its_model() -> None:
    assert NAMES.of_id(f"resp_{GEMMA.tag}0123") is GEMMA
    assert NAMES.of_id("resp_ffffffff0123") is None
    assert NAMES.of_id("") is None


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("qwen", ("qwen", "")),
        ("Gemma/v1/models", ("Gemma", "/v1/models")),
        ("gemmas/v1", None),
        ("/m/qwen.gguf/x", ("qwen", "/x")),
    ],
)
def test_a_path_may_begin_with_a_name(path: str, found: tuple[str, str] | None) -> None:
    model = NAMES.below(path)
    assert (model and (model[0].name, model[1])) == found


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a=b.gguf", ("a", "b.gguf")),
        ("owner/name=b.gguf", ("owner/name", "b.gguf")),
        ("b.gguf", ("", "b.gguf")),
        ("/folder/x=y.gguf", ("", "/folder/x=y.gguf")),
        ("a=/folder/x=y.gguf", ("a", "/folder/x=y.gguf")),
    ],
)
def test_a_name_stands_before_its_file(text: str, parts: tuple[str, str]) -> None:
    assert split_name(text) == parts


def test_aliases_name_their_model() -> None:
    models = aliased([QWEN, GEMMA], ["g=gemma", "g2=Gemma"])
    assert [model.aliases for model in models] == [QWEN.aliases, ("g", "g2")]
    for wrong in ("g", "=gemma", "g=nobody"):
        with pytest.raises(ConfigError, match="ALIAS=NAME"):
            aliased([GEMMA], [wrong])


def test_a_model_is_added_without_names_that_are_taken() -> None:
    first = ModelNames([NamedModel("a", "a.gguf", 1, ("x",)), NamedModel("b", "b.gguf", 1)], "b")
    added = first.added(NamedModel("Own/c", "c.gguf", 1, ("A", "x", "c")))
    assert [model.name for model in added.models] == ["a", "b", "Own/c"]
    assert added.default.name == "b"
    assert added.models[-1].aliases == ("c",)
    assert [added.find(name).name for name in ("x", "c", "own/C")] == ["a", "Own/c", "Own/c"]
    assert first.named("c") is None
    for taken in ("B", "x"):
        with pytest.raises(ConfigError, match="is taken"):
            first.added(NamedModel(taken, "d.gguf", 1))


def test_a_fetched_file_cannot_take_the_requests_of_others() -> None:
    names = ModelNames([QWEN]).added(claimed(NamedModel("Own/x:gpt-4o", "gpt-4o.gguf", 1, ("Own/x", "gpt-4o", "gpt-4o.gguf"))))
    assert names.models[-1].aliases == ("Own/x",)
    assert [names.find(name) for name in ("gpt-4o", "claude-sonnet-4")] == [QWEN, QWEN]
    assert names.find("own/x").file == "gpt-4o.gguf"
