"""Finders: the models in the folders of this program and of others. They only read, and pass over what they cannot read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from headstart.engines import model_folder
from headstart.errors import ModelError
from headstart.hub.folders import Folders
from headstart.hub.local_model import LocalModel, ModelSource
from headstart.hub.quantization import quantization_of
from headstart.hub.record import FetchRecord, folder_name
from headstart.hub.reference import parse
from headstart.hub.variants import SAFETENSORS, Variant, WeightFile, is_weights, variants
from headstart.model_names import model_name
from headstart.paths import is_file, is_folder

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MOST = 1 << 20  # bytes of a manifest
_BESIDE_WEIGHTS = (".safetensors", ".json", ".jinja")
_DEPTH = 4
"""Folders below the given one that are searched for files."""


# ── Hugging Face's cache ─────────────────────────────────────────────────────────────────────────────────────────────


def hugging_face(folders: Folders) -> Iterator[LocalModel]:
    """Those of `<hub>/models--OWNER--NAME/snapshots/<commit>/`, which links to `blobs/`."""
    record = FetchRecord(folders.state, folders.hub)
    for folder in _folders(folders.hub):
        kind, _, rest = folder.name.partition("--")
        reference = parse(rest.replace("--", "/", 1))
        if kind == "models" and reference is not None:
            yield from _repository(folder, reference.repo, record)


def repository_models(folders: Folders, repo: str) -> Iterator[LocalModel]:
    """Those of one repository in Hugging Face's cache."""
    return _repository(folders.hub / folder_name(repo), repo, FetchRecord(folders.state, folders.hub))


def pulled(folders: Folders) -> list[LocalModel]:
    """Those that headstart was asked to fetch, in the order in which they came."""
    return sorted((model for model in hugging_face(folders) if model.pulled), key=lambda model: _mtime(model.paths[0]))


def _repository(folder: Path, repo: str, record: FetchRecord) -> Iterator[LocalModel]:
    found: dict[str, tuple[Variant, Path]] = {}
    for snapshot in _snapshots(folder):
        for variant in _variants(snapshot):
            found.setdefault(variant.stem, (variant, snapshot))  # of several commits the latest one counts
    everything = [variant for variant, _ in found.values()]
    for variant, snapshot in found.values():
        paths = tuple(snapshot / file.path for file in variant.files)
        weights = [path for path in paths if variant.form != SAFETENSORS or is_weights(path.name)]
        noted = [record.get(repo, path.resolve().name) for path in weights]
        own = all(one is not None and one.own for one in noted)
        model = _model(repo, variant, everything, paths, "headstart" if own else "Hugging Face")
        yield replace(model, pulled=None not in noted)


def _snapshots(folder: Path) -> list[Path]:
    """The snapshot of the main branch first, then the latest ones."""
    main = _read(folder / "refs" / "main").decode("ascii", "replace").strip()
    there = [path for path in _folders(folder / "snapshots") if _COMMIT.fullmatch(path.name)]
    return sorted(there, key=lambda path: (path.name != main, -_mtime(path), path.name))


# ── other programs ───────────────────────────────────────────────────────────────────────────────────────────────────


def lm_studio(folders: Folders) -> Iterator[LocalModel]:
    """Those of `<models>/OWNER/NAME/`."""
    for root in folders.lm_studio:
        for owner in _folders(root):
            for folder in _folders(owner):
                there = _variants(folder)
                for variant in there:
                    paths = tuple(folder / file.path for file in variant.files)
                    yield _model(f"{owner.name}/{folder.name}", variant, there, paths, "LM Studio")


def llama_cpp(folders: Folders) -> Iterator[LocalModel]:
    """Those of a flat folder, `OWNER_NAME_FILE.gguf`. Files named `manifest=OWNER=NAME=TAG.json` say where names end.

    Later versions of llama.cpp use Hugging Face's cache.
    """
    for root in folders.llama_cpp:
        names = [name.removesuffix(".json").split("=") for name in _names(root) if name.startswith("manifest=")]
        repos = {f"{parts[1]}_{parts[2]}_".casefold(): f"{parts[1]}/{parts[2]}" for parts in names if len(parts) == 4}
        for variant in (one for one in variants(_files(root, depth=0)) if one.form != SAFETENSORS):
            prefix = max((one for one in repos if variant.stem.casefold().startswith(one)), key=len, default="")
            paths = tuple(root / file.path for file in variant.files)
            if repo := repos.get(prefix):
                yield _model(repo, variant, (), paths, "llama.cpp", variant.stem[len(prefix) :])
            else:
                yield LocalModel(variant.stem, paths, "llama.cpp", variant.size, "", variant.quantization)


def ollama(folders: Folders) -> Iterator[LocalModel]:
    """Those of `<models>/manifests/HOST/OWNER/NAME/TAG`, a JSON that names `<models>/blobs/sha256-…`."""
    for root in folders.ollama:
        for host in _folders(root / "manifests"):
            for owner in _folders(host):
                for folder in _folders(owner):
                    for tag in sorted(_names(folder)):
                        yield from _manifest(root, folder / tag, (host.name, owner.name, folder.name, tag))


def _manifest(root: Path, manifest: Path, parts: tuple[str, str, str, str]) -> Iterator[LocalModel]:
    try:
        layers = json.loads(_read(manifest))["layers"]
        kinds = [(str(layer["mediaType"]).rpartition(".")[2], _DIGEST.fullmatch(str(layer["digest"]))) for layer in layers]
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    weights = [digest[1] for kind, digest in kinds if kind == "model" and digest is not None]
    if len(weights) != 1 or any(kind == "adapter" for kind, _ in kinds):
        return  # it is not one file
    blob = root / "blobs" / f"sha256-{weights[0]}"
    host, owner, name, tag = parts
    repo = f"{owner}/{name}" if host in ("hf.co", "huggingface.co") else ""
    shown = name if owner == "library" else f"{owner}/{name}"
    full = f"{shown}:{tag}" if host == "registry.ollama.ai" else f"{host}/{owner}/{name}:{tag}"
    if (size := _size(blob)) is not None:
        yield LocalModel(full, (blob,), "Ollama", size, repo, quantization_of(f"x-{tag}.gguf"))


FINDERS: Sequence[Callable[[Folders], Iterator[LocalModel]]] = (hugging_face, lm_studio, llama_cpp, ollama)
"""If several programs have a model of one name, the first finder's is taken."""


def in_folder(folder: Path) -> list[LocalModel]:
    """The models in a folder of the user's, and in folders within it. No file with weights is opened.

    The name of a GGUF is that of its file, without suffix and part number. A model in Hugging Face's form has the name of its
    own folder, which may be a link.
    """
    found = [
        LocalModel(Path(one.stem).name, tuple(folder / file.path for file in one.files), "path", one.size, "", one.quantization)
        for one in _variants(folder)
        if one.form != SAFETENSORS
    ]
    for place in _model_folders(folder):
        for one in _variants(place, depth=0):
            if one.form == SAFETENSORS:
                paths = tuple(place / file.path for file in one.files)
                found.append(LocalModel(place.absolute().name, paths, "path", one.size, form=SAFETENSORS))
    return found


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _model(
    repo: str, variant: Variant, there: Sequence[Variant], paths: tuple[Path, ...], source: ModelSource, label: str = ""
) -> LocalModel:
    """A model of a repository.

    Args:
        there: all variants of it. Where two have one quantisation, names have the file in place of it.
        label: in place of the file's path.
    """
    if variant.form == SAFETENSORS:
        name = repo if len(there) == 1 else f"{repo}:{SAFETENSORS}"
        return LocalModel(name, paths, source, variant.size, repo, form=SAFETENSORS)
    alone = [one.quantization for one in there].count(variant.quantization) < 2
    named = variant.quantization if variant.quantization and alone else label or variant.stem
    return LocalModel(f"{repo}:{named}", paths, source, variant.size, repo, variant.quantization)


def _variants(root: Path, depth: int = _DEPTH) -> list[Variant]:
    """The models of a folder: GGUF files also in folders within it, and the one in Hugging Face's form that the folder is."""
    return [one for one in variants(_files(root, depth)) if one.form != SAFETENSORS or _writes_text(root)]


def _writes_text(folder: Path) -> bool:
    """Whether the model in a folder is a language model, as its config says."""
    try:
        model_folder.config(folder)
    except ModelError:
        return False
    return True


def _model_folders(root: Path) -> Iterator[Path]:
    """The folders with a `config.json`: `root`, those within it, and links to such folders there."""
    if is_file(root / model_folder.CONFIG):
        yield root
    for folder, inner, _ in os.walk(root):
        if len(Path(folder).relative_to(root).parts) >= _DEPTH:
            inner.clear()
        inner.sort()
        yield from (place for name in inner if is_file((place := Path(folder, name)) / model_folder.CONFIG))


def _files(root: Path, depth: int) -> Iterator[WeightFile]:
    """The `.gguf` files in a folder and in those within it, and what a model in Hugging Face's form has directly in it.

    Links to files are followed, links to folders are not.
    """
    for folder, inner, names in os.walk(root):
        here = Path(folder).relative_to(root)
        if len(here.parts) >= depth:
            inner.clear()
        inner.sort()
        for name in sorted(names):
            wanted = name.casefold().endswith(".gguf") or (not here.parts and name.endswith(_BESIDE_WEIGHTS))
            if wanted and (size := _size(Path(folder, name))) is not None:
                yield WeightFile((here / name).as_posix(), size)


def _folders(root: Path) -> list[Path]:
    return [root / name for name in sorted(_names(root)) if is_folder(root / name)]


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except OSError:
        return []


def _size(path: Path) -> int | None:
    """None if there is no such file."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST)
    except OSError:
        return b""


def flat_name(model: LocalModel) -> str:
    """The name of a model's file, to compare with `OWNER_NAME_`."""
    return model_name(model.path.name)
