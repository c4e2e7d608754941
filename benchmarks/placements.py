"""Placements of checkpoints, for comparison: headstart uses `lattice`."""

from __future__ import annotations

from headstart.prefix_cache.checkpoints import LATTICE, Placement

_MESSAGES_GAP = 8_192

PLACEMENTS: dict[str, Placement] = {
    "lattice": LATTICE,
    "last": Placement(lambda *_: (), lambda *_: ()),
    "marconi": Placement(lambda _, __, branch, ___: (branch,), lambda held, _: held),
    "messages": Placement(
        lambda end, _, __, landmarks: (*range(_MESSAGES_GAP, end, _MESSAGES_GAP), *landmarks), lambda held, _: held
    ),
    "every": Placement(lambda end, block_size, _, __: range(block_size, end, block_size), lambda held, _: held),
}
"""`last`: at the end only. `marconi`: also where prompts diverge (after Marconi, MLSys 2025). `messages`: at landmarks and
every 8,192 tokens (after mlx-lm's server). `every`: at each block boundary."""
