"""`headstart cache`: what is stored can be listed, explained, verified, pinned and deleted by its owner."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from headstart.config import default_cache_dir
from headstart.errors import ConfigError
from headstart.units import count, parse_portion, parse_size, show_size

if TYPE_CHECKING:
    from rich.table import Table

    from headstart.stores.disk import Disk, FormatError, Label
    from headstart.stores.disk.catalog import Row
    from headstart.stores.disk.chains import Chain, Chains

T = TypeVar("T")

app = typer.Typer(
    name="cache",
    help="Shows and tends what is kept on disk. A chain is a prompt from its beginning; its id is that of its last block.",
    no_args_is_help=True,
)


def size(text: str) -> int:
    """Bytes of an option like `4GiB`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None


def portion(text: str) -> float:
    """A share like `25%`, or the bytes of a size."""
    try:
        return parse_portion(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None


Folder = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        envvar="HEADSTART_CACHE_DIR",
        metavar="FOLDER",
        help="Where the server keeps it.",
        show_default="this platform's cache folder",
    ),
]
Id = Annotated[str, typer.Argument(metavar="ID", help="The first digits of an id.")]
Json = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A tar file.")]
DiskBudget = Annotated[
    int,
    typer.Option(
        parser=size,
        envvar="HEADSTART_DISK_BUDGET",
        metavar="SIZE",
        help="The most that the folder may occupy, and never more than half of what is free there. Nothing is evicted.",
        show_default="20GiB",
    ),
]
ALL = 1 << 62


@contextmanager
def _opened(folder: Path | None, budget: int = ALL, *, make: bool = False) -> Iterator[Disk]:
    """The tier in a folder, which is there already unless it is to be made. Faults within are the user's to mend."""
    import sqlite3

    from headstart.stores.disk import Disk

    place = folder or default_cache_dir()
    try:
        if not make and not (place / "objects").is_dir():
            raise ConfigError(f"Nothing is stored in {place}; --cache-dir names another folder.")
        disk = Disk(place, budget)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"Cannot open {place}: {error}.") from error
    try:
        if not len(disk) and any(disk.objects.iterdir()):
            disk.reconcile(evict=False)  # the catalogue is new: the old one was damaged or lost
        yield disk
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{place}: {error}.") from error
    finally:
        disk.close()


def _chains(disk: Disk) -> Chains:
    from headstart.stores.disk.chains import Chains

    return Chains(disk.catalog.rows())


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _counted(blocks: int, checkpoints: int) -> str:
    return count(blocks, "block") + (f" and {count(checkpoints, 'checkpoint')}" if checkpoints else "")


def _pieces(labels: Iterable[Label]) -> str:
    kinds = [label.kind for label in labels]
    return _counted(kinds.count("rows"), kinds.count("state"))


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
    with _opened(folder) as disk:
        chains = _chains(disk).all()
    if as_json:
        typer.echo(json.dumps([chain.data() for chain in chains[:limit]], indent=1))
        return
    from rich.console import Console

    shown = chains[: limit or 50]
    table = _table("id", "tokens", "check-\npoints", " size", " of its own", " saves", " used", "model", " ")
    for chain in shown:
        table.add_row(*_described(chain))
    Console().print(table)
    if len(chains) > len(shown):
        typer.echo(f"and {len(chains) - len(shown):,} more; see --limit")


def _table(*columns: str) -> Table:
    """Columns whose names begin with a space may be broken into lines where there is little room."""
    from rich.table import Column, Table

    return Table(*(Column(name.strip(), no_wrap=not name.startswith(" ")) for name in columns))


def _described(chain: Chain) -> list[str]:
    data = chain.data()
    notes = ["pinned"] if data["pinned"] else []
    if not chain.complete:
        notes.append("its beginning is gone")
    return [
        data["id"][:12],
        f"{chain.tokens:,}",
        f"{len(chain.checkpoints):,}",
        show_size(chain.allocated),
        show_size(data["own_bytes"]),
        f"{data['seconds']:.1f} s",
        _ago(data["used"]),
        data["fingerprint"][:8],
        ", ".join(notes),
    ]


@app.command()
def show(identity: Id, folder: Folder = None, as_json: Json = False) -> None:
    """Shows one chain, block by block, with the checkpoints at their ends."""
    with _opened(folder) as disk:
        chains = _chains(disk)
        chain = chains.of(chains.find(identity))
    if as_json:
        typer.echo(json.dumps(chain.data() | {"blocks": chain.blocks()}, indent=1))
        return
    from rich.console import Console

    table = _table("block", "tokens", " size", "rows", "check-\npoint", " used", " first tokens", "")
    for row in chain.rows:
        label, state = row.label, chain.checkpoints.get(row.label.key)
        table.add_row(
            label.key.hex()[:12],
            f"{label.start} – {label.start + len(label.tokens)}",
            show_size(row.allocated),
            "canonical" if label.canonical else "derived",
            "" if state is None else show_size(state.allocated) + ("" if state.label.canonical else "\nderived"),
            _ago(row.used),
            " ".join(map(str, label.tokens[:6])),
            "pinned" if row.pinned else "",
        )
    Console().print(table)


@app.command()
def stats(folder: Folder = None, as_json: Json = False) -> None:
    """Says how much is stored, for which models."""
    from headstart.stores.disk import files
    from headstart.stores.disk.chains import Chains, totals

    with _opened(folder) as disk:
        rows = list(disk.catalog.rows())
        aside = files.occupied(disk.folder / "quarantine")
    models = {model: [row for row in rows if row.label.fingerprint == model] for model in {r.label.fingerprint for r in rows}}
    data = {
        "folder": str(disk.folder),
        "chains": len(Chains(rows).all()),
        **totals(rows),
        "put_aside_bytes": aside,
        "models": [{"fingerprint": model.hex(), **totals(models[model])} for model in sorted(models)],
    }
    if as_json:
        typer.echo(json.dumps(data, indent=1))
        return
    typer.echo(f"folder   {data['folder']}")
    typer.echo(f"blocks   {data['blocks']:,} in {count(data['chains'], 'chain')}")
    typer.echo(f"size     {_sizes(data)}")
    typer.echo(f"saves    {data['seconds']:,.0f} s of prefill, if each block is used once")
    typer.echo(f"pinned   {_pieces(row.label for row in rows if row.pinned)}")
    typer.echo(f"bad      {show_size(aside)} put aside")
    for model in data["models"]:
        pieces, used = _counted(model["blocks"], model["checkpoints"]), _ago(model["used"])
        typer.echo(f"model    {model['fingerprint'][:8]}: {pieces}, {_sizes(model)}, used {used}")


def _sizes(totals: Mapping[str, Any]) -> str:
    """Bytes of rows and of checkpoints."""
    if not totals["checkpoints"]:
        return show_size(totals["bytes"])
    states = totals["checkpoint_bytes"]
    return f"{show_size(totals['bytes'])} ({show_size(totals['bytes'] - states)} of rows, {show_size(states)} of checkpoints)"


@app.command()
def verify(
    folder: Folder = None,
    repair: Annotated[bool, typer.Option("--repair", help="Put bad objects aside, and tidy what crashes left.")] = False,
) -> None:
    """Reads every object and checks all of it. Exit code 1 if any is bad, 0 once repaired."""
    import numpy as np

    from headstart.stores.disk import FormatError

    with _opened(folder) as disk:
        if repair:
            found, gone = disk.reconcile(evict=False)
            typer.echo(f"{count(len(found), 'object')} without a row found again")
            typer.echo(f"{count(len(gone), 'row')} without an object dropped")
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
    """Keeps a chain, with the checkpoints that it has now, whatever else has to go."""
    with _opened(folder) as disk:
        chains = _chains(disk)
        labels = [row.label for row in chains.of(chains.find(identity)).objects]
        disk.catalog.pin([label.key for label in labels], True)
        typer.echo(f"pinned: {_pieces(labels)}")


@app.command()
def unpin(identity: Id, folder: Folder = None) -> None:
    """Lets a chain go like any other, but for the blocks that other pinned chains need."""
    with _opened(folder) as disk:
        chains = _chains(disk)
        labels = {row.label.key: row.label for row in chains.of(chains.find(identity)).objects if row.pinned}
        needed = chains.needed(without=labels.keys()) & labels.keys()
        disk.catalog.pin(labels.keys() - needed, False)
        typer.echo(f"unpinned: {_pieces(label for key, label in labels.items() if key not in needed)}")
        if needed:
            typer.echo(f"still pinned, as other pinned chains need them: {_pieces(labels[key] for key in needed)}")


@app.command("rm")
def remove(
    identity: Annotated[str | None, typer.Argument(metavar="ID", help="The first digits of an id.")] = None,
    folder: Folder = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Everything that is not pinned, and bad objects put aside.")
    ] = False,
) -> None:
    """Deletes a chain with its checkpoints, but for the blocks that others hang on; or everything."""
    if (identity is None) == (not everything):
        raise ConfigError("Give an id, or --all.")
    with _opened(folder) as disk:
        if identity is None:
            disk.reconcile(evict=False)  # what has no row goes too
            disk.empty_quarantine()
            kept = _chains(disk).needed()
            rows = [row for row in disk.catalog.rows() if row.label.key not in kept]
        else:
            rows = _removable(_chains(disk), identity)
        gone = set(disk.remove([row.label.key for row in rows]))
        deleted = [row for row in rows if row.label.key in gone]
        typer.echo(f"deleted: {_pieces(row.label for row in deleted)}, {show_size(sum(row.allocated for row in deleted))}")


def _removable(chains: Chains, identity: str) -> list[Row]:
    """What only this chain has. Raises ConfigError: that is nothing, or it is pinned."""
    own = chains.of(chains.find(identity)).own
    if not own:
        raise ConfigError("Other chains hang on this block; `headstart cache ls` shows them.")
    if any(row.pinned for row in own):
        raise ConfigError(f"This chain is pinned; `headstart cache unpin {identity}` lets it go.")
    return list(own)


@app.command()
def gc(
    folder: Folder = None,
    size: Annotated[
        int | None, typer.Option(parser=size, metavar="SIZE", help="Evict until all fits into this, like 5GiB.")
    ] = None,
) -> None:
    """Tidies what crashes left and what can no longer be used; with --size also evicts, the least worth first."""
    with _opened(folder) as disk:
        found, gone = disk.reconcile(evict=False)
        aside = disk.empty_quarantine()
        lost = [row.label.key for row in _chains(disk).lost() if not row.pinned]
        disk.remove(lost)
        victims = [] if size is None else disk.catalog.victims((), disk.catalog.used() - size)
        disk.remove([row.label.key for row in victims])
        typer.echo(f"found again: {len(found)}; gone: {len(gone)}; without a beginning: {len(lost)}")
        typer.echo(f"evicted: {len(victims)}; put aside as bad, and deleted: {aside}")
        typer.echo(f"size: {show_size(disk.catalog.used())}")


@app.command("export")
def export_chains(
    file: File,
    identity: Annotated[list[str] | None, typer.Argument(metavar="ID", help="First digits of ids.")] = None,
    folder: Folder = None,
) -> None:
    """Writes chains (or all) to a tar file, for another machine with the same model, engine and settings.

    Checkpoints go with their chains. What is derived is left out, with what hangs on it: it is another machine's numbers.
    """
    from headstart.stores.disk import archive

    with _opened(folder) as disk:
        chains = _chains(disk)
        wanted = [chains.of(chains.find(one)) for one in identity] if identity else chains.all()
        rows = list({row.label.key: row for chain in wanted for row in chain.objects}.values())
        packed, left = archive.pack(disk, _track(rows, "writing"), file)
    typer.echo(f"exported: {_pieces(packed)}" + (f"; left out, as derived: {_pieces(left)}" if left else ""))


@app.command("import")
def import_chains(
    file: File,
    folder: Folder = None,
    disk_budget: DiskBudget = cast(int, "20GiB"),  # noqa: B008  (typer parses defaults too)
) -> None:
    """Takes in what `export` wrote. Every object is checked; what is bad is left out.

    Exit code 1 if any is bad, or if there was no room for all.
    """
    from rich.console import Console
    from rich.progress import open as tracked

    from headstart.stores.disk import archive

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
        with _opened(folder, disk_budget, make=True) as disk:
            taken = archive.take(disk, objects)
    typer.echo(f"imported: {_pieces(taken.stored)}; there before: {taken.known}; bad: {bad}")
    if taken.refused:
        typer.echo(f"no room for {_pieces(taken.refused)}; --disk-budget gives more, `headstart cache gc` makes some")
    if bad or taken.refused:
        raise typer.Exit(1)
