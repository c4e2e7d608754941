"""Pull: fetches a model from a hub into Hugging Face's cache, and says what a name means when it may be fetched."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from headstart.engines import model_folder
from headstart.errors import HubError, ModelError
from headstart.hub.cache import HubCache
from headstart.hub.client import HubClient, Repository, offline
from headstart.hub.download import download, missing
from headstart.hub.finders import repository_models
from headstart.hub.folders import Folders
from headstart.hub.local_model import LocalModel
from headstart.hub.names import Fits, fits_here, local_models, look_up
from headstart.hub.progress import OnProgress, PullProgress
from headstart.hub.record import FetchRecord
from headstart.hub.reference import parse
from headstart.hub.variants import SAFETENSORS, Variant, WeightFile, choose, listing, variants
from headstart.units import show_size

SPARE = 64 << 20
"""Bytes of a disk that stay free."""
_NAMED = 8
"""Most models that an error lists."""


def ignore(progress: PullProgress) -> None:
    """An `OnProgress` that does nothing."""


def resolve(text: str, on_progress: OnProgress = ignore, folders: Folders | None = None, fits: Fits = fits_here) -> LocalModel:
    """The model that a name or a path means. `OWNER/NAME[:QUANTISATION]` is fetched if it is not on this machine.

    Args:
        text: as in `names.find`.
        on_progress: is told how far a download is.

    Raises:
        ModelError: there is none, or several are meant.
        HubError: it cannot be fetched.
    """
    return look_up(text, folders, fits) or pull(text, on_progress, folders, fits)


def pull(text: str, on_progress: OnProgress = ignore, folders: Folders | None = None, fits: Fits = fits_here) -> LocalModel:
    """Fetches a model, or its latest version. What is here already is not fetched again. Where the environment forbids to ask a
    hub, a model that is here is the latest version.

    Args:
        text: `OWNER/NAME[:QUANTISATION]`. Without a quantisation, it is the best one that fits. A repository without GGUF has
            one model, in Hugging Face's form.
        on_progress: is told how far a download is. What it raises ends the download, and is raised.

    Raises:
        ModelError: the text is no such name, the repository does not have what it names, or no engine here can load that.
        HubError: the hub cannot be reached or refuses, the disk is too small, or what arrived is not what the hub names.
    """
    reference = parse(text)
    if reference is None:
        raise ModelError(f"'{text}' is no name of a repository; give OWNER/NAME or OWNER/NAME:QUANTISATION.")
    places = folders or Folders.of()
    if offline() and (found := look_up(text, places, fits)) is not None:
        return found
    try:
        client = HubClient()
        repository = client.repository(reference.repo)
    except HubError as error:
        raise HubError(f"{error}{_here(places)}") from None
    there = variants(repository.files)
    chosen = choose(reference.repo, there, reference.variant, fits)
    if chosen.form == SAFETENSORS:
        model_folder.check_engine(reference.repo)
    cache = HubCache(places.hub, reference.repo)
    record = FetchRecord(places.state, places.hub)
    of_caller: list[OSError] = []

    def report(progress: PullProgress) -> None:
        try:
            on_progress(progress)
        except OSError as error:
            of_caller.append(error)
            raise

    try:
        _check_space(cache, chosen, there)
        for file in chosen.files:
            download(client, repository, file, cache, record, report)
            if file.path == model_folder.CONFIG:
                _check_config(file, cache, record, reference.repo)
        return _finish(places, repository, cache, chosen)
    except OSError as error:
        if error in of_caller:
            raise
        raise _explained(error, places) from error


def _finish(places: Folders, repository: Repository, cache: HubCache, chosen: Variant) -> LocalModel:
    """Makes the links of a complete model, and finds it as any other program would."""
    paths = [cache.link(repository.commit, file.path, file.digest) for file in chosen.files]
    cache.set_main(repository.commit)
    found = [model for model in repository_models(places, repository.repo) if model.paths[0] == paths[0]]
    if not found:
        raise HubError(f"Files of {repository.repo} were removed while others came: fetch it again.")
    return found[0]


def _check_config(file: WeightFile, cache: HubCache, record: FetchRecord, repo: str) -> None:
    """Raises ModelError if no engine can load a model with this config, before its weights are fetched. It is removed then."""
    blob = cache.blob(file.digest)
    try:
        model_folder.check_kind(model_folder.read_config(blob, repo), repo)
    except ModelError:
        if record.has(repo, file.digest) and file.digest not in cache.linked():
            blob.unlink(missing_ok=True)
            record.forget(repo, file.digest)
        raise


def _check_space(cache: HubCache, chosen: Variant, there: Sequence[Variant]) -> None:
    """Raises HubError if the disk cannot hold what is missing."""
    needed = sum(missing(cache, file) for file in chosen.files)
    free = shutil.disk_usage(_existing(cache.hub)).free
    if needed and needed + SPARE > free:
        smaller = [one for one in there if one.size < chosen.size and one.size + SPARE <= free]
        other = f", choose a smaller quantisation ({listing(smaller)})" if smaller else ""
        raise HubError(
            f"The disk is too full: {chosen.label} needs {show_size(needed)} more in {cache.hub}, {show_size(free)} are free, "
            f"and {show_size(SPARE)} must stay free. Make space{other}, or set HF_HOME to a folder on another disk."
        )


def _existing(path: Path) -> Path:
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())


def _explained(error: OSError, places: Folders) -> HubError:
    name = Path(error.filename) if isinstance(error.filename, str) else places.hub
    of_state = name.is_relative_to(places.state) and not name.is_relative_to(places.hub)
    folder, variable = (places.state, "HEADSTART_STATE_DIR") if of_state else (places.hub, "HF_HOME")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HubError(f"The disk of {folder} is full. What is here is kept: make space, and the same command goes on.")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return HubError(f"Cannot write into {folder} ({reason}); check its permissions, or set {variable} to another folder.")


def _here(places: Folders) -> str:
    """A sentence about the models on this machine."""
    names = [model.name for model in local_models(places)]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" On this machine are: {', '.join(names[:_NAMED])}{more}." if names else " No model is on this machine."
