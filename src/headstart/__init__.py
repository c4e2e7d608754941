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
from headstart.output.parser import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
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
