"""How much is tried: a quarter by default, of what `--slow` tries."""

from __future__ import annotations

import os

import hypothesis

SLOW = bool(os.environ.get("HEADSTART_SLOW"))
"""Whether tests may take real time: `--slow` sets it before a test file is imported."""

NEW_SEED = "SIMULATION_SEED"
"""The variable that has the seed of the new histories of a run: of the environment, or else a random one."""


def examples(most: int, **options: int) -> hypothesis.settings:
    """Hypothesis' settings with `most` examples when slow, and a quarter of them by default."""
    return hypothesis.settings(max_examples=most if SLOW else most // 4, deadline=None, **options)
