"""The virtual disk loses in a power failure what a real one may lose, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

from headstart.testing.simulation.disk import VirtualDisk
from headstart.testing.simulation.faults import Faults
from headstart.testing.simulation.filesystem import ROOT, FileSystem
from headstart.testing.simulation.kernel import World, enter, leave


def test_a_durable_rename_makes_the_earlier_names_of_its_file_durable() -> None:
    """Otherwise the old name could come back, with a file that was deleted long ago."""
    for seed in range(20):
        disk = VirtualDisk(1 << 30)
        for folder in ("/objects", "/tmp"):
            disk.make(folder)
        disk.create("/tmp/new", 0.0)
        disk.rename("/tmp/new", "/objects/whole", 0.0)
        disk.sync_folder("/objects")
        disk.unlink("/objects/whole")
        disk.sync_folder("/objects")
        disk.lose_power(random.Random(seed))
        assert disk.names == {"/": {}, "/objects": {}, "/tmp": {}}


def test_a_name_that_was_not_made_durable_may_be_lost() -> None:
    found = set()
    for seed in range(20):
        disk = VirtualDisk(1 << 30)
        disk.make("/objects")
        disk.create("/objects/new", 0.0)
        disk.lose_power(random.Random(seed))
        found.add(bool(disk.names["/objects"]))
    assert found == {True, False}


def test_only_the_folder_of_the_cache_is_on_the_disk_that_fails(tmp_path: Path) -> None:
    """A server also looks at the file of its model, for example."""
    disk, faults = VirtualDisk(1 << 30), Faults()
    disk.make(ROOT)
    files, here = FileSystem(disk, faults, tmp_path), World(0)
    found = list[str]()

    def look() -> None:
        for path in ("/models/weights.gguf", f"{ROOT}x", f"{ROOT}/lock"):
            try:
                files.stat(path)
            except OSError as error:
                found.append(f"{path} {error.strerror}")

    faults.arm("eio")
    enter(here)
    try:
        task = here.spawn(look, "look", here.process("program"))
        here.run(lambda: task.ended, 1.0)
    finally:
        leave()
    assert found == [
        "/models/weights.gguf simulated: no such file",
        f"{ROOT}x simulated: no such file",
        f"{ROOT}/lock simulated: eio",
    ]
    assert faults.counts == {"eio": 1}
