"""`headstart cache`: what is stored can be listed, explained, verified, pinned and deleted by its owner."""

from __future__ import annotations

import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.config import default_cache_dir
from headstart.errors import ConfigError
from headstart.units import show_size

if TYPE_CHECKING:
    from headstart.stores.disk import Disk
    from headstart.stores.disk.chains import Chain, Chains

app = typer.Typer(
    name="cache",
    help="Shows and tends what is kept on disk. A chain is a prompt from its beginning; its id is that of its last block.",
    no_args_is_help=True,
)

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
File = Annotated[Path, typer.Argument(metavar="FILE", help="A tar file.")]
ALL = 1 << 62


@contextmanager
def _opened(folder: Path | None, budget: int = ALL) -> Iterator[Disk]:
    import sqlite3

    from headstart.stores.disk import Disk

    place = folder or default_cache_dir()
    if not (place / "index.sqlite").exists():
        raise ConfigError(f"Nothing is stored in {place}; --cache-dir names another folder.")
    try:
        disk = Disk(place, budget)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"Cannot open {place}: {error}.") from error
    try:
        yield disk
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{place}: {error}.") from error
    finally:
        disk.close()


def _chains(disk: Disk) -> Chains:
    from headstart.stores.disk.chains import Chains

    return Chains(disk.rows())


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


@app.command("ls")
def list_chains(
    folder: Folder = None, limit: Annotated[int, typer.Option(min=1, metavar="N", help="Most chains to show.")] = 50
) -> None:
    """Lists chains, the latest used first."""
    from rich.console import Console
    from rich.table import Column, Table

    with _opened(folder) as disk:
        chains = _chains(disk).all()
        table = Table(Column("id", no_wrap=True), "tokens", "size", "of its own", "saves", "used", "model", "")
        for chain in chains[:limit]:
            table.add_row(*_described(chain))
        Console().print(table)
        if len(chains) > limit:
            typer.echo(f"and {len(chains) - limit} more; see --limit")


def _described(chain: Chain) -> list[str]:
    last = chain.rows[-1]
    notes = ["pinned"] if last.pinned else []
    if not chain.complete:
        notes.append("its beginning is gone")
    return [
        chain.key.hex()[:12],
        f"{chain.tokens:,}",
        show_size(chain.allocated),
        show_size(sum(row.allocated for row in chain.own)),
        f"{sum(row.label.seconds for row in chain.rows):.1f} s",
        _ago(last.used),
        last.label.fingerprint.hex()[:8],
        ", ".join(notes),
    ]


@app.command()
def show(identity: Id, folder: Folder = None) -> None:
    """Shows one chain, block by block."""
    from rich.console import Console
    from rich.table import Column, Table

    with _opened(folder) as disk:
        chains = _chains(disk)
        table = Table(Column("block", no_wrap=True), "tokens", "size", "rows", "used", "first tokens", "")
        for row in chains.of(chains.find(identity)).rows:
            label = row.label
            table.add_row(
                label.key.hex()[:12],
                f"{label.start} – {label.start + len(label.tokens)}",
                show_size(row.allocated),
                "canonical" if label.canonical else "derived",
                _ago(row.used),
                " ".join(map(str, label.tokens[:6])),
                "pinned" if row.pinned else "",
            )
        Console().print(table)


@app.command()
def stats(folder: Folder = None) -> None:
    """Says how much is stored, for which models."""
    with _opened(folder) as disk:
        rows = list(disk.rows())
        typer.echo(f"folder   {disk.folder}")
        typer.echo(f"blocks   {len(rows):,} in {len(_chains(disk).all()):,} chains")
        typer.echo(f"size     {show_size(sum(row.allocated for row in rows))}")
        typer.echo(f"saves    {sum(row.label.seconds for row in rows):,.0f} s of prefill, once over")
        typer.echo(f"pinned   {sum(row.pinned for row in rows):,} blocks")
        for model in sorted({row.label.fingerprint for row in rows}):
            own = [row for row in rows if row.label.fingerprint == model]
            size = show_size(sum(row.allocated for row in own))
            typer.echo(f"model    {model.hex()[:8]}: {len(own):,} blocks, {size}, used {_ago(max(row.used for row in own))}")


@app.command()
def verify(
    folder: Folder = None,
    repair: Annotated[bool, typer.Option(help="Put bad objects aside, and tidy what crashes left.")] = False,
) -> None:
    """Reads every object and checks all of it. Exit code 1 if any is bad."""
    import numpy as np
    from rich.progress import track

    from headstart.stores.disk import FormatError

    with _opened(folder) as disk:
        if repair:
            found, gone = disk.reconcile()
            typer.echo(f"{len(found)} objects without a row were found again, {len(gone)} rows without an object dropped")
        bad = 0
        rows = list(disk.rows())
        for row in track(rows, "reading", transient=True):
            try:
                disk.read_into(row.label, np.empty(disk.inspect(row.label.key).size, np.uint8))
            except (FormatError, OSError) as error:
                bad += 1
                typer.echo(f"{row.label.key.hex()[:12]}: {error}")
                if repair:
                    disk.quarantine(row.label.key)
        typer.echo(f"{len(rows) - bad} of {len(rows)} objects are good")
    if bad:
        raise typer.Exit(0 if repair else 1)


@app.command()
def pin(identity: Id, folder: Folder = None) -> None:
    """Keeps a chain whatever else has to go."""
    _pin(identity, folder, True)


@app.command()
def unpin(identity: Id, folder: Folder = None) -> None:
    """Lets a chain go like any other."""
    _pin(identity, folder, False)


def _pin(identity: str, folder: Path | None, pinned: bool) -> None:
    with _opened(folder) as disk:
        chains = _chains(disk)
        chain = chains.of(chains.find(identity))
        # What other chains need stays as it is when one of them is let go.
        rows = chain.rows if pinned else chain.own
        count = disk.catalog.pin([row.label.key for row in rows], pinned)
        typer.echo(f"{'pinned' if pinned else 'unpinned'}: {count} blocks")


@app.command("rm")
def remove(
    identity: Annotated[str | None, typer.Argument(metavar="ID", help="The first digits of an id.")] = None,
    folder: Folder = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything that is not pinned.")] = False,
) -> None:
    """Deletes a chain, but for the blocks that others hang on; or everything."""
    if (identity is None) == (not everything):
        raise ConfigError("Give an id, or --all.")
    with _opened(folder) as disk:
        if identity is None:
            rows = [row for row in disk.rows() if not row.pinned]
        else:
            chains = _chains(disk)
            rows = list(chains.of(chains.find(identity)).own)
        gone = set(disk.remove([row.label.key for row in rows]))
        size = show_size(sum(row.allocated for row in rows if row.label.key in gone))
        typer.echo(f"deleted: {len(gone)} blocks, {size}")


@app.command()
def gc(
    folder: Folder = None,
    size: Annotated[str | None, typer.Option(metavar="SIZE", help="Evict until all fits into this, like 5GiB.")] = None,
) -> None:
    """Tidies what crashes left and what can no longer be used; with --size also evicts, the least worth first."""
    from headstart.units import parse_size

    with _opened(folder) as disk:
        found, gone = disk.reconcile()
        lost = [row.label.key for chain in _chains(disk).all() if not chain.complete for row in chain.rows if not row.pinned]
        disk.remove(lost)
        evicted = 0
        if size is not None:
            try:
                need = disk.catalog.used() - parse_size(size)
            except ValueError as error:
                raise ConfigError(f"--size: {error}.") from None
            victims = disk.catalog.victims((), need)
            disk.remove([row.label.key for row in victims])
            evicted = len(victims)
        typer.echo(f"found again: {len(found)}; gone: {len(gone)}; without a beginning: {len(lost)}; evicted: {evicted}")
        typer.echo(f"size: {show_size(disk.catalog.used())}")


@app.command("export")
def export_chains(
    file: File,
    identity: Annotated[list[str] | None, typer.Argument(metavar="ID", help="First digits of ids.")] = None,
    folder: Folder = None,
) -> None:
    """Writes chains (or all) to a tar file, for another machine with the same model, engine and settings."""
    with _opened(folder) as disk:
        chains = _chains(disk)
        wanted = [chains.of(chains.find(one)) for one in identity] if identity else chains.all()
        keys = dict.fromkeys(row.label.key for chain in wanted for row in chain.rows)
        with tarfile.open(file, "w") as tar:
            for key in keys:
                tar.add(disk.path(key), arcname=disk.path(key).name)
        typer.echo(f"exported: {len(keys)} blocks")


@app.command("import")
def import_chains(file: File, folder: Folder = None) -> None:
    """Takes in what `export` wrote. Every object is checked; what is bad is left out."""
    import numpy as np

    from headstart.config import Settings
    from headstart.stores.disk import Disk, FormatError
    from headstart.stores.disk.format import checksum, decode, header_size

    disk = Disk(folder or default_cache_dir(), Settings().disk_budget)
    taken = bad = 0
    try:
        with tarfile.open(file) as tar:
            for member in tar:
                stream = tar.extractfile(member)
                data = np.frombuffer(stream.read() if stream is not None else b"", np.uint8)
                try:
                    header = decode(data[: header_size(data[:32].tobytes())].tobytes(), len(data))
                    if checksum(data[header.at :]) != header.checksum:
                        raise FormatError("corrupt", "its rows are not what was written")
                except FormatError as error:
                    typer.echo(f"{member.name}: {error}")
                    bad += 1
                    continue
                if header.label.key not in disk:
                    taken += len(disk.write([(header.label, data[header.at :])])[0])
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"Cannot read {file}: {error}.") from error
    finally:
        disk.close()
    typer.echo(f"imported: {taken} blocks; bad: {bad}")
