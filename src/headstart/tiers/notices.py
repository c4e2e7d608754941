"""Notices: what the disk has found out, as it is told to the engine thread."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.tiers.disk import Label, Note


@dataclass(frozen=True, slots=True)
class ObjectStored:
    """An offered object is on disk, also after a crash."""

    label: Label


@dataclass(frozen=True, slots=True)
class ObjectRefused:
    """An offered object was not stored."""

    label: Label
    reason: str


@dataclass(frozen=True, slots=True)
class ObjectFound:
    """An object is on disk that was not known here."""

    label: Label


@dataclass(frozen=True, slots=True)
class ObjectGone:
    """An object was evicted, or has turned out not to be there."""

    key: bytes


@dataclass(frozen=True, slots=True)
class ObjectErased:
    """An object was deleted for good: no tier may keep what it held."""

    key: bytes


@dataclass(frozen=True, slots=True)
class EverythingErased:
    """Somebody has deleted all that was written `before`; or if that is 0, chains of which `ObjectErased` has told."""

    before: float


@dataclass(frozen=True, slots=True)
class NoteFound:
    """A note was found."""

    note: Note


Notice = ObjectStored | ObjectRefused | ObjectFound | ObjectGone | ObjectErased | EverythingErased | NoteFound
