"""Rows and checkpoints on disk: immutable objects, one each, beside a SQLite catalogue. docs/format.md describes both."""

from headstart.stores.disk.catalog import Model, Note
from headstart.stores.disk.format import FormatError, Label
from headstart.stores.disk.store import Disk

__all__ = ["Disk", "FormatError", "Label", "Model", "Note"]
