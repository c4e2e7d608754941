"""Exactness across machines: the logits after a fetch are those of a cold run, bit for bit, and the test can fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tiny
from effort import SLOW
from harness import check
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.serving.runtime import Runtime
from headstart.tiers.shared.keys import FleetKeys
from sharing import FleetLab, be_patient
from stores import ValkeyServer

CTX, SLOTS = 1024, 2
KINDS = {"attention": "llama", "sliding window": "gemma3", "hybrid": "qwen35"}


def load(model: Path, slots: int = SLOTS, block_size: int | None = 64) -> LlamaEngine:
    settings = Settings(model=str(model), ctx=CTX, slots=slots, threads=1, memory_budget=0)
    return LlamaEngine.load(settings.engine_options(), block_size=block_size)


def budget(engine: LlamaEngine, blocks: int, states: int) -> int:
    """Bytes for so many blocks and checkpoints beside the engine's own buffer."""
    shape = engine.shape
    return blocks * engine.traits.block_size * shape.kv_bytes_per_token + states * shape.state_bytes + shape.transfer_bytes


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def shared(tmp_path: Path, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    be_patient(monkeypatch)
    FleetKeys.generate().save(tmp_path / "fleet.key")
    return {"shared": valkey.url, "shared_key_file": tmp_path / "fleet.key"}


def histories(model: Path, shared: dict[str, Any], count: int) -> FleetLab:
    """Runs histories on two servers with one store, and compares with a third engine."""
    with ExitStack() as stack:
        cold = load(model, slots=1)
        stack.callback(cold.close)
        size = budget(cold, 40, 10)
        servers = [
            stack.enter_context(Runtime(lambda: load(model), Settings(reuse="exact", memory_budget=size, **shared)))
            for _ in range(2)
        ]
        lab = FleetLab(servers[0], cold, owners=3 * max(2, count // 3), fleet=servers)
        for seed in range(count):
            lab.run(seed)
        for server in servers:
            check(server)
            counters = server.cache.shared.counters
            assert counters["fetched"] > 0
            assert not [name for name in counters if name.startswith("fault")], counters
    return lab


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("count", [8 if SLOW else 5, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_what_is_fetched_is_what_a_cold_run_computes(tmp_path: Path, shared: dict[str, Any], kind: str, count: int) -> None:
    tally = histories(tiny.write(tmp_path / "tiny.gguf", KINDS[kind]), shared, count).tally
    assert tally.histories == count
    assert tally.compared >= count
    assert tally.wrong == 0, f"{tally.wrong} of {tally.compared} differ"
    assert tally.wrong_replies == 0, f"{tally.wrong_replies} of {tally.compared} replies differ"
    assert tally.events["shared"] >= count // 5, tally


def test_a_changed_row_of_another_server_shows(tmp_path: Path, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of every block that a server exports is wrong: without it, nothing above could fail."""
    export = LlamaEngine.export_kv

    def wrong(engine: LlamaEngine, slot: int, spans: Any) -> None:
        export(engine, slot, spans)
        for span in spans:
            span.data[7 * 64 + 1] ^= 0x04

    monkeypatch.setattr(LlamaEngine, "export_kv", wrong)
    assert histories(tiny.write(tmp_path / "tiny.gguf"), shared, 5).tally.wrong > 0
