"""How long a parallel read waits for a disk."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from headstart.interfaces.tokens import Bytes
from headstart.tiers import parallel_read
from headstart.tiers.disk import Label
from headstart.tiers.parallel_read import Hung, ParallelRead

SIZE = 1 << 10
LABEL = Label(b"k" * 32, b"r" * 32, b"f" * 32, 0, (1,), canonical=True)


@dataclass
class Trickle:
    """A disk that sends one byte every 20 ms, and never all of them until it is released."""

    moved: int = 0
    released: threading.Event = field(default_factory=threading.Event)

    def read(self, wanted: tuple[Label, Bytes]) -> int:
        while not self.released.wait(0.02):
            self.moved += 1
        return wanted[1].nbytes


def test_a_disk_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some bytes come all the time, but too few: the engine thread waits for so long as their size deserves."""
    monkeypatch.setattr(parallel_read, "STUCK", 0.5)
    monkeypatch.setattr(parallel_read, "SLOWEST", 10 * SIZE)
    disk, begun = Trickle(), time.monotonic()
    ((hung,), (over,)) = ParallelRead(disk.read, [(LABEL, np.zeros(5 * SIZE, np.uint8))], lambda: disk.moved).run()
    seconds = time.monotonic() - begun
    assert isinstance(hung, Hung)
    assert 1.0 <= seconds < 5.0
    assert disk.moved
    assert not over.is_set()
    disk.released.set()
    assert over.wait(30)
