"""Ignored: fields of a body that this server does not know, and that might have changed the answer.

Clients send many fields. Most are identities, hints or accounting, and do not change the answer: `HARMLESS`. The name of any
other unknown field is in `headstart.ignored` of the answer, and once in the log. Values are never logged.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import structlog

HARMLESS = frozenset(
    # identities and accounting
    "metadata user safety_identifier client_metadata session_id chat_id request_id trace_id tags billing service_tier "
    "inference_geo store betas anthropic_beta anthropic_version extra_headers extra_query "
    # hints for a cache, a scheduler or a connection
    "cache_control prompt_cache_key prompt_cache_options prompt_cache_retention prompt_cache_breakpoint id_slot n_cache_reuse "
    "prediction priority keep_alive sse_ping_interval stream_options background_tasks timeout num_retries "
    # options of routers between client and server
    "api_base api_key base_url custom_llm_provider drop_params litellm_metadata provider route transforms".split()
)
"""Fields that do not change the answer."""

NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "add_generation_prompt": True,
        "echo": False,
        "include_reasoning": True,
        "include_stop_str_in_output": False,
        "length_penalty": 1,
        "modalities": ["text"],
        "n": 1,
        "repetition_penalty": 1,
        "return_progress": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "tfs_z": 1,
        "timings_per_token": False,
        "typ_p": 1,
        "typical_p": 1,
        "use_beam_search": False,
        "verbosity": "medium",
    }
)
"""Values that ask for what the server does anyway."""

MOST = 16
"""Most names in an answer."""
LONGEST = 64
"""Most characters of a name in an answer."""
REMEMBERED = 256
"""Most names that are logged."""

_PLAIN = re.compile(r"(?=.{1,40}$)[A-Za-z_]+(?:\d{1,2}[A-Za-z_]*)?")
"""Names that may be logged: nothing that could be a key or a text."""


def ignored(body: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """The fields of a body that are neither `known` nor harmless, and whose values are not neutral, in their order."""
    found = [name for name, value in body.items() if name not in known and name not in HARMLESS and _matters(name, value)]
    return tuple(name[:LONGEST] for name in found[:MOST])


def _matters(name: str, value: Any) -> bool:
    if value is None or value == [] or value == {} or value == "":
        return False
    if name in NEUTRAL and value == NEUTRAL[name]:
        return False
    return isinstance(value, bool) or value != 0


class IgnoredLog:
    """Logs each name once. Thread-safe, and bounded, because clients can invent names."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def note(self, names: Iterable[str], known: Iterable[str]) -> None:
        """Logs new names. `known`: names to suggest instead."""
        fresh = []
        with self._lock:
            for name in names:
                shown = name if _PLAIN.fullmatch(name) else "a name that is not a word"
                if shown not in self._seen and len(self._seen) < REMEMBERED:
                    self._seen.add(shown)
                    fresh.append(shown)
        if not fresh:
            return
        options = list(known)
        named = []
        for name in fresh:
            near = difflib.get_close_matches(name, options, 1, 0.8)
            named.append(f"{name} (did you mean {near[0]}?)" if near else name)
        structlog.get_logger("headstart.request").warning("request fields are ignored; logged once", fields=", ".join(named))
