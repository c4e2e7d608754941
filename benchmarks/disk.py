"""The disk tier against the bare disk, in one run: `python -m benchmarks.disk [--size 1GiB]`.

First, objects are read into the memory tier and checked, against `dd` of as many bytes: from page cache, and from the disk
itself (the files are dropped from page cache, and `dd` reads directly). Then a reply is decoded while the KV of another
conversation's new prompt is written, against `--no-disk`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.client import Client
from benchmarks.servers import Server, Setup, demo_model, headstart
from benchmarks.workloads import text
from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import Disk, Label
from headstart.tiers.memory import Memory
from headstart.tiers.write_behind import WriteBehind
from headstart.units import parse_size, show_size

BLOCK = 64 * 23040
"""Bytes of a block of the bundled model."""
FINGERPRINT = bytes(32)
WORDS = 3200
"""Words of the prompt whose KV is written: about 3,500 tokens."""
REPLY = 400
"""Tokens of the reply. Decoding them takes longer than finished blocks stay in a slot before they are saved."""


def store(folder: Path, size: int) -> list[Label]:
    """Writes the objects of a chain, `size` bytes together."""
    dice = np.random.default_rng(0)
    disk = Disk(folder, 1 << 62)
    labels: list[Label] = []
    try:
        for number in range(size // BLOCK):
            key, parent = (one.to_bytes(32, "big") for one in (number + 1, number))
            label = Label(key, parent, FINGERPRINT, 64 * number, tuple(range(64)), True, 0.1)
            labels += disk.write([(label, dice.integers(0, 256, BLOCK, np.uint8))])[0]
    finally:
        disk.close()
    return labels


def forget(paths: list[Path]) -> None:
    """Removes files from page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def dd(path: Path, *options: str) -> float:
    """Bytes a second."""
    begun = time.perf_counter()
    try:
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none", *options], check=True)
    except subprocess.CalledProcessError:
        raise SystemExit(f"dd {' '.join(options)} cannot read from {path.parent}; give a folder on a disk: --folder") from None
    return path.stat().st_size / (time.perf_counter() - begun)


def reading(folder: Path, size: int, rounds: int) -> list[tuple[str, list[float], list[float]]]:
    """For each case: its name, headstart's rates and `dd`'s rates."""
    whole = folder / "whole"
    whole.write_bytes(bytes(1 << 20))
    dd(whole, "iflag=direct")  # fails early where direct reads are not supported
    labels = store(folder / "cache", size)
    objects = list((folder / "cache" / "objects").iterdir())
    with whole.open("wb") as file:
        for path in objects:
            file.write(path.read_bytes())
    memory = Memory(BLOCK, size + BLOCK)
    cells: list[Bytes] = []
    for _ in labels:
        cell = memory.allocate()
        assert cell is not None
        cells.append(memory.cell(cell))
        cells[-1][:] = 1  # touches the memory, as the first restore does
    behind = WriteBehind(lambda: Disk(folder / "cache", 1 << 62), FINGERPRINT, 0)

    def ours() -> float:
        begun = time.perf_counter()
        faults = behind.read(list(zip(labels, cells, strict=True)))
        took = time.perf_counter() - begun
        assert not any(isinstance(one, Exception) for one in faults)
        return len(labels) * BLOCK / took

    warm: tuple[list[float], list[float]] = ([], [])
    cold: tuple[list[float], list[float]] = ([], [])
    try:
        for _ in range(rounds):
            forget([*objects, whole])
            cold[0].append(ours())
            cold[1].append(dd(whole, "iflag=direct"))
            ours(), dd(whole)  # both into page cache
            warm[0].append(ours())
            warm[1].append(dd(whole))
    finally:
        behind.close(1)
    return [("read from page cache", *warm), ("read from disk", *cold)]


def written(server: Server) -> float:
    """Bytes in its disk tier."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = (line for line in lines if line.startswith("headstart:store_used_bytes{") and 'tier="disk"' in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def decoding(setup: Setup, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Tokens a second of a short conversation: while a long one's KV is written, and without a disk. Also the bytes written."""
    rates: tuple[list[float], list[float]] = ([], [])
    meanwhile: list[float] = []
    with headstart(setup) as on, headstart(setup, "--no-disk") as off:
        clients = [Client(on), Client(off)]
        for client in clients:
            client.chat([{"role": "user", "content": "Warm up."}], 8)
        for number in range(rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                chat = [{"role": "system", "content": text(f"behind {number}", WORDS)}, {"role": "user", "content": "Begin."}]
                clients[which].chat(chat, 2)
                before = written(on)
                sample = clients[which].chat([{"role": "user", "content": text(f"one {number}", 30)}], REPLY)
                rates[which].append(sample.rate)
                if clients[which].server is on:
                    meanwhile.append(written(on) - before)
    if not any(meanwhile):
        raise SystemExit("nothing was written while a reply was decoded, so there is nothing to compare")
    return *rates, meanwhile


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds (5)")
    parser.add_argument("--size", type=parse_size, default=1 << 30, help="bytes of rows (1GiB)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; the folder for temporary files by default")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        figures = reading(Path(folder), given.size, given.rounds)
    table = Table(
        "figure", "headstart", "beside it", "ratio (median of pairs)", title="the disk tier, against dd and --no-disk"
    )
    for name, ours, theirs in figures:
        values = (f"{show_size(statistics.median(one))}/s" for one in (ours, theirs))
        table.add_row(name, *values, _ratio(ours, theirs))
    ours, theirs, meanwhile = decoding(Setup(demo_model()), given.rounds)
    name = f"decode while {show_size(statistics.median(meanwhile))} are written, tokens/s"
    table.add_row(name, *(f"{statistics.median(one):.1f}" for one in (ours, theirs)), _ratio(ours, theirs))
    Console().print(table)


def _ratio(ours: list[float], theirs: list[float]) -> str:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})"


if __name__ == "__main__":
    main()
