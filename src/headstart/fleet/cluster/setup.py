"""Setup: what all processes of a fleet must know. It is pickled and sent to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from headstart.api.auth import Keys
from headstart.api.browsers import BrowserGuard
from headstart.config import SETTINGS, Settings, default_cache_dir
from headstart.engines import registry
from headstart.engines.options import EngineOptions
from headstart.errors import ConfigError
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokenizer import LoadedTokenizer
from headstart.names import option
from headstart.observe.logs import LogFormat

APPLICATION = "headstart"
"""Name of the application in Ray Serve."""
REPLICA = "Replica"
"""Name of the deployment that computes."""
FRONT = "Front"
"""Name of the deployment that routes."""
GRACE = 120.0
"""Seconds in which a replica that stops may finish its replies. Then they are ended."""
NOTICED = 5.0
"""Seconds until a replica has noticed that it stops."""
_SCALE = re.compile(r"(\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas there are: at least and at most.

    Attributes:
        up, down: seconds for which the fleet must need more or fewer replicas before their number changes.
    """

    least: int
    most: int
    up: float = 5.0
    down: float = 300.0

    @classmethod
    def parse(cls, text: str) -> Scale:
        """`4`, or `2..8`. Raises ConfigError."""
        found = _SCALE.fullmatch(text.strip())
        if found is None:
            raise ConfigError(f"--replicas must be a number like 4 or a range like 2..8, not {text!r:.100}.")
        least, most = int(found[1]), int(found[2] or found[1])
        if not 1 <= least <= most:
            raise ConfigError(f"--replicas {text}: the first number must be 1 or more, and not more than the second.")
        return cls(least, most)


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """What a fleet serves, and how. Files that it names must be on every machine.

    Attributes:
        settings: of each replica.
        scale: number of replicas.
        fronts: number of processes that route.
        cpus: processors that Ray reserves for a replica.
        spread: whether a machine has at most one replica.
        usual_disk: whether a replica stores on disk where its own machine and user have caches, whatever `settings` say.
        api_keys, api_key_file, isolate, keep_noise, alias, allow_host, cors: as for one server (`api.serve.serve`).
        log_format: of the logs of its processes.
        grace: seconds in which a replica that stops may finish its replies.
        engine, tokenizer: load the engine of a replica and the tokenizer of a front, instead of those of the model in
            `settings`. For tests of fleets.
    """

    settings: Settings
    scale: Scale = Scale(1, 1)
    fronts: int = 1
    cpus: float = 1.0
    spread: bool = False
    usual_disk: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    isolate: str | None = None
    keep_noise: tuple[str, ...] = ()
    alias: tuple[str, ...] = ()
    allow_host: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    log_format: LogFormat = "console"
    grace: float = GRACE
    engine: Callable[[], Engine] | None = None
    tokenizer: Callable[[EngineOptions], LoadedTokenizer] = registry.load_tokenizer

    def keys(self) -> Keys:
        """The keys that open the fleet. Raises ConfigError."""
        return Keys(self.api_keys, self.api_key_file)

    def check(self) -> None:
        """Raises ConfigError for what would fail in each replica."""
        self.keys()
        BrowserGuard(self.allow_host, self.cors)

    def of_replica(self) -> Settings:
        """The settings of a replica, on its machine."""
        return replace(self.settings, cache_dir=default_cache_dir()) if self.usual_disk else self.settings

    def check_paths(self) -> None:
        """Raises ConfigError if a path is relative: on other machines it would mean something else."""
        paths = {name: getattr(self.settings, name) for name, row in SETTINGS.items() if row.kind.is_path}
        if paths["model"] == Settings().model:  # no path
            del paths["model"]
        for name, value in {**paths, "api_key_file": self.api_key_file}.items():
            path = Path(value) if isinstance(value, Path) or name == "model" else None
            if path is not None and not path.is_absolute():
                what = "MODEL" if name == "model" else option(name)
                remedy = f"give a path that is right on every machine, like {path.absolute()}."
                raise ConfigError(f"{what} {value} is a relative path: {remedy}")


def stopping(setup: FleetSetup) -> float:
    """Seconds in which the processes of a fleet may finish replies and store what only they have. Then Ray kills them."""
    return NOTICED + setup.grace + setup.settings.drain
