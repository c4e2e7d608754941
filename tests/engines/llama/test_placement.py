"""What is planned for a GPU, on real model files and devices that are made up: no machine with a GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from headstart.cli.doctor import plan_table
from headstart.engines.llama import devices as llama_devices
from headstart.engines.llama.binding import lib
from headstart.engines.llama.device_plan import ALL, BUFFERS
from headstart.engines.llama.devices import CPU, GPU, INTEGRATED, Device
from headstart.engines.llama.engine import LlamaEngine
from headstart.engines.llama.placement import PlannedLayers, needs_of, place
from headstart.engines.options import EngineOptions

MIB = 1 << 20
HOST = Device(CPU, "processor", 8 << 30, 8 << 30)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """The devices of a build that can use GPUs."""
    found = [HOST]
    monkeypatch.setattr(llama_devices, "devices", lambda: found)
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: True)
    return found


def placed(model: Path, **given: object) -> PlannedLayers:
    return place(model, [model], EngineOptions(str(model), **given))  # type: ignore[arg-type]


def test_a_build_without_a_gpu_plans_nothing(tiny_model: Path) -> None:
    assert placed(tiny_model) == PlannedLayers(0)
    assert placed(tiny_model, gpu_layers=3) == PlannedLayers(3)


def test_without_a_gpu_nothing_is_planned(tiny_model: Path, devices: list[Device]) -> None:
    assert placed(tiny_model) == PlannedLayers(0)
    devices.append(Device(GPU, "card", 4096 * MIB, 4096 * MIB))
    assert placed(tiny_model, gpu_layers=0) == PlannedLayers(0)
    assert placed(tiny_model).layers == ALL


@pytest.mark.parametrize("architecture", ["llama", "qwen35", "gemma3", "lfm2", "granitehybrid"])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_kv_is_estimated_from_the_file(architecture: str, kv_type: str, tmp_path: Path) -> None:
    """What the engine measures. Fault: all layers of hybrid models counted, with all heads if each layer has its own number."""
    model = tiny.write(tmp_path / "model.gguf", architecture)
    needs = needs_of(model, model.stat().st_size, kv_type)
    engine = LlamaEngine.load(EngineOptions(str(model), ctx=512, slots=1, threads=1, kv_type=kv_type), block_size=64)  # type: ignore[arg-type]
    host, layers = engine.host, engine.facts.details["layers"]
    engine.close()
    assert host is not None
    assert needs is not None
    assert needs.layers == layers
    assert 0 <= host.kv - needs.kv <= 12, "12 bytes are a cell's"


def test_nothing_is_planned_for_a_file_that_does_not_say_what_it_needs(tmp_path: Path, devices: list[Device]) -> None:
    """It would be taken for a model of one layer without KV."""
    devices.append(Device(GPU, "card", 4096 * MIB, 4096 * MIB))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert placed(tmp_path / "model.gguf") == PlannedLayers(0)
    assert placed(tmp_path / "model.gguf", gpu_layers=3) == PlannedLayers(3)


def test_cards_count_before_what_shares_the_hosts_memory(tiny_model: Path, devices: list[Device]) -> None:
    devices.append(Device(INTEGRATED, "chip", 1024 * MIB, 2048 * MIB))
    found = placed(tiny_model).plan
    assert found is not None
    assert (found.device.name, found.device.unified, found.ctx) == ("chip", True, None)
    devices += [Device(GPU, name, 2048 * MIB, 4096 * MIB) for name in ("one", "two")]
    found = placed(tiny_model).plan
    assert found is not None
    assert (found.device.name, found.device.unified, found.device.free) == ("one, two", False, 4096 * MIB)


def test_the_slots_are_those_that_the_card_allows(tiny_model: Path, devices: list[Device]) -> None:
    devices.append(Device(GPU, "card", 590 * MIB, 600 * MIB))
    wanted = placed(tiny_model)
    assert wanted.plan is not None
    engine = LlamaEngine.load(EngineOptions(str(tiny_model), threads=1), block_size=64)
    shape, details, host = engine.shape, engine.facts.details, engine.host
    engine.close()
    assert (shape.ctx, shape.slots) == (wanted.plan.ctx, wanted.plan.slots)
    assert details["gpu_layers"] == wanted.layers
    assert details["gpu_plan"] == list(wanted.table)
    assert host is not None
    assert host.share == wanted.plan.host_share
    assert host.live(512, 1) == int(host.share * host.size(512))
    table = plan_table(details["gpu_plan"])
    assert table.row_count == len(wanted.table)
    assert "memory of its own" in str(table.title)


def test_two_models_share_a_card_whoever_is_loaded_first(tmp_path: Path, devices: list[Device]) -> None:
    """Each finds the card as the other one has left it, and both have all their layers there."""
    models = [tiny.write(tmp_path / f"{name}.gguf", "llama", seed=number) for number, name in enumerate("ab")]
    together = tuple(model.stat().st_size for model in models)
    total = free = 1400 * MIB
    for model in models:
        devices[1:] = [Device(GPU, "card", free, total)]
        alone, found = placed(model).plan, placed(model, together=together).plan
        assert alone is not None
        assert found is not None
        assert found.layers == ALL
        assert found.bytes + BUFFERS <= total // 2
        free -= found.bytes + BUFFERS
    assert free >= 0
    devices[1:] = [Device(GPU, "card", total // 8, total)]  # another program has the rest
    left = placed(models[0], together=together).plan
    assert left is not None
    assert left.device.free == total // 8
    devices[1:] = [Device(INTEGRATED, "chip", free, total)]  # the host's memory has been shared by the server
    shared = placed(models[0], together=together).plan
    assert shared is not None
    assert shared.device.free == free
