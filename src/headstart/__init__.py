"""headstart: a chat server and library for local LLMs that never computes the same prompt twice."""

from headstart.config import Settings
from headstart.errors import (
    Cancelled,
    ConfigError,
    ContextTooLong,
    EngineError,
    HeadstartError,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    RequestError,
    Unavailable,
)
from headstart.interfaces.engine import Sampling
from headstart.library.headstart import AsyncStream, Headstart, Reply, Stream, open
from headstart.version import __version__

__all__ = [
    "AsyncStream",
    "Cancelled",
    "ConfigError",
    "ContextTooLong",
    "EngineError",
    "Headstart",
    "HeadstartError",
    "InvalidRequest",
    "ModelError",
    "NotFound",
    "Overloaded",
    "Reply",
    "RequestError",
    "Sampling",
    "Settings",
    "Stream",
    "Unavailable",
    "__version__",
    "open",
]
