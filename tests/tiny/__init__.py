"""Tiny random-weight models, written as real GGUF files: every architecture is a row of `ARCHITECTURES`.

Vocabulary, merges and chat template are the bundled SmolLM2's, so that text, control tokens and turns look as in a real
model. Weights depend on the seed only.
"""

from __future__ import annotations

from tiny.architectures import ARCHITECTURES, CTX, LAYERS, STATEFUL, Architecture, write, write_adapter
from tiny.layers import HEAD, WIDTH, WINDOW, Array, Dice
from tiny.vocabulary import N_VOCAB, Vocabulary, demo_path, vocabulary

__all__ = [
    "ARCHITECTURES",
    "CTX",
    "HEAD",
    "LAYERS",
    "N_VOCAB",
    "STATEFUL",
    "WIDTH",
    "WINDOW",
    "Architecture",
    "Array",
    "Dice",
    "Vocabulary",
    "demo_path",
    "vocabulary",
    "write",
    "write_adapter",
]
