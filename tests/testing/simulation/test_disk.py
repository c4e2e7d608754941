"""The virtual disk loses in a power failure what a real one may lose, and nothing else."""

from __future__ import annotations

import random

from headstart.testing.simulation.disk import VirtualDisk


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
