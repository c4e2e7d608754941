"""Two real servers on one folder: a chain that an owner deletes at one of them is gone at the other one too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from killed import text
from live import wait_until
from process import BUNDLED, run, serving

pytestmark = pytest.mark.slow  # it starts two servers


def chains(url: str) -> dict[str, dict[str, int]]:
    """The tokens of each chain, by tier."""
    listed = httpx.get(f"{url}/headstart/cache", timeout=60).raise_for_status().json()
    return {one["id"]: one["tiers"] for one in listed["data"]}


def post(url: str, words: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 2}
    found: dict[str, Any] = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    return found


def test_what_only_the_memory_of_the_other_one_has_is_deleted_too(tmp_path: Path, tiny_model: Path) -> None:
    options = (str(tiny_model), *BUNDLED, "--port", "0", "--cache-dir", str(tmp_path), "--settle", "off")
    with serving(*options) as one, serving(*options) as other:
        urls = one.address(), other.address()
        for url in urls:
            assert post(url, text(1, 150))["usage"]["prompt_tokens"] > 128
            wait_until(lambda url=url: any(tiers.get("disk", 0) >= 128 for tiers in chains(url).values()))  # type: ignore[misc]
        assert not run("cache", "gc", "--size", "0", "--cache-dir", str(tmp_path)).returncode
        for url in urls:  # the disk has evicted all of it, and memory has it still
            wait_until(lambda url=url: all("disk" not in tiers for tiers in chains(url).values()))  # type: ignore[misc]
            assert any(tiers["memory"] >= 128 for tiers in chains(url).values())
        for key in chains(urls[0]):
            httpx.delete(f"{urls[0]}/headstart/cache/{key}", timeout=60).raise_for_status()
        wait_until(lambda: not chains(urls[1]), 10)
        assert not other.end()  # which writes to disk what only its memory has
        assert not one.end()
    assert not [*(tmp_path / "objects").iterdir()]
