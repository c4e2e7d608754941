from __future__ import annotations

import pytest

from headstart.errors import ModelError
from headstart.hub.variants import Variant, WeightFile, choose, named, variants

MIB = 1 << 20
FILES = [
    WeightFile("README.md", 9),
    WeightFile("mmproj-model-f16.gguf", 90 * MIB),
    WeightFile("model.mmproj-Q8_0.gguf", 90 * MIB),
    WeightFile("model-imatrix.gguf", 5 * MIB),
    WeightFile("model-Q4_K_M.gguf", 400 * MIB),
    WeightFile("model-Q8_0.gguf", 700 * MIB),
    WeightFile("model-Q2_K.gguf", 200 * MIB),
    WeightFile("BF16/model-BF16-00002-of-00002.gguf", 600 * MIB),
    WeightFile("BF16/model-BF16-00001-of-00002.gguf", 700 * MIB),
    WeightFile("Q6_K/model-00001-of-00002.gguf", 300 * MIB),
]


FOLDER = [
    WeightFile("README.md", 9),
    WeightFile("model.safetensors.index.json", 4),
    WeightFile("tokenizer.json", 3),
    WeightFile("config.json", 2),
    WeightFile("chat_template.jinja", 1),
    WeightFile("onnx/model.safetensors", 1000),
    WeightFile("consolidated.safetensors", 1000),
    WeightFile("modeling_own.py", 1000),
    WeightFile("model-00002-of-00002.safetensors", 20),
    WeightFile("model-00001-of-00002.safetensors", 10),
]


def chosen(wanted: str = "", most: int = 1 << 60) -> Variant:
    return choose("a/b", variants(FILES), wanted, lambda size: size <= most)


def test_parts_go_together_and_other_files_are_passed_over() -> None:
    found = variants(FILES)
    assert [one.label for one in found] == ["BF16", "Q2_K", "Q4_K_M", "Q8_0"]  # of Q6_K a part is missing
    assert [file.path[-22:] for file in found[0].files] == ["BF16-00001-of-00002.gguf"[-22:], "BF16-00002-of-00002.gguf"[-22:]]
    assert found[0].size == 1300 * MIB


@pytest.mark.parametrize(("most", "wanted"), [(1 << 60, "Q4_K_M"), (700 * MIB, "Q4_K_M"), (399 * MIB, "Q2_K")])
def test_the_best_that_fits_is_chosen(most: int, wanted: str) -> None:
    assert chosen(most=most).quantization == wanted


@pytest.mark.parametrize("wanted", ["Q8_0", "q8_0", "model-Q8_0", "MODEL-q8_0.gguf"])
def test_a_name_is_taken_whether_it_fits_or_not(wanted: str) -> None:
    assert chosen(wanted, most=1).quantization == "Q8_0"


@pytest.mark.parametrize("wanted", ["bf16", "model-bf16", "BF16/model-BF16", "BF16/model-BF16-00001-of-00002.gguf"])
def test_a_split_file_has_the_names_of_its_first_part_too(wanted: str) -> None:
    assert chosen(wanted).quantization == "BF16"


def test_the_mark_of_a_mixture_may_be_left_out() -> None:
    there = variants([WeightFile("m-UD-Q4_K_XL.gguf", 1), WeightFile("m-Q4_K_M.gguf", 1)])
    assert [one.quantization for one in named(there, "Q4_K_XL")] == ["UD-Q4_K_XL"]
    assert not named(there, "Q4_K")


def refusal(there: list[WeightFile], wanted: str = "", most: int = 1 << 60) -> str:
    with pytest.raises(ModelError) as error:
        choose("a/b", variants(there), wanted, lambda size: size <= most)
    return str(error.value)


def test_errors_list_what_is_there() -> None:
    listed = "Q2_K (200 MiB), Q4_K_M (400 MiB), Q8_0 (700 MiB), BF16 (1.27 GiB)"
    assert refusal(FILES, "Q5_K_M") == f"a/b has no 'Q5_K_M'; it has {listed}."
    assert listed in refusal(FILES, most=1)
    assert "fits" in refusal(FILES, most=1)
    assert "no .gguf file of a language model" in refusal(FILES[:4])
    two = [WeightFile("x-Q4_0.gguf", 1), WeightFile("y-Q4_0.gguf", 2)]
    assert refusal(two) == "a/b has several models in the same quantisation; give one of a/b:x-Q4_0, a/b:y-Q4_0."
    assert refusal(two, "q4_0") == refusal(two)
    assert choose("a/b", variants(two), "y-q4_0", lambda _: True).stem == "y-Q4_0"


def test_a_folder_is_one_model_without_code_and_other_weights() -> None:
    (found,) = variants(FOLDER)
    assert [file.path for file in found.files] == [
        *("config.json", "chat_template.jinja", "model.safetensors.index.json", "tokenizer.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    ]
    assert (found.form, found.label, found.size) == ("safetensors", "safetensors", 40)
    assert found.answers_to("SafeTensors")
    assert not found.answers_to("config")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"])
def test_a_folder_without_a_file_that_it_needs_is_no_model(missing: str) -> None:
    there = [file for file in FOLDER if file.path != missing]
    assert variants(there) == []
    assert "not all of config.json, tokenizer.json and model*.safetensors" in refusal(there)


def test_gguf_comes_before_safetensors_if_it_fits() -> None:
    both = [*FOLDER, WeightFile("n-Q8_0.gguf", 50), WeightFile("n.gguf", 60)]
    pick = variants(both)
    assert choose("a/b", pick, "", lambda size: True).label == "Q8_0"
    assert choose("a/b", pick, "", lambda size: size < 50).label == "safetensors"
    assert choose("a/b", pick, "safetensors", lambda size: False).form == "safetensors"
