"""Engine options: what an engine must know to load a model, and nothing else of what a user chooses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # `--help` needs the options, and must not wait for numpy
    from headstart.interfaces.traits import EngineProof

KvType = Literal["f16", "bf16", "q8_0"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load a model. None leaves the choice to the engine.

    Attributes:
        model: path of the model, or `demo`.
        ctx: tokens a slot must hold, at least 1; None for the model's own context, less if memory is short.
        slots: live sequences, at least 1; None for as many as fit.
        threads: CPU threads; None for the number of physical cores.
        gpu_layers: layers to put on a GPU; -1 for all, None for what fits.
        kv_type: type of keys and values in memory.
        lora: adapter file.
        reserve: bytes of host memory that must stay free beside the model and its slots, because the caller will use them.
            None for what the engine's caller needs at least to store conversations.
        memory: most bytes of host memory for all of it, `reserve` included; None for what is free.
        together: bytes of weights of the models that GPUs must hold at the same time, where several are loaded: of the largest
            ones; empty if there is one model.
        proofs: of the last process of this server that had this model loaded. What they depend on may have changed since.
        exact: whether decoding must give the same bits every time, even if that makes it slower.
        llama_lib: the user's library of llama.cpp, or its folder; None for the one that the environment names, or that
            llama-cpp-python brings.
        state_dir: folder that remembers what was proved of engines and the digests of model files; None remembers nothing.
    """

    model: str
    ctx: int | None = None
    slots: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    kv_type: KvType = "f16"
    lora: Path | None = None
    reserve: int | None = None
    memory: int | None = None
    together: tuple[int, ...] = ()
    proofs: tuple[EngineProof, ...] = ()
    exact: bool = False
    llama_lib: Path | None = None
    state_dir: Path | None = None
