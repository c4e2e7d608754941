"""headstart: a chat server and library for local LLMs that never computes the same prompt twice.

The library is imported when it is first used: most commands (`headstart cache ls`, `--help`) do not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from headstart.config import Settings
from headstart.errors import (
    Cancelled,
    ConfigError,
    Conflict,
    ContextTooLong,
    EngineError,
    HeadstartError,
    HubError,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    RequestError,
    Unavailable,
)
from headstart.version import __version__

if TYPE_CHECKING:
    from headstart.interfaces.sampling import Sampling
    from headstart.library.headstart import AsyncStream, Headstart, Reply, Stream, open
    from headstart.output.parser import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
else:
    _LATER = {
        "interfaces.sampling": {"Sampling"},
        "library.headstart": {"AsyncStream", "Headstart", "Reply", "Stream", "open"},
        "output.parser": {"ReasoningDelta", "TextDelta", "ToolCallDelta", "ToolCallStart"},
    }

    def __getattr__(name: str) -> object:
        for module, names in _LATER.items():
            if name in names:
                globals()[name] = found = getattr(import_module(f"headstart.{module}"), name)
                return found
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")


__all__ = [
    "AsyncStream",
    "Cancelled",
    "ConfigError",
    "Conflict",
    "ContextTooLong",
    "EngineError",
    "Headstart",
    "HeadstartError",
    "HubError",
    "InvalidRequest",
    "ModelError",
    "NotFound",
    "Overloaded",
    "ReasoningDelta",
    "Reply",
    "RequestError",
    "Sampling",
    "Settings",
    "Stream",
    "TextDelta",
    "ToolCallDelta",
    "ToolCallStart",
    "Unavailable",
    "__version__",
    "open",
]
