"""Variants: the files of a repository that together are one model in one form, and the choice among them. Pure.

A repository has GGUF files, each a model in one quantisation, or one model in Hugging Face's form (`SAFETENSORS`), or both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from headstart.errors import ModelError
from headstart.hub.quantization import preference, quantization_of
from headstart.model_names import SPLIT, model_name
from headstart.units import show_size

ModelForm = Literal["gguf", "safetensors"]
"""`gguf`: files for llama.cpp. `safetensors`: a folder in Hugging Face's form, for MLX."""
SAFETENSORS: ModelForm = "safetensors"
"""Also the name of such a variant: `OWNER/NAME:safetensors`."""

_WEIGHTS = re.compile(r"model[^/]*\.safetensors")
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.safetensors$)")
_SETTINGS = re.compile(r"[^/]+\.(?:json|jinja)")
_NEEDED = ("config.json", "tokenizer.json")
_BESIDE = re.compile(r"(?:^|[-_.])(?:mmproj|imatrix)(?=$|[-_.])", re.IGNORECASE)
"""Files that are no language model: what sees images, and statistics for quantising."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of a repository.

    Attributes:
        path: its path in the repository, with `/`.
        size: its bytes.
        digest: the hash under which the hub has its content, in hexadecimal digits; "" if unknown.
    """

    path: str
    size: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Variant:
    """One model in one quantisation.

    Attributes:
        stem: the path of its file without suffix and part number.
        quantization: as the name says it; "" if it does not.
        files: its files. Of a GGUF the first part, which llama.cpp opens, is first; of a folder `config.json`.
        form: what its files are.
    """

    stem: str
    quantization: str
    files: tuple[WeightFile, ...]
    form: ModelForm = "gguf"

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.files)

    @property
    def label(self) -> str:
        """What tells it from the other variants of most repositories."""
        return self.quantization or self.stem

    def answers_to(self, wanted: str) -> bool:
        """Whether `wanted` names this variant: its quantisation, or its file. Case is ignored."""
        if self.form == SAFETENSORS:
            return wanted.casefold() == SAFETENSORS
        named = wanted.casefold().removesuffix(".gguf")
        paths = (self.stem, self.files[0].path.rpartition(".")[0])
        names = [self.quantization, *paths, *(PurePosixPath(path).name for path in paths)]
        return named in (name.casefold() for name in names if name)


def variants(files: Iterable[WeightFile]) -> list[Variant]:
    """The complete variants among the files of one repository, in the order of their names. Other files are passed over."""
    files = list(files)
    return [*_gguf(files), *_folder(files)]


def is_weights(path: str) -> bool:
    """Whether a file of a folder in Hugging Face's form has weights."""
    return _WEIGHTS.fullmatch(path) is not None


def _folder(files: Iterable[WeightFile]) -> list[Variant]:
    """The model in Hugging Face's form, if all that it needs is there: config, tokenizer and each part of the weights."""
    settings = {file.path: file for file in files if _SETTINGS.fullmatch(file.path)}
    weights = sorted((file for file in files if is_weights(file.path)), key=lambda file: file.path)
    parts: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for file in weights:
        if part := _PART.search(file.path):
            parts[file.path[: part.start()], int(part[2])].add(int(part[1]))
    complete = all(numbers == {*range(1, count + 1)} for (_, count), numbers in parts.items())
    if not weights or not complete or not settings.keys() >= {*_NEEDED}:
        return []
    first = settings.pop(_NEEDED[0])
    others = [settings[path] for path in sorted(settings)]
    return [Variant(SAFETENSORS, "", (first, *others, *weights), SAFETENSORS)]


def _gguf(files: Iterable[WeightFile]) -> list[Variant]:
    found: defaultdict[tuple[str, int], dict[int, WeightFile]] = defaultdict(dict)
    for file in files:
        name = PurePosixPath(file.path).name
        if not name.casefold().endswith(".gguf") or _BESIDE.search(name[: -len(".gguf")]):
            continue
        part = SPLIT.search(name)
        number, count = (int(part[1]), int(part[2])) if part else (1, 1)
        stem = str(PurePosixPath(file.path).with_name(model_name(name)))
        found[stem, count][number] = file
    complete = {
        key: tuple(parts[number] for number in sorted(parts))
        for key, parts in found.items()
        if sorted(parts) == list(range(1, key[1] + 1))
    }
    return [Variant(stem, quantization_of(parts[0].path), parts) for (stem, _), parts in sorted(complete.items())]


def choose(repo: str, there: Sequence[Variant], wanted: str, fits: Callable[[int], bool]) -> Variant:
    """The variant that is meant.

    Args:
        repo: the repository's name, for errors.
        wanted: a quantisation, the name of a file, or `safetensors`; "" for the first in the order of preference that fits,
            where GGUF comes before safetensors.
        fits: whether weights of so many bytes fit into this machine's memory.

    Raises:
        ModelError: none is meant, or several are. The message lists those that are there.
    """
    if not there:
        raise ModelError(
            f"{repo} has no .gguf file of a language model, and not all of config.json, tokenizer.json and model*.safetensors; "
            "look for a repository whose name ends with -GGUF, or for one of mlx-community."
        )
    if wanted:
        if found := named(there, wanted):
            return _single(repo, found)
        raise ModelError(f"{repo} has no '{wanted}'; it has {listing(there)}.")
    fitting = [one for one in there if fits(one.size)]
    if not fitting:
        raise ModelError(
            f"No quantisation of {repo} fits into this machine's free memory; name one to take it anyway: {listing(there)}."
        )
    fitting = [one for one in fitting if one.form == "gguf"] or fitting
    best = min(preference(one.quantization) for one in fitting)
    return _single(repo, [one for one in fitting if preference(one.quantization) == best])


def named(there: Iterable[Variant], wanted: str) -> list[Variant]:
    """Those that `wanted` names. Some authors mark their own mixtures of quantisations with `UD-`, which may be left out."""
    known = list(there)
    exact = [one for one in known if one.answers_to(wanted)]
    return exact or [one for one in known if one.answers_to(f"UD-{wanted}")]


def _single(repo: str, found: Sequence[Variant]) -> Variant:
    if len(found) > 1:
        files = ", ".join(f"{repo}:{one.stem}" for one in found)
        raise ModelError(f"{repo} has several models in the same quantisation; give one of {files}.")
    return found[0]


def listing(there: Sequence[Variant]) -> str:
    """`Q4_K_M (380 MiB), Q8_0 (610 MiB)`: the smallest first."""
    labels = [one.label for one in there]
    ordered = sorted(there, key=lambda one: (one.size, one.stem))
    names = ((one.label if labels.count(one.label) == 1 else one.stem, one.size) for one in ordered)
    return ", ".join(f"{name} ({show_size(size)})" for name, size in names)
