"""Ignored: fields of a body that this server does not know, and that might have changed the answer.

Clients send many fields. Most carry identities, hints and accounts, and an answer is the same without them: `HARMLESS`. A field
that is neither known nor harmless is named in `headstart.ignored` of the answer and once in the log. Values are never said.
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
    # who asks, for whom, and how that is accounted
    "metadata user safety_identifier client_metadata session_id chat_id request_id trace_id tags billing service_tier "
    "inference_geo store betas anthropic_beta anthropic_version extra_headers extra_query "
    # hints to a cache, a scheduler or a connection
    "cache_control prompt_cache_key prompt_cache_options prompt_cache_retention prompt_cache_breakpoint id_slot n_cache_reuse "
    "prediction priority keep_alive sse_ping_interval stream_options background_tasks timeout num_retries "
    # how routers in between work
    "api_base api_key base_url custom_llm_provider drop_params litellm_metadata provider route transforms".split()
)
"""Fields without which an answer says the same."""

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
"""Values with which fields say what is done anyway."""

MOST = 16
"""Names in an answer."""
LONGEST = 64
"""Characters of a name in an answer."""
REMEMBERED = 256
"""Names that were said in the log."""

_PLAIN = re.compile(r"(?=.{1,40}$)[A-Za-z_]+(?:\d{1,2}[A-Za-z_]*)?")
"""A name that can stand in a log: what a key or a text may look like does not."""


def ignored(body: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """The fields of a body that are neither `known` nor harmless, in their order, where their values say something."""
    found = [name for name, value in body.items() if name not in known and name not in HARMLESS and _says(name, value)]
    return tuple(name[:LONGEST] for name in found[:MOST])


def _says(name: str, value: Any) -> bool:
    if value is None or value == [] or value == {} or value == "":
        return False
    if name in NEUTRAL and value == NEUTRAL[name]:
        return False
    return isinstance(value, bool) or value != 0


class IgnoredLog:
    """Says each name once in the log. Thread-safe, and bounded: a client may make up names without end."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def note(self, names: Iterable[str], known: Iterable[str]) -> None:
        """`known`: what may have been meant."""
        fresh = []
        with self._lock:
            for name in names:
                said = name if _PLAIN.fullmatch(name) else "a name that is no word"
                if said not in self._seen and len(self._seen) < REMEMBERED:
                    self._seen.add(said)
                    fresh.append(said)
        if not fresh:
            return
        options = list(known)
        told = []
        for name in fresh:
            near = difflib.get_close_matches(name, options, 1, 0.8)
            told.append(f"{name} (did you mean {near[0]}?)" if near else name)
        structlog.get_logger("headstart.request").warning("request fields are ignored; said once", fields=", ".join(told))
