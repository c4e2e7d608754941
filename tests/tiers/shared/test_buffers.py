"""Buffers are used again, by one object at a time, and only so many are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.interfaces.tokens import Bytes
from headstart.tiers.shared.buffers import STEP, Buffers

MOST = 4 * STEP


@dataclass
class User:
    buffer: Bytes
    give: Callable[[], None]
    mark: int


@examples(100)
@given(st.lists(st.tuples(st.sampled_from(["take", "give", "again"]), st.integers(1, 3 * STEP)), max_size=30))
def test_no_two_objects_have_the_same_memory(steps: list[tuple[str, int]]) -> None:
    """Fault: a buffer that is given back twice gets two users, and one KV is the other's."""
    buffers, users, gone = Buffers(MOST), list[User](), list[User]()
    for mark, (what, size) in enumerate(steps):
        if what == "take":
            buffer = buffers.take(size)
            assert len(buffer) == size
            buffer[:] = mark
            users.append(User(buffer, buffers.giver(buffer), mark))
        elif what == "give" and users:
            gone.append(users.pop(size % len(users)))
            gone[-1].give()
        elif gone:
            gone[size % len(gone)].give()
        assert buffers.free <= MOST
        assert all((one.buffer == one.mark).all() for one in users)


def test_a_buffer_is_used_again_by_an_object_of_about_its_size() -> None:
    buffers = Buffers(MOST)
    first = buffers.take(STEP + 1)
    buffers.giver(first)()
    assert buffers.free == 2 * STEP
    other, same = buffers.take(STEP), buffers.take(2 * STEP)
    assert np.shares_memory(first, same)
    assert not np.shares_memory(first, other)
    assert buffers.free == 0
