"""Tokens and bytes, in the form in which all packages pass them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""Token ids, one dimension."""
Bytes = npt.NDArray[np.uint8]
"""Bytes of KV or state, one dimension."""
BlockId = bytes
"""32 bytes that name a block together with everything before it (`prefix_cache/blocks`)."""


def as_tokens(values: object) -> Tokens:
    """An immutable array of tokens: int32, one dimension."""
    array = np.array(values, dtype="<i4").reshape(-1)
    array.flags.writeable = False
    return array


def utf8(text: str) -> bytes:
    """A text's bytes. Lone surrogates, which JSON can contain, are encoded too."""
    return text.encode("utf-8", "surrogatepass")


def common_prefix(a: Tokens, b: Tokens) -> int:
    """The number of leading tokens that `a` and `b` share."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
