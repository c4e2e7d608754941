"""`headstart models` and `headstart rm`: the models on this machine, and what is kept of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli import cache as cli_cache
from headstart.errors import ConfigError, ModelError
from headstart.model_names import same
from headstart.paths import is_folder
from headstart.units import count, show_size

if TYPE_CHECKING:
    from headstart.engines.gguf import ModelFacts
    from headstart.hub.in_use import FileUser
    from headstart.hub.local_model import LocalModel
    from headstart.hub.remove import PartialModel
    from headstart.tiers.disk import Disk


@dataclass(frozen=True, slots=True)
class KeptOfModel:
    """What the cache on disk keeps of a model: its conversations, their bytes, and the fingerprints that they have."""

    conversations: int = 0
    size: int = 0
    fingerprints: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Listed:
    """A model in the list.

    Attributes:
        fits: tokens of the longest conversation that fits into free memory; 0 if the model does not fit.
        used_by: the processes that have its file open or mapped.
    """

    model: LocalModel
    facts: ModelFacts
    fits: int
    used_by: Sequence[FileUser]
    kept: KeptOfModel

    def data(self) -> dict[str, Any]:
        """For JSON: sizes in bytes, lengths in tokens, null for what is unknown."""
        model, facts = self.model, self.facts
        return {
            "name": model.name,
            "source": model.source,
            "files": [str(path) for path in model.paths],
            "bytes": model.size,
            "quantization": facts.quantization or model.quantization or None,
            "architecture": facts.architecture or None,
            "ctx": facts.ctx or None,
            "fits_ctx": self.fits,
            "used_by": [{"pid": user.pid, "name": user.name} for user in self.used_by],
            "conversations": self.kept.conversations,
            "conversation_bytes": self.kept.size,
        }

    def cells(self) -> tuple[str, ...]:
        model, facts = self.model, self.facts
        fits = "no" if not self.fits else "yes" if self.fits >= facts.ctx > 0 else f"{self.fits:,} tokens"
        kept = f"{self.kept.conversations:,} ({show_size(self.kept.size)})" if self.kept.conversations else ""
        used = ", ".join(f"{user.name} {user.pid}" for user in self.used_by)
        form = model.quantization or facts.quantization
        return model.name, show_size(model.size), form, f"{facts.ctx:,}" if facts.ctx else "", fits, used, kept, model.source


_COLUMNS = ("name", "size", "quantisation", "context", "fits", "loaded by", "conversations", "from")


def models(folder: cli_cache.Folder = None, as_json: cli_cache.Json = False) -> None:
    """Lists the models on this machine: those that headstart has fetched, and those of Hugging Face's programs, LM Studio,
    llama.cpp and Ollama.

    It says whether each fits into the memory that is free now, how long a conversation can be then, which process has it
    loaded, and how many conversations the cache on disk keeps of it.
    """
    from headstart.engines import machine
    from headstart.engines.gguf import most_tokens
    from headstart.hub.folders import Folders
    from headstart.hub.in_use import users
    from headstart.hub.model_facts import facts_of
    from headstart.hub.names import local_models
    from headstart.hub.remove import partial_models

    places, free = Folders.of(), machine.memory()
    there = local_models(places)
    using, kept = users(path for model in there for path in model.paths), kept_of(there, folder)
    rows = []
    for model in there:
        facts = facts_of(model)
        used_by = list(dict.fromkeys(user for path in model.paths for user in using[path]))
        rows.append(Listed(model, facts, most_tokens(facts, model.size, free), used_by, kept[model.path]))
    partial = partial_models(places)
    if as_json:
        begun = [{"name": one.name, "file": one.path, "bytes": one.size, "total_bytes": one.total} for one in partial]
        typer.echo(json.dumps({"free_bytes": free, "models": [row.data() for row in rows], "partial": begun}, indent=1))
        return
    if not rows:
        typer.echo("No model is on this machine. `headstart pull OWNER/NAME` fetches one from Hugging Face's hub.")
    else:
        print_models([row.cells() for row in rows])
    for name, (size, total) in _sums(partial).items():
        done = f"{100 * size // total}% of {show_size(total)}"
        typer.echo(f"{name}: {done} are here; `headstart pull {name}` goes on with it")


def _sums(partial: Iterable[PartialModel]) -> dict[str, tuple[int, int]]:
    """Bytes that are here, and bytes of the files that have been begun, by name."""
    found: dict[str, tuple[int, int]] = {}
    for one in partial:
        size, total = found.get(one.name, (0, 0))
        found[one.name] = size + one.size, total + one.total
    return found


def print_models(rows: Sequence[tuple[str, ...]]) -> None:
    """On a terminal in columns, without those that are empty; else with tabs. Nothing is cut off where a terminal is narrow."""
    import sys

    lines = [_COLUMNS, *rows]
    if not sys.stdout.isatty():
        typer.echo("\n".join("\t".join(line) for line in lines))
        return
    from rich.cells import cell_len, set_cell_size

    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(cell_len, column)) for column in columns]
    for line in zip(*columns, strict=True):
        cells = (set_cell_size(cell, width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `headstart models` lists.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    conversations: Annotated[
        bool, typer.Option("--conversations", help="Also delete what the cache on disk keeps of it, but for what is pinned.")
    ] = False,
    folder: cli_cache.Folder = None,
) -> None:
    """Deletes a model that `headstart pull` has fetched, also its older versions, after a question.

    It refuses what other programs have fetched, and what a process has loaded. Without --conversations, the cache keeps the
    model's conversations: they are used again when the same model comes back.
    """
    from headstart.hub.folders import Folders
    from headstart.hub.names import is_path, local_models, look_up
    from headstart.hub.reference import parse
    from headstart.hub.remove import check_removable, find_partial, remove_partial
    from headstart.hub.remove import remove as delete

    places = Folders.of()
    begun, reference = find_partial(name, places), parse(name)
    if reference is not None and not reference.variant:
        names = [one.name for one in local_models(places) if one.source == "headstart" and same(one.repo, reference.repo)]
        names = list(dict.fromkeys([*names, *(one.name for one in begun)]))
        if len(names) > 1:
            raise ModelError(f"{name} is here several times; name one of {', '.join(names)}.")
    model = None
    try:
        model = look_up(name, places, lambda _: True)
    except ModelError:
        if reference is None and not begun and not is_path(name):
            raise ModelError(f"{name} is not on this machine; `headstart models` lists those that are.") from None
        if not begun:
            raise
    if model is None and not begun:
        raise ModelError(f"{name} is not on this machine; `headstart models` lists those that are.")
    kept = KeptOfModel()
    parts = []
    if model is not None:
        check_removable(model)
        kept = kept_of([model], folder)[model.path]
        parts.append(f"{model.name}, {show_size(model.size)}, fetched by headstart")
    parts += [f"{name}, {show_size(size)} of a download" for name, (size, _) in _sums(begun).items()]
    if kept.conversations:
        what = f"{count(kept.conversations, 'conversation')} of it, {show_size(kept.size)}"
        parts.append(what if conversations else f"but not {what}, which --conversations would delete")
    _ask(f"Delete {'; '.join(parts)}?", yes)
    freed = remove_partial(begun, places)
    try:
        freed += delete(model, places) if model is not None else 0
    except OSError as error:
        raise ConfigError(f"Cannot delete {name}: {error.strerror}.") from error
    typer.echo(f"deleted: {show_size(freed)} of files")
    if conversations and kept.fingerprints:
        typer.echo(f"deleted: {show_size(_forget(kept, folder))} of conversations")


def _ask(question: str, yes: bool) -> None:
    """Returns if the user agrees. Raises ConfigError if there is nobody to ask, and Abort if the answer is no."""
    import sys

    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Give --yes: there is no terminal to ask on.")
    typer.confirm(question, abort=True)


# ── what the cache keeps ─────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _disk(folder: Path | None) -> Iterator[Disk | None]:
    """The disk tier; None if nothing is stored."""
    if not is_folder(cli_cache.place_of(folder) / "objects"):
        yield None
        return
    with cli_cache.opened(folder) as disk:
        yield disk


def kept_of(models: Sequence[LocalModel], folder: Path | None) -> dict[Path, KeptOfModel]:
    """What the cache keeps of each model, by the model's file. Its servers have noted which file a fingerprint belongs to."""
    found = {model.path: KeptOfModel() for model in models}
    with _disk(folder) as disk:
        if disk is None:
            return found
        from headstart.tiers.disk.chains import StoredChains

        rows = list(disk.catalog.rows())
        known = {fingerprint: Path(stored.file).resolve() for fingerprint, stored in disk.catalog.models().items()}
    chains = Counter(chain.rows[-1].label.fingerprint for chain in StoredChains(rows).all())
    sizes: Counter[bytes] = Counter()
    for row in rows:
        sizes[row.label.fingerprint] += row.allocated
    for model in models:
        own = frozenset(one for one, file in known.items() if file == model.path.resolve())
        found[model.path] = KeptOfModel(sum(chains[one] for one in own), sum(sizes[one] for one in own), own)
    return found


def _forget(kept: KeptOfModel, folder: Path | None) -> int:
    """Deletes what is kept, but for what is pinned. Returns the freed bytes."""
    with _disk(folder) as disk:
        if disk is None:
            return 0
        from headstart.tiers.disk.chains import StoredChains

        keys = [row.label.key for row in disk.catalog.rows() if row.label.fingerprint in kept.fingerprints]
        deleted = disk.erase(keys, spared=lambda: StoredChains(disk.catalog.rows()).needed())
    return sum(row.allocated for row in deleted)
