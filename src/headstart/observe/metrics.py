"""Metrics: Prometheus metrics, with the names of vLLM and SGLang where they exist, else with `headstart:`.

The API records finished calls. Gauges and the tiers' counters are read from the runtime at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.explain.causes import Cause
from headstart.observe.report import Summary

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SOURCES = {"live": "device", "memory": "host", "disk": "storage", "shared": "storage"}
"""SGLang's name of each tier; any other tier is `storage`."""

LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """All metrics of one server, in a registry of their own.

    Args:
        snapshot: returns the current gauges, as `Runtime.snapshot`; None while there is no runtime.
    """

    def __init__(self, model: str, snapshot: Callable[[], dict[str, Any] | None]) -> None:
        self.registry = CollectorRegistry()
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets)
            return made.labels(model)

        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of finished requests.").labels(model)
        self._cached = counter("vllm:prompt_tokens_cached", "Prompt tokens that were not computed.").labels(model)
        self._generated = counter("vllm:generation_tokens", "Tokens of replies.").labels(model)
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up.").labels(model)
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found.").labels(model)
        self._success = counter("vllm:request_success", "Finished choices, by how they ended.", "finished_reason")
        self._sources = counter("sglang:cached_tokens", "Prompt tokens found, by where.", "cache_source")
        self._tiers = counter("headstart:cached_tokens", "Prompt tokens found, by tier (live: in a slot).", "tier")
        self._computed = counter("headstart:computed_tokens", "Prompt tokens that were computed.").labels(model)
        self._restored = counter("headstart:restored_tokens", "Prompt tokens loaded from a tier.", "tier")
        self._misses = counter("headstart:misses", "Requests that did not reuse all they could, by cause.", "cause")
        self._recomputed = counter("headstart:recomputed_tokens", "Prompt tokens computed again, by cause.", "cause")
        self._refused = counter("headstart:refused", "Calls answered with an error, by status.", "status")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", LONG)
        self._gap = histogram("vllm:inter_token_latency_seconds", "Between two deltas of a reply.", SHORT)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to the end of the answer.", LONG)
        self._queue = histogram("vllm:request_queue_time_seconds", "Waiting for a slot.", LONG)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From a slot to the first token.", LONG)
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.", LONG)
        for reason in ("stop", "length", "abort", "error"):  # a counter that begins at 0 shows its first increase too
            self._success.labels(model, reason)
        for cause in Cause:
            self._misses.labels(model, cause.value)
            self._recomputed.labels(model, cause.value)
        for tier in ("live", "memory", "disk"):
            self._tiers.labels(model, tier)
            self._sources.labels(model, SOURCES[tier])
        self.registry.register(_Gauges(model, snapshot))

    def record(self, summary: Summary, reasons: Sequence[str], seconds: float) -> None:
        """Counts a finished call. `reasons`: how each choice ended; `seconds`: from arrival to the end of the answer."""
        self._prompt.inc(summary.prompt)
        self._cached.inc(summary.cached)
        self._queries.inc(summary.prompt)
        self._hits.inc(summary.cached)
        self._generated.inc(summary.completion)
        self._computed.inc(summary.computed)
        for tier, tokens in {"live": summary.live, **summary.tiers}.items():
            if tokens:
                self._tiers.labels(self._model, tier).inc(tokens)
                self._sources.labels(self._model, SOURCES.get(tier, "storage")).inc(tokens)
        for tier, tokens in summary.tiers.items():
            self._restored.labels(self._model, tier).inc(tokens)
        if (found := summary.explanation) is not None:
            self._misses.labels(self._model, found.cause.value).inc()
            self._recomputed.labels(self._model, found.cause.value).inc(found.recomputed)
        for reason in reasons:
            self._success.labels(self._model, reason).inc()
        self._e2e.observe(seconds)
        self._queue.observe(summary.queued)
        self._prefill.observe(summary.prefill)
        self._ttft.observe(summary.ttft)
        if summary.completion > 1:
            self._decode.observe(summary.decode)

    def unfinished(self, how: str) -> None:
        """Counts a call that ended without an answer: `abort` by its caller, or `error`."""
        self._success.labels(self._model, how).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def gap(self, seconds: float) -> None:
        """Counts the time between two deltas of a reply."""
        self._gap.observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, model: str, snapshot: Callable[[], dict[str, Any] | None]) -> None:
        self._model = model
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        if now is None:
            return
        model = self._model

        def gauge(name: str, text: str, values: dict[tuple[str, ...], float], *labels: str) -> Metric:
            family = GaugeMetricFamily(name, text, labels=("model_name", *labels))
            for key, value in values.items():
                family.add_metric((model, *key), value)
            return family

        def counter(name: str, text: str, values: dict[tuple[str, ...], float], *labels: str) -> Metric:
            family = CounterMetricFamily(name, text, labels=("model_name", *labels))
            for key, value in values.items():
                family.add_metric((model, *key), value)
            return family

        tiers, counters, settle = now["tiers"], now["counters"], now["settle"]
        yield gauge("vllm:num_requests_running", "Choices that hold a slot.", {(): now["running"]})
        yield gauge("vllm:num_requests_waiting", "Choices that wait for a slot.", {(): now["waiting"]})
        yield gauge("headstart:slots", "Live sequences.", {(): len(now["slots"])})
        yield counter("headstart:settled_turns", "Finished turns that were settled.", {(): settle.get("turns", 0)})
        yield counter("headstart:settled_tokens", "Tokens computed to settle turns.", {(): settle.get("tokens", 0)})
        yield counter("headstart:settle_given_up", "Finished turns that were not settled.", {(): settle.get("given_up", 0)})
        for field, text in (
            ("used", "Bytes in use."),
            ("reserved", "Bytes of the budget that are kept for the disk's catalogue."),
            ("budget", "Bytes allowed."),
            ("entries", "Blocks, open tails and checkpoints."),
        ):
            unit = "" if field == "entries" else "_bytes"
            values: dict[tuple[str, ...], float] = {(name,): float(tier[field]) for name, tier in tiers.items()}
            yield gauge(f"headstart:store_{field}{unit}", text, values, "tier")
        for name, text in (
            ("saved", "Entries stored."),
            ("evicted", "Entries evicted."),
            ("thinned", "Checkpoints dropped."),
            ("erased", "Entries that expired or were deleted by their owner."),
            ("fetched", "Entries fetched from the shared store."),
            ("fetched_bytes", "Bytes of these."),
            ("missing", "Fetches that ended at an object that the shared store did not have."),
            ("saved_bytes", "Bytes written to the shared store."),
            ("audited", "Fetched blocks that were computed again, and equal."),
        ):
            metric = "evictions" if name == "evicted" else name
            yield counter(
                f"headstart:store_{metric}", text, {(t,): counts.get(name, 0) for t, counts in counters.items()}, "tier"
            )
        yield counter("sglang:evicted_tokens", "Tokens evicted.", {(): counters["memory"].get("evicted_tokens", 0)})
        for kind, text in (("skipped", "Entries not stored, by reason."), ("fault", "Faults counted as misses, by reason.")):
            found: dict[tuple[str, ...], float] = {
                (tier, name.removeprefix(f"{kind}_")): float(count)
                for tier, counts in counters.items()
                for name, count in counts.items()
                if name.startswith(f"{kind}_")
            }
            name = "skipped" if kind == "skipped" else "faults"
            yield counter(f"headstart:store_{name}", text, found, "tier", "reason")
