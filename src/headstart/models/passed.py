"""Passed: who a caller is, as the front tells it to the process of a model.

The front has checked the key of a request. It passes the tenant on in place of the key, and the process believes it: nobody but
the front can connect to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headstart.api.auth import Key, Keys


@dataclass(frozen=True, slots=True)
class PassedKey:
    """A caller: `tenant`, whether it is the operator, and for how many seconds its data may be kept, or None."""

    tenant: str
    operator: bool = False
    expire: float | None = None

    def __bytes__(self) -> bytes:
        """As it stands in place of a key."""
        return f"{self.tenant}:{int(self.operator)}:{'' if self.expire is None else repr(self.expire)}".encode()

    @classmethod
    def parse(cls, text: bytes) -> PassedKey | None:
        tenant, *rest = text.decode("ascii", "replace").split(":")
        if len(rest) != 2 or rest[0] not in ("0", "1"):
            return None
        return cls(tenant, rest[0] == "1", float(rest[1]) if rest[1] else None)

    @property
    def key(self) -> Key:
        return Key((), self.tenant, self.operator, self.expire)


class PassedKeys(Keys):
    """The keys of a process that only the front can reach: whoever the front says.

    Args:
        known: whose data has a limit of its own before the first request arrives.
    """

    def __init__(self, known: Sequence[PassedKey] = ()) -> None:
        super().__init__()
        self.closed = True
        self._known = tuple(one.key for one in known)

    def all(self) -> Sequence[Key]:
        return self._known

    def find(self, candidates: Iterable[bytes]) -> Key | None:
        found = next((passed for text in candidates if (passed := PassedKey.parse(text)) is not None), None)
        return None if found is None else found.key
