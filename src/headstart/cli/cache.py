"""`headstart cache`: lists, shows, verifies, pins, deletes, exports and imports what is stored on disk."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headstart.cli.cache_list import Names, block_page, chain_page, entry_counts, stats_lines
from headstart.cli.options import reader, setting, written_default
from headstart.config import default_cache_dir
from headstart.errors import ConfigError
from headstart.interfaces.tier import KV
from headstart.paths import expanded, is_file, is_folder
from headstart.units import count, parse_size, parse_time, show_size

if TYPE_CHECKING:
    from headstart.tiers.disk import Disk, FormatError
    from headstart.tiers.disk.catalog import Row
    from headstart.tiers.disk.chains import StoredChain, StoredChains

T = TypeVar("T")

app = typer.Typer(
    name="cache",
    help="Shows and manages what is stored on disk. A chain is a prompt from its beginning; its id is that of its last block.",
    no_args_is_help=True,
)


Folder = Annotated[Path | None, setting("cache_dir", help="The server's folder.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="The first digits of an id.")]
Json = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A tar file.")]
_LIMIT = "Limit of the folder's size, and never more than half of the free space. Nothing is evicted."
CacheBudget = Annotated[int, setting("disk_budget", help=_LIMIT)]
ALL = 1 << 62


def place_of(folder: Path | None) -> Path:
    """The folder that `--cache-dir` or its variable names."""
    return default_cache_dir() if folder is None else expanded(folder)


@contextmanager
def opened(folder: Path | None, budget: int = ALL, *, make: bool = False) -> Iterator[Disk]:
    """The disk tier in a folder. The folder must exist unless `make`. Errors of the disk become ConfigError."""
    import sqlite3

    from headstart.tiers.disk import Disk

    place = place_of(folder)
    if is_file(place):
        raise ConfigError(f"{place} is a file, not a folder; --cache-dir names a folder.")
    try:
        if not make and not is_folder(place / "objects"):
            raise ConfigError(f"Nothing is stored in {place}; --cache-dir names another folder.")
        disk = Disk(place, budget)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"Cannot open {place}: {error}.") from error
    try:
        if not len(disk) and any(disk.objects.iterdir()):
            disk.reconcile(evict=False)  # the catalogue is new, because the old one was damaged or lost
        yield disk
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{place}: {error}.") from error
    finally:
        disk.close()


def _chains(disk: Disk) -> StoredChains:
    from headstart.tiers.disk.chains import StoredChains

    return StoredChains(disk.catalog.rows())


def _track(items: Sequence[T], doing: str) -> Iterable[T]:
    from rich.console import Console
    from rich.progress import track

    return track(items, doing, transient=True, console=Console(stderr=True))


@app.command("ls")
def list_chains(
    folder: Folder = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The most chains to show.", show_default="50, or all with --json"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Lists chains, the latest used first."""
    with opened(folder) as disk, Names(disk) as names:
        chains = _chains(disk).all()
        if as_json:
            typer.echo(json.dumps([_data(chain, names) for chain in chains[:limit]], indent=1))
            return
        from rich.console import Console

        shown = chains[: limit or 50]
        if not chains:
            typer.echo(f"Nothing is stored in {disk.folder}.")
            return
        Console(soft_wrap=True).print(chain_page(shown, names), end="")
        if len(chains) > len(shown):
            typer.echo(f"and {len(chains) - len(shown):,} more; see --limit")


def _data(chain: StoredChain, names: Names) -> dict[str, Any]:
    return chain.data() | {"model": names.model(chain.rows[-1].label.fingerprint), "words": names.words(chain.rows)}


@app.command()
def show(identity: Id, folder: Folder = None, as_json: Json = False) -> None:
    """Shows one chain, block by block, with the checkpoints at their ends."""
    with opened(folder) as disk, Names(disk) as names:
        chains = _chains(disk)
        chain = chains.of(chains.find(identity))
        if as_json:
            typer.echo(json.dumps(_data(chain, names) | {"blocks": chain.blocks()}, indent=1))
            return
        from rich.console import Console

        Console(soft_wrap=True).print(block_page(chain, names), end="")


@app.command()
def stats(folder: Folder = None, as_json: Json = False) -> None:
    """Shows how much is stored, and for which models."""
    from headstart.tiers.disk import files
    from headstart.tiers.disk.chains import StoredChains, totals

    with opened(folder) as disk:
        rows, known = list(disk.catalog.rows()), disk.catalog.models()
        beside = {
            "put_aside_bytes": files.occupied(disk.folder / "quarantine"),
            "catalogue_bytes": files.occupied(disk.folder),
            "reserved_bytes": disk.reserved,
        }
    models = {model: [row for row in rows if row.label.fingerprint == model] for model in {r.label.fingerprint for r in rows}}
    data = {
        "folder": str(disk.folder),
        "chains": len(StoredChains(rows).all()),
        **totals(rows),
        **beside,
        "models": [
            {"fingerprint": model.hex(), "name": known[model].name if model in known else None, **totals(models[model])}
            for model in sorted(models)
        ],
    }
    if as_json:
        typer.echo(json.dumps(data, indent=1))
        return
    typer.echo("\n".join(stats_lines(data, entry_counts(row.label for row in rows if row.pinned))))


@app.command()
def verify(
    folder: Folder = None,
    repair: Annotated[bool, typer.Option("--repair", help="Quarantine bad objects, and delete what crashes left.")] = False,
) -> None:
    """Reads every object and checks all of it. Exit code 1 if any is bad, 0 once repaired."""
    import numpy as np

    from headstart.tiers.disk import FormatError

    with opened(folder) as disk:
        if repair:
            found, gone = disk.reconcile(evict=False)
            typer.echo(f"{count(len(found), 'object')} added to the catalogue")
            typer.echo(f"{count(len(gone), 'missing object')} removed from it")
        good = bad = 0
        for row in _track(list(disk.catalog.rows()), "reading"):
            key = row.label.key
            try:
                disk.read_into(row.label, np.empty(disk.inspect(key).size, np.uint8))
            except (FormatError, OSError) as error:
                if disk.catalog.get(key) is None:
                    continue  # a server has evicted it meanwhile
                if not repair or disk.quarantine(key) is None:
                    bad += 1
                    typer.echo(f"{key.hex()[:12]}: {error}")
                    continue
            good += 1
    typer.echo(f"good: {good:,} of {count(good + bad, 'object')}")
    if bad and not repair:
        raise typer.Exit(1)


@app.command()
def pin(identity: Id, folder: Folder = None) -> None:
    """Protects a chain and its present checkpoints from eviction."""
    with opened(folder) as disk, disk.writing():  # no server evicts, pins or unpins anything meanwhile
        chains = _chains(disk)
        labels = [row.label for row in chains.of(chains.find(identity)).objects]
        disk.catalog.pin([label.key for label in labels])
        typer.echo(f"pinned: {entry_counts(labels)}")


@app.command()
def unpin(identity: Id, folder: Folder = None) -> None:
    """Removes the protection of a chain, except for blocks that other pinned chains need."""
    with opened(folder) as disk, disk.writing():
        chains = _chains(disk)
        rows = chains.alone(identity) or chains.of(chains.find(identity)).objects
        labels = {row.label.key: row.label for row in rows if row.pinned}
        needed = chains.needed(without=labels.keys()) & labels.keys()
        disk.catalog.unpin(labels.keys() - needed)
        typer.echo(f"unpinned: {entry_counts(label for key, label in labels.items() if key not in needed)}")
        if needed:
            typer.echo(f"still pinned, because other pinned chains need them: {entry_counts(labels[key] for key in needed)}")


@app.command("rm")
def remove(
    identity: Annotated[str | None, typer.Argument(metavar="ID", help="The first digits of an id.")] = None,
    folder: Folder = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything that is not pinned, and quarantined objects.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=reader(parse_time),
            metavar="TIME",
            help="What was written longer ago, like 7d, 12h or 90min, and is not pinned.",
        ),
    ] = None,
) -> None:
    """Deletes a chain and its checkpoints, except for blocks that others need; or everything, or old entries.

    It deletes the record of their use too. Servers that run on this folder forget them in memory as well.
    """
    from headstart.prefix_cache.blocks import checkpoint_id

    given = (identity is not None) + everything + (older_than is not None)
    if given != 1:
        only = "only one of" if given else "one of"
        raise ConfigError(f"Give {only}: an id, --all, --older-than. `headstart cache ls` shows ids.")
    before = -math.inf if identity is not None else time.time() - (older_than or 0.0)
    with opened(folder) as disk:
        disk.reconcile(evict=False)  # so that objects outside the catalogue are known, and deleted too
        if identity is not None:
            own = [row.label for row in _removable(_chains(disk), identity)]
            evicted = [checkpoint_id(label.key) for label in own if label.kind == KV]  # they may have left ghosts
            deleted = disk.erase({*(label.key for label in own), *evicted})
        else:
            deleted = disk.erase(disk.catalog.keys() if everything else (), before, lambda: _chains(disk).needed())
        typer.echo(f"deleted: {entry_counts(row.label for row in deleted)}, {show_size(sum(row.allocated for row in deleted))}")
        chains = _chains(disk)
        needed = chains.needed()
        if stay := [row.label for row in disk.catalog.rows() if row.label.key in needed and row.label.written <= before]:
            typer.echo(f"still there, because pinned: {entry_counts(stay)}; unpin them with `headstart cache unpin`")
        for row in (one for one in chains.alone() if one.pinned):
            typer.echo(f"a checkpoint whose block is damaged: `headstart cache unpin {row.label.key.hex()[:12]}` frees it")


def _removable(chains: StoredChains, identity: str) -> list[Row]:
    """The entries that only this chain has. Raises ConfigError if there are none, or one is pinned."""
    own = chains.of(chains.find(identity)).own
    if not own:
        raise ConfigError("Other chains continue this block; `headstart cache ls` shows them.")
    if any(row.pinned for row in own):
        raise ConfigError(f"This chain is pinned; unpin it with `headstart cache unpin {identity}`.")
    return list(own)


@app.command()
def gc(
    folder: Folder = None,
    size: Annotated[
        int | None,
        typer.Option(parser=reader(parse_size), metavar="SIZE", help="Evict until everything fits into this, like 5GiB."),
    ] = None,
) -> None:
    """Deletes what crashes left and unusable objects; with --size also evicts, the least valuable first."""
    with opened(folder) as disk:
        found, gone = disk.reconcile(evict=False)
        aside = disk.empty_quarantine()
        lost = disk.discard([row.label.key for row in _chains(disk).lost()])
        evicted = [] if size is None else disk.shrink(size)
        typer.echo(f"added to the catalogue: {len(found)}; removed: {len(gone)}; deleted without a beginning: {len(lost)}")
        typer.echo(f"evicted: {len(evicted)}; deleted from quarantine: {aside}")
        typer.echo(f"size: {show_size(disk.catalog.used())}")


@app.command("export")
def export_chains(
    file: File,
    identity: Annotated[list[str] | None, typer.Argument(metavar="ID", help="First digits of ids.")] = None,
    folder: Folder = None,
) -> None:
    """Writes chains (or all) to a tar file, for another machine with the same model, engine and settings.

    Chains include their checkpoints. Derived KV and all entries that depend on it are left out.
    """
    from headstart.tiers.disk import archive

    with opened(folder) as disk:
        chains = _chains(disk)
        wanted = [chains.of(chains.find(digits)) for digits in identity] if identity else chains.all()
        rows = list({row.label.key: row for chain in wanted for row in chain.objects}.values())
        packed, left = archive.pack(disk, _track(rows, "writing"), file)
    typer.echo(f"exported: {entry_counts(packed)}" + (f"; left out, because derived: {entry_counts(left)}" if left else ""))


@app.command("import")
def import_chains(
    file: File,
    folder: Folder = None,
    disk_budget: CacheBudget = written_default("disk_budget"),  # noqa: B008
) -> None:
    """Imports a file that `export` wrote. Every object is checked; bad ones are left out.

    Exit code 1 if an object is bad, or if there was not room for all.
    """
    from rich.console import Console
    from rich.progress import open as tracked

    from headstart.tiers.disk import archive

    bad = 0

    def complain(name: str, error: FormatError) -> None:
        nonlocal bad
        bad += 1
        typer.echo(f"{name}: {error}")

    try:
        source = tracked(file, "rb", description="reading", transient=True, console=Console(stderr=True))
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error.strerror}.") from error
    with source as stream:
        objects = archive.unpack(stream, complain)
        with opened(folder, disk_budget, make=True) as disk:
            taken = archive.take(disk, objects)
    typer.echo(f"imported: {entry_counts(taken.stored)}; there before: {taken.known}; bad: {bad}")
    if taken.refused:
        typer.echo(f"no room for {entry_counts(taken.refused)}: give more --disk-budget, or evict with `headstart cache gc`")
    if bad or taken.refused:
        raise typer.Exit(1)
