"""Faults: what goes wrong, at which call. A fault is armed first. It counts when a call has met it."""

from __future__ import annotations

import errno
import sqlite3
from collections import Counter
from dataclasses import dataclass

FILE_CALLS = ("open", "look", "write", "fsync", "rename", "unlink", "read", "list", "stat")
SQL_CALLS = ("select", "change", "commit")
STORE_CALLS = ("shared get", "shared have", "shared put", "shared touch", "shared limit", "shared delete", "shared list")
ERRNOS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "eacces": errno.EACCES, "emfile": errno.EMFILE, "eperm": errno.EPERM}
SQL_CODES = {
    "sql_full": (sqlite3.SQLITE_FULL, "database or disk is full"),
    "sql_io": (sqlite3.SQLITE_IOERR, "disk I/O error"),
    "sql_busy": (sqlite3.SQLITE_BUSY, "database is locked"),
    "sql_readonly": (sqlite3.SQLITE_READONLY, "attempt to write a readonly database"),
    "sql_corrupt": (sqlite3.SQLITE_CORRUPT, "database disk image is malformed"),
}
MEETS: dict[str, tuple[str, ...]] = {
    "enospc": ("write", "fsync", "rename"),
    "eio": FILE_CALLS,
    "eacces": ("open", "look", "rename", "unlink", "list"),
    "emfile": ("open", "look"),
    "eperm": ("unlink",),
    "short_write": ("write",),
    "short_read": ("read",),
    "bit_rot": ("read",),
    "missing": ("look",),
    "cut": ("read",),
    "slow": (*FILE_CALLS, *SQL_CALLS),
    "hung": (*FILE_CALLS, *SQL_CALLS),
    "hung_read": ("read",),
    "sql_full": ("change", "commit"),
    "sql_io": SQL_CALLS,
    "sql_busy": ("change",),
    "sql_readonly": ("change",),
    "sql_corrupt": ("select", "change"),
    "power_loss": (*FILE_CALLS, *SQL_CALLS),
    "kill": (*FILE_CALLS, *SQL_CALLS),
    "power_loss while writing": ("write", "fsync", "rename"),
    "power_loss in a commit": ("commit",),
    "kill while writing": ("write", "fsync", "rename", "commit"),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "export": ("export",),
    "import": ("import",),
    "export checkpoint": ("export checkpoint",),
    "import checkpoint": ("import checkpoint",),
    "rewind": ("rewind",),
    "store_refused": STORE_CALLS,
    "store_down": STORE_CALLS,
    "store_restarted": STORE_CALLS,
    "store_hung": STORE_CALLS,
    "store_slow": STORE_CALLS,
    "store_full": ("shared put",),
    "store_lost": ("shared put",),
    "store_unanswered": ("shared put", "shared touch", "shared limit", "shared delete"),
    "store_evicted": ("shared have", "shared get"),
    "store_half": ("shared get",),
    "store_rot": ("shared get",),
    "store_cut": ("shared get",),
    "store_swapped": ("shared get",),
}
"""The calls that each kind of fault can meet."""
KINDS = (*MEETS, "clock_jump", "little_space")
"""All kinds of faults. The last two meet who reads the clock, or asks for the free space."""
CRASHES = {name: name.partition(" ")[0] for name in MEETS if name.startswith(("power_loss", "kill"))}
"""What a crash is, by its kind, which also says when it comes."""
DISK_FAULTS = tuple(kind for kind, calls in MEETS.items() if calls[0] in (*FILE_CALLS, *SQL_CALLS) and kind not in CRASHES)
STORE_FAULTS = tuple(kind for kind in MEETS if kind.startswith("store_"))
ENGINE_FAULTS = tuple(kind for kind, calls in MEETS.items() if calls[0] not in (*FILE_CALLS, *SQL_CALLS, *STORE_CALLS))
STATE_FAULTS = ("export checkpoint", "import checkpoint", "rewind")
"""Those of models with a state only."""


@dataclass(slots=True)
class Armed:
    kind: str
    skip: int


class Faults:
    """The armed faults.

    Attributes:
        counts: faults that were met, by kind.
        crashing: crashes that a call has met, and that come while it runs.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.crashing = 0
        self._armed: list[Armed] = []
        self._meets: frozenset[str] = frozenset()  # the calls that the armed faults can meet

    def arm(self, kind: str, skip: int = 0) -> None:
        """The fault meets the call after the next `skip` ones that it could meet."""
        self._armed.append(Armed(kind, skip))
        self._meets |= frozenset(MEETS[kind])

    def disarm(self) -> None:
        self._armed.clear()
        self._meets = frozenset()

    def take(self, call: str) -> str | None:
        """The fault that this call meets, if any. The caller counts it when it has its effect."""
        if call not in self._meets:
            return None
        for armed in self._armed:
            if call in MEETS[armed.kind]:
                armed.skip -= 1
                if armed.skip < 0:
                    self._armed.remove(armed)
                    self._meets = frozenset(one for left in self._armed for one in MEETS[left.kind])
                    return armed.kind
        return None

    @property
    def total(self) -> int:
        return self.counts.total()


def os_error(kind: str, path: str) -> OSError:
    return OSError(ERRNOS[kind], f"simulated: {kind}", path)


def sql_error(kind: str) -> sqlite3.Error:
    code, text = SQL_CODES[kind]
    error = sqlite3.DatabaseError(text) if kind == "sql_corrupt" else sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error
