"""The conformance checks as parameters of a test: those that take long are slow tests."""

from __future__ import annotations

import pytest

from headstart.testing.conformance import CHECKS

PROMISES = [pytest.param(check, id=str(check), marks=[pytest.mark.slow] * check.long) for check in CHECKS]
