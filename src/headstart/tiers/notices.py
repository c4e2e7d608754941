"""Notices: messages from the disk thread to the engine thread."""

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
    """An object was found on disk that this process did not know, for example one of another process."""

    label: Label


@dataclass(frozen=True, slots=True)
class ObjectGone:
    """An object was evicted, or is missing."""

    key: bytes


@dataclass(frozen=True, slots=True)
class ObjectErased:
    """An object was deleted by its owner: no tier may keep its content."""

    key: bytes


@dataclass(frozen=True, slots=True)
class EverythingErased:
    """Everything that was written up to `before` was deleted."""

    before: float


@dataclass(frozen=True, slots=True)
class OwnersErased:
    """Another process has deleted entries of these owners; None for anybody's. Some of them may never have been on disk.

    `number`: of the latest tombstone that it stands for.
    """

    number: int
    owners: frozenset[bytes] | None


@dataclass(frozen=True, slots=True)
class NoteFound:
    """A note was found."""

    note: Note


@dataclass(frozen=True, slots=True)
class PinsFound:
    """The pins have changed: these objects are pinned, and no others."""

    keys: frozenset[bytes]


Notice = (
    ObjectStored
    | ObjectRefused
    | ObjectFound
    | ObjectGone
    | ObjectErased
    | EverythingErased
    | OwnersErased
    | NoteFound
    | PinsFound
)
