"""Digests of files are remembered for as long as a file looks the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from blake3 import blake3

from headstart.engines import digest


def test_a_digest_is_remembered_for_as_long_as_the_file_looks_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, memo = tmp_path / "weights", tmp_path / "memo"
    file.write_bytes(b"weights")
    read: list[int] = []

    def reading(path: Path, _: object) -> bytes:
        read.append(1)
        return blake3(path.read_bytes()).digest()

    def once_more() -> bytes:
        monkeypatch.setattr(digest, "_known", {})  # another process
        read.clear()
        with monkeypatch.context() as patched:
            patched.setattr(digest, "_read", reading)
            return digest.digest(file, memo)

    assert once_more() == blake3(b"weights").digest()
    assert read
    assert once_more() == blake3(b"weights").digest()
    assert not read
    look = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(look.st_atime_ns, look.st_mtime_ns))
    assert once_more() == blake3(b"WEIGHTS").digest(), "same path, size, modification time and inode"
    unbounded = json.dumps({str(file.resolve()): [[float("inf")], "00"]}).encode()
    for damage in (b"", b"[]", b'{"x": 1}', b"\xff", b"[" * 200_000, unbounded):
        (memo / digest.MEMO).write_bytes(damage)
        assert once_more() == blake3(b"WEIGHTS").digest()
        assert read
    assert once_more()
    assert not read


def test_an_empty_file_has_a_digest(tmp_path: Path) -> None:
    """Fault: a folder with the user's llama.cpp had an empty file, and no model could be loaded."""
    file = tmp_path / "llama-lookahead"
    file.touch()
    assert digest.digest(file) == blake3(b"").digest()
