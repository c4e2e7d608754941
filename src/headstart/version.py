"""The version, of which nobody needs the whole package to know it."""

__version__ = "0.1.0"
