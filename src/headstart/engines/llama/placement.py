"""Placement: reads what the device plan needs from the model's file and from the devices, before the weights are loaded."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.engines.gguf import KV_BYTES, read_facts
from headstart.engines.llama import devices as llama_devices
from headstart.engines.llama.binding import lib
from headstart.engines.llama.device_plan import ALL, DeviceMemory, DevicePlan, ModelNeeds, alternatives, part, plan
from headstart.engines.llama.load import CTX_STEP
from headstart.engines.options import EngineOptions

_BYTES = {"f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
"""Of a number in KV."""
_NOW = "these settings"


@dataclass(frozen=True)
class PlannedLayers:
    """Where a model goes.

    Attributes:
        layers: on a GPU, -1 for all.
        plan: None if there is no GPU to plan for.
        table: the plan, and what other settings would give: one row each, for people.
    """

    layers: int
    plan: DevicePlan | None = None
    table: tuple[dict[str, Any], ...] = ()


def place(path: Path, files: Sequence[Path], options: EngineOptions) -> PlannedLayers:
    """Plans the layers. Without a usable GPU, or if the file does not say what is needed, it is what the user chose, or none.

    Args:
        files: of the model, the first of which is `path`.
    """
    chosen = options.gpu_layers
    weights = sum(file.stat().st_size for file in files)
    if chosen == 0 or not lib.llama_supports_gpu_offload() or (device := _device(weights, options.together)) is None:
        return PlannedLayers(chosen or 0)
    needs = needs_of(path, weights, options.kv_type)
    if needs is None:
        return PlannedLayers(chosen or 0)
    found = plan(needs, device, ctx=options.ctx, slots=options.slots, layers=chosen)
    rows = {_NOW: found}
    if chosen is None:
        rows |= alternatives(needs, device, ctx=options.ctx, slots=options.slots, kv_type=options.kv_type)
    return PlannedLayers(found.layers, found, tuple(_row(name, one) for name, one in rows.items()))


def needs_of(path: Path, weights: int, kv_type: str) -> ModelNeeds | None:
    """What the model takes, by the header of its file. None if that does not say it."""
    facts = read_facts(path)
    kv = int(facts.kv / KV_BYTES * _BYTES[kv_type])
    return ModelNeeds(weights, facts.layers, kv, facts.ctx or 4096, CTX_STEP) if facts.layers else None


def _device(weights: int, together: Sequence[int]) -> DeviceMemory | None:
    """The GPUs as one device, as llama.cpp spreads layers over them. Integrated ones are used if there is no other.

    Of memory that is not the host's, a model among several gets its part: the host's is shared by those who load the models.
    """
    gpus = [device for device in llama_devices.devices() if device.is_gpu and device.total]
    used = [device for device in gpus if device.kind == llama_devices.GPU] or gpus
    if not used:
        return None
    shared = sys.platform == "darwin" and platform.machine() == "arm64"  # there ggml calls it a GPU
    unified = shared or all(device.kind == llama_devices.INTEGRATED for device in used)
    free = sum(device.free for device in used)
    if not unified:
        free = min(free, part(sum(device.total for device in used), weights, together))
    return DeviceMemory(", ".join(device.name for device in used), free, unified)


def _row(name: str, found: DevicePlan) -> dict[str, Any]:
    layers = "all" if found.layers == ALL else found.layers
    device = {"device": found.device.name, "device_free": found.device.free, "unified": found.device.unified}
    return {"with": name, "layers": layers, "slots": found.slots, "ctx": found.ctx, "device_bytes": found.bytes, **device}
