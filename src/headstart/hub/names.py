"""Names: which model on this machine a name means. It needs no network, and loads neither an engine nor the hub's client."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from headstart.engines import machine, model_file, model_folder
from headstart.engines.model_folder import is_model_folder
from headstart.errors import ModelError
from headstart.hub.finders import FINDERS, flat_name
from headstart.hub.folders import Folders
from headstart.hub.local_model import LocalModel, ModelSource
from headstart.hub.quantization import quantization_of
from headstart.hub.reference import ModelRef, parse
from headstart.hub.variants import SAFETENSORS, ModelForm, Variant, WeightFile, choose, named
from headstart.model_names import same
from headstart.paths import expanded, is_file

Fits = Callable[[int], bool]
SHARE, BESIDE = 0.8, 512 << 20
"""Weights fit if they and these bytes take at most this share of the free memory, as in `memory_plan`."""


def fits_here(size: int) -> bool:
    """Whether weights of so many bytes, with a short context, fit into the memory that is free now. It is an estimate."""
    return size + BESIDE <= SHARE * machine.memory()


def local_models(folders: Folders | None = None) -> list[LocalModel]:
    """All models that are found on this machine: the bundled one, then those in headstart's and other programs' folders."""
    places = folders or Folders.of()
    return [*_bundled(), *(model for finder in FINDERS for model in finder(places))]


def find(text: str, folders: Folders | None = None, fits: Fits = fits_here) -> LocalModel:
    """The model that a name or a path means, if it is on this machine.

    Args:
        text: the path of a `.gguf` file, or of a folder with a `config.json`; `demo`; `OWNER/NAME[:QUANTISATION]`; or another
            name that `local_models` has.
        folders: where models are; by default as the environment says.
        fits: decides between several quantisations that are here, if the name has none.

    Raises:
        ModelError: there is none, the file or folder holds no model, or several are meant.
    """
    found = look_up(text, folders, fits)
    if found is None:
        raise ModelError(f"{text} is not on this machine; `headstart pull {text}` fetches it.")
    return found


def look_up(text: str, folders: Folders | None = None, fits: Fits = fits_here) -> LocalModel | None:
    """As `find`, but None for an `OWNER/NAME[:QUANTISATION]` that is not here, so that it may be fetched.

    Raises:
        ModelError: it is no name of a repository, and there is no such file or model.
    """
    if text == model_file.DEMO:
        return _at(text, model_file.locate(text), bundled=True)
    if is_model_folder(text):
        return _folder(text)
    if is_path(text):
        return _at(text, model_file.locate(text))
    if same(text, model_file.DEMO):
        return look_up(model_file.DEMO)
    there = [model for finder in FINDERS for model in finder(folders or Folders.of())]
    for model in there:
        if same(model.name, text) or same(model.name, f"{text}:latest"):
            return model
    reference = parse(text)
    if reference is not None:
        return _of_repository(reference, there, fits)
    for model in there:
        if same(flat_name(model), text):
            return model
    raise ModelError(f"There is no model '{text}'; {_remedy(text, there)}")


def is_path(text: str) -> bool:
    """Whether this is the path of a file rather than a name."""
    if text.startswith(("/", "./", "../", "~", "\\")) or is_file(text):
        return True
    return text.casefold().endswith(".gguf") and parse(text) is None


def _at(name: str, path: Path, *, bundled: bool = False) -> LocalModel:
    files = tuple(model_file.parts(path))
    size = sum(file.stat().st_size for file in files)
    return LocalModel(name, files, "bundled" if bundled else "path", size, "", quantization_of(path.name))


def _folder(text: str) -> LocalModel:
    """A model in Hugging Face's form."""
    files = tuple(model_folder.weights(expanded(text)))
    return LocalModel(text, files, "path", sum(file.stat().st_size for file in files), form=SAFETENSORS)


def _bundled() -> list[LocalModel]:
    try:
        return [_at(model_file.DEMO, model_file.locate(model_file.DEMO), bundled=True)]
    except ModelError:
        return []


def _of_repository(reference: ModelRef, there: Iterable[LocalModel], fits: Fits) -> LocalModel | None:
    """Of several quantisations that are here the best one that fits, if the reference names none.

    Of several programs that have the same quantisation the first one counts.
    """
    flat = f"{reference.owner}_{reference.name}_".casefold()
    found: dict[Variant, LocalModel] = {}
    sources: dict[tuple[ModelForm, str], ModelSource] = {}
    for model in there:
        unnamed = not model.repo and model.source == "llama.cpp" and flat_name(model).casefold().startswith(flat)
        if not (unnamed or same(model.repo, reference.repo)):
            continue
        if sources.setdefault((model.form, model.quantization), model.source) == model.source:
            stem = model.name[len(flat) :] if unnamed else model.name.rpartition(":")[2]
            found[Variant(stem, model.quantization, (WeightFile(model.path.name, model.size),), model.form)] = model
    if reference.variant:
        found = {variant: found[variant] for variant in named(found, reference.variant)}
    if not found:
        return None
    return found[choose(reference.repo, list(found), "", fits if len(found) > 1 else lambda _: True)]


def _remedy(text: str, there: Sequence[LocalModel]) -> str:
    names = [model.name for model in there]
    if near := difflib.get_close_matches(text, names, 1, 0.6):
        return f"did you mean '{near[0]}'?"
    ways = f"give the path of a .gguf file or of a folder, OWNER/NAME of a Hugging Face repository, or '{model_file.DEMO}'"
    return f"{ways}; `headstart models` lists those that are here." if names else f"{ways}."
