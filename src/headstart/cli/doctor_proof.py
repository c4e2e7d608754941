"""Doctor's line about block size and calls: what the proof chose, and what that costs against the engine's best."""

from __future__ import annotations

import time

import numpy as np

from headstart.engines.proof import ordinary_tokens
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokens import Tokens
from headstart.units import count


def blocks_and_calls(engine: Engine) -> str:
    """For the engine's thread. It computes some calls, if each call has one block, and empties the first slot."""
    traits, batch, best = engine.traits, engine.shape.batch, engine.block_sizes.spanned[0]
    size = traits.block_size
    if not traits.canonical:
        return f"blocks of {count(size, 'token')}; no size was found exact"
    line = f"blocks of {count(size, 'token')}"
    if size > best:
        line += f", not {best}: up to {size - 1} known tokens are computed again, not {best - 1}"
    if traits.chunking:
        return f"{line}; calls of up to {batch}"
    line += f"; calls of {size}"
    longest = min(batch, engine.shape.ctx) // size * size
    if longest <= size:
        return line
    tokens = ordinary_tokens(engine.tokenizer, longest)
    small, large = prefill_speed(engine, tokens, size), prefill_speed(engine, tokens, longest)
    return f"{line}, not up to {batch}: prefill at {small:,.0f} tokens/s, not {large:,.0f}"


def prefill_speed(engine: Engine, tokens: Tokens, call: int) -> float:
    """Tokens a second of a prefill in calls of so many tokens: the faster of two runs."""
    seconds = []
    for _ in range(2):
        engine.truncate(0, 0)
        begun = time.perf_counter()
        for start in range(0, len(tokens), call):
            engine.prefill(0, np.asarray(tokens[start : start + call], np.int32), logits=False)
        seconds.append(time.perf_counter() - begun)
    engine.truncate(0, 0)
    return len(tokens) / max(min(seconds), 1e-9)
