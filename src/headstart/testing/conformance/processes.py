"""Processes: one that has used the engine ends as it should."""

from __future__ import annotations

import subprocess
import sys
from unittest import SkipTest

from headstart.testing import start_and_stop
from headstart.testing.conformance.driver import EngineUnderTest, expect

_SECONDS = 600
"""After this time a process hangs."""


def processes_end_with_code_0(subject: EngineUnderTest) -> None:
    """Whether the engine was closed before, or not."""
    if not subject.name:
        raise SkipTest("needs the engine's name, for a process of its own")
    for way in start_and_stop.WAYS:
        command = [sys.executable, "-m", start_and_stop.__name__, subject.name, way]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            expect(False, f"a process with the engine left {way} does not end in {_SECONDS} s")
        said = ended.stderr.strip().splitlines()[-1:] or ["nothing"]
        expect(ended.returncode == 0, f"a process with the engine left {way} ends with code {ended.returncode}: {said[0]}")
