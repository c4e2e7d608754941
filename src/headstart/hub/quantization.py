"""Quantisations: how a file's name says in which form its weights are, and which form is the first choice. Pure."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from headstart.model_names import model_name

PREFERENCE = (
    *("Q4_K_M", "UD-Q4_K_XL", "Q4_K_XL", "Q4_K_L", "Q4_K_S", "Q4_K", "IQ4_XS", "IQ4_NL", "MXFP4", "MXFP4_MOE", "Q4_1", "Q4_0"),
    *("UD-Q5_K_XL", "Q5_K_M", "Q5_K_S", "Q5_K", "Q5_1", "Q5_0", "UD-Q6_K_XL", "Q6_K", "UD-Q8_K_XL", "Q8_0"),
    *("UD-Q3_K_XL", "Q3_K_XL", "Q3_K_L", "Q3_K_M", "IQ3_M", "IQ3_S", "Q3_K", "Q3_K_S", "IQ3_XS", "IQ3_XXS", "UD-IQ3_XXS"),
    *("UD-Q2_K_XL", "Q2_K_L", "Q2_K", "Q2_K_S", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "TQ1_0", "IQ1_M", "IQ1_S"),
    *("BF16", "F16", "F32"),
)
"""The first choice comes first, if nobody names a quantisation. Four bits a weight cost little quality, and decoding takes as
long as reading the weights. Three bits and fewer are for machines into which nothing else fits. Forms that are not quantised
are last: they take twice the memory of Q8_0, and their answers are hardly better."""

_RANK = {name: number for number, name in enumerate(PREFERENCE)}
_KINDS = r"(?:(?:UD-)?(?:IQ|TQ|Q)\d(?:_(?:XXS|XS|XL|NL|S|M|L|K|[0148]))*|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32)"
_NAMED = re.compile(rf"(?:^|[-_.])({_KINDS})(?=$|[-_.])", re.IGNORECASE)
_ALSO = {"FP16": "F16", "FP32": "F32"}


def quantization_of(file: str) -> str:
    """The quantisation that a file's name ends with, in capitals; that of its folder if its own has none; "" if neither has.

    Args:
        file: the file's path in its repository, with `/`.
    """
    path = PurePosixPath(file)
    for name in (model_name(path.name), path.parent.name):
        if found := [match[1].upper() for match in _NAMED.finditer(name)]:
            return _ALSO.get(found[-1], found[-1])
    return ""


def preference(quantization: str) -> int:
    """A number that is lower for what is chosen first. Unknown quantisations are last."""
    return _RANK.get(quantization, len(PREFERENCE))
