"""No disk: the disk tier of a server without a disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from typing import TypeVar

from headstart.interfaces.tokens import Bytes
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.tiers.disk import Label, Note
from headstart.tiers.notices import Notice

T = TypeVar("T")


class NoDisk:
    """A `DiskTier` that refuses and holds nothing."""

    name = "disk"
    on = False
    listed = True
    hides = False
    used = budget = reserved = 0
    deletions = (0.0, 0)

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return 0

    def offer(self, label: Label, payload: Bytes, *, last: bool = False) -> bool:
        return False

    def discard(self, keys: Collection[bytes]) -> None:
        pass

    def pin(self, keys: Collection[bytes]) -> Future[bool]:
        return _done(True)

    def unpin(self, keys: Collection[bytes], *, own: bool = False) -> Future[None]:
        return _done(None)

    def erase(self, keys: Collection[bytes], owner: bytes) -> Future[int]:
        return _done(0)

    def read(self, wanted: Sequence[tuple[Label, Bytes]]) -> list[int | Exception]:
        return [FileNotFoundError("there is no disk") for _ in wanted]

    def find(self, keys: Sequence[bytes]) -> list[Label]:
        return []

    def report(self, keys: Collection[bytes]) -> Future[None]:
        return _done(None)

    def keep(self, keys: Collection[bytes]) -> None:
        pass

    def use(self, keys: Collection[bytes]) -> None:
        pass

    def replied(self, keys: Collection[bytes], request_traits: RequestTraits) -> None:
        pass

    def note(self, note: Note) -> None:
        pass

    def foreign(self) -> Mapping[bytes, Set[bytes]]:
        return {}

    def notices(self) -> list[Notice]:
        return []

    def obey(self, tombstone: int) -> None:
        pass

    def close(self, seconds: float) -> bool:
        return True


def _done(result: T) -> Future[T]:
    done: Future[T] = Future()
    done.set_result(result)
    return done
