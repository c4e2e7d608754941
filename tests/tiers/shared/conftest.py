from __future__ import annotations

import numpy as np
import pytest

from headstart.interfaces.tier import STATE
from headstart.interfaces.tokens import Bytes
from headstart.tiers.disk import Label
from tiers_shared import OWNER


@pytest.fixture
def label() -> Label:
    return Label(b"k" * 32, b"p" * 32, b"f" * 32, 64, tuple(range(64)), True, 0.5, written=1e9, owner=OWNER)


@pytest.fixture
def state_label(label: Label) -> Label:
    return Label(b"s" * 32, label.key, label.fingerprint, 64, label.tokens, True, 0.5, STATE, 1e9, OWNER)


@pytest.fixture
def payload() -> Bytes:
    return np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
