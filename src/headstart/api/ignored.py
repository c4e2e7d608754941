"""Ignored: fields of a body that this server does not know, and that might have changed the answer.

Clients send many fields. Most are identities, hints or accounting, and do not change the answer: `HARMLESS`. The name of any
other unknown field is in `headstart.ignored` of the answer, and once in the log. Values are never logged.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
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
    "api_base api_key base_url custom_llm_provider drop_params litellm_metadata provider route transforms "
    # Ollama's options of how a model is loaded, and of contexts that are cut silently, which none is here
    "f16_kv logits_all low_vram main_gpu num_batch num_ctx num_gpu num_keep num_thread numa penalize_newline use_mlock "
    "use_mmap vocab_only".split()
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
        "shift": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "tfs_z": 1,
        "truncate": False,
        "timings_per_token": False,
        "typ_p": 1,
        "typical_p": 1,
        "use_beam_search": False,
        "verbosity": "medium",
    }
)
"""Values that ask for what the server does anyway."""

OFF_AT_ZERO = frozenset(
    "best_of dry_allowed_length dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff frequency_penalty min_keep "
    "min_tokens mirostat mirostat_mode n_discard n_indent n_keep n_probs nsigma penalty_alpha presence_penalty "
    "prompt_logprobs rep_pen_range repeat_last_n repetition_penalty_range smoothing_factor t_max_predict_ms "
    "t_max_prompt_ms top_a top_logprobs top_n_sigma truncate_prompt_tokens xtc_probability".split()
)
"""Options of other servers that are off if they are 0. In any other field a 0 says something: `temprature: 0` is greedy."""

MOST = 16
"""Most names in an answer."""
LONGEST = 64
"""Most characters of a name in an answer."""
REMEMBERED = 256
"""Most names that are logged."""

_PLAIN = re.compile(r"(?=.{1,40}$)(?:[a-z_]{1,20}\.){0,2}[A-Za-z_]+(?:\d{1,2}[A-Za-z_]*)?")
"""Names that may be logged: nothing that could be a key or a text."""


def ignored(body: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """The fields of a body that are neither `known` nor harmless, and whose values are not neutral, in their order.

    Args:
        known: names of fields that have an effect. A name with a dot is a field inside another one, in which other names are
            unknown: `reasoning.effort`.
    """
    found = _ignored(body, "", known, {name.rpartition(".")[0] for name in known})
    return tuple(islice((name[:LONGEST] for name in found), MOST))


def _ignored(given: Mapping[str, Any], within: str, known: Collection[str], objects: Collection[str]) -> Iterator[str]:
    for name, value in given.items():
        path = within + name
        if name in HARMLESS:
            continue
        if "." in name or path not in known:
            if _matters(name, value):
                yield path
        elif path in objects and isinstance(value, Mapping):
            yield from _ignored(value, f"{path}.", known, objects)


def _matters(name: str, value: Any) -> bool:
    if value is None or value == [] or value == {} or value == "":
        return False
    if name in NEUTRAL and value == NEUTRAL[name]:
        return False
    return isinstance(value, bool) or value != 0 or name not in OFF_AT_ZERO


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
            near = [] if name in options else difflib.get_close_matches(name, options, 1, 0.8)
            named.append(f"{name} (did you mean {near[0]}?)" if near else name)
        structlog.get_logger("headstart.request").warning("request fields are ignored; logged once", fields=", ".join(named))
