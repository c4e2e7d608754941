"""headstart: a chat server and library for local LLMs that never computes the same prompt twice."""

__version__ = "0.1.0"
