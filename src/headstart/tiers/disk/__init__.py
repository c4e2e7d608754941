"""Entries on disk: one immutable object (a file) for each, and a SQLite catalogue. docs/format.md describes both."""

from headstart.tiers.disk.catalog import Note, StoredModel
from headstart.tiers.disk.format import FormatError, Label
from headstart.tiers.disk.store import Disk

__all__ = ["Disk", "FormatError", "Label", "Note", "StoredModel"]
