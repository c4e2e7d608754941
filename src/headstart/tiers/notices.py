"""Notices: what the disk has found out, as it is told to the engine thread."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.tiers.disk import Label, Note


@dataclass(frozen=True, slots=True)
class Stored:
    """An offered object is on disk, also after a crash."""

    label: Label


@dataclass(frozen=True, slots=True)
class Refused:
    """An offered object was not stored."""

    label: Label
    reason: str


@dataclass(frozen=True, slots=True)
class Appeared:
    """An object is on disk that was not known here."""

    label: Label


@dataclass(frozen=True, slots=True)
class Gone:
    """An object was evicted, or has turned out not to be there."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Erased:
    """An object was deleted for good: no tier may keep what it held."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Wiped:
    """Somebody has deleted all that was written `before`; or if that is 0, chains of which `Erased` has told."""

    before: float


@dataclass(frozen=True, slots=True)
class Noted:
    """A note was found."""

    note: Note


Notice = Stored | Refused | Appeared | Gone | Erased | Wiped | Noted
