"""What a busy slot has computed is copied in time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from harness import submit, user
from headstart.config import Settings
from headstart.serving import kv_save
from headstart.serving.request import Delta
from headstart.serving.runtime import Runtime
from headstart.testing.fake_engine import FakeEngine
from live import wait_until

BLOCK_SIZE = 8


def test_a_computed_prompt_is_stored_at_once(tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next turn may go to another server as soon as the reply is over."""
    monkeypatch.setattr(kv_save, "SECURE_SOON", math.inf)
    (tmp_path / "store").mkdir()
    settings = Settings(reuse="exact", memory_budget=1 << 20, shared=f"file://{tmp_path}/store", shared_key_file=key_file)
    engine = {"slots": 2, "ctx": 8192, "block_size": BLOCK_SIZE, "batch": BLOCK_SIZE, "delay": 0.03}
    with Runtime(lambda: FakeEngine(**engine), settings) as rt:
        long = submit(rt, [user("a" * 8000)], max_tokens=1)
        short = submit(rt, [user("b" * 100)], max_tokens=4000, ignore_eos=True)
        short.until(Delta)
        prefilling, replying = sorted(rt.scheduler.jobs, key=lambda job: not job.prefilling)
        keys = replying.chain.ids
        assert len(keys) >= 100 // BLOCK_SIZE
        wait_until(lambda: not any(rt.cache.shared.lacks(key) for key in keys))
        assert prefilling.prefilling, "too late"
        assert rt.cache.shared.lacks(prefilling.chain.ids[0]), "it is not computed yet"
        long.handle.cancel()
        short.handle.cancel()
