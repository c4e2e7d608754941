"""The identity of an engine, which all that it has stored hangs on."""

from __future__ import annotations

from blake3 import blake3

from headstart.engines.llama.identity import digest_of


def test_what_is_on_disk_stays_under_its_fingerprint() -> None:
    """The form that identities have always been digested in."""
    said = b'{"build": null, "grid": 64, "system": "CPU : AVX2 = 1"}'
    assert digest_of({"system": "CPU : AVX2 = 1", "grid": 64, "build": None}) == blake3(said).digest()
