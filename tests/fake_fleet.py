"""Runs a fleet of fake engines until it is stopped. Its argument is JSON: see `fleets.running`."""

from __future__ import annotations

import json
import sys
from functools import partial

from headstart.config import Settings
from headstart.fleet.cluster import launch
from headstart.fleet.cluster.setup import FleetSetup, Scale
from headstart.testing.fake_engine import FakeEngine

if __name__ == "__main__":
    what = json.loads(sys.argv[1])
    setup = FleetSetup(
        Settings(**{"memory_budget": 8 << 20, **what["settings"]}),
        Scale.parse(str(what["replicas"])),
        cpus=0.1,
        grace=what["grace"],
        api_keys=tuple(what["keys"]),
        engine=partial(FakeEngine, **what["engine"]),
        tokenizer=FakeEngine.load_tokenizer,
    )
    with launch.fleet(setup, "127.0.0.1", what["port"], direct=what["direct"]):
        launch.until_signal()
