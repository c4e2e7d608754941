"""Gauges: the metrics of a server of several models: its own, and those of all loaded models in one text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.models.pool import ModelPool
from headstart.models.state import Phase


class PoolMetrics:
    """The front's own metrics."""

    def __init__(self, pool: ModelPool) -> None:
        self.registry = CollectorRegistry()
        self._refused = Counter(
            "headstart:front_refused", "Calls that no model was asked for, by status.", ("status",), registry=self.registry
        )
        self._unfinished = Counter(
            "headstart:front_unfinished", "Calls that ended while no model answered.", ("how",), registry=self.registry
        )
        self.registry.register(_PoolGauges(pool))

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def unfinished(self, how: str) -> None:
        self._unfinished.labels(how).inc()

    def render(self, others: Iterable[bytes]) -> bytes:
        """The text that Prometheus scrapes. `others`: the texts of the loaded models."""
        return merged([generate_latest(self.registry), *others])


class _PoolGauges(Collector):
    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        pool = self._pool
        phases = GaugeMetricFamily("headstart:model_state", "1 for the state of each model.", labels=("model_name", "state"))
        waiting = GaugeMetricFamily(
            "headstart:model_waiting", "Requests that wait until their model is loaded.", labels=("model_name",)
        )
        memory = GaugeMetricFamily(
            "headstart:model_memory_bytes", "Bytes that a loaded model may use; 0 if it is not loaded.", labels=("model_name",)
        )
        for pooled in pool.models:
            for phase in Phase:
                phases.add_metric((pooled.model.name, phase.value), float(pooled.state.phase is phase))
            waiting.add_metric((pooled.model.name,), len(pooled.waiting))
            memory.add_metric((pooled.model.name,), pooled.need if pooled.state.holds else 0)
        yield phases
        yield waiting
        yield memory
        yield GaugeMetricFamily("headstart:models_memory_budget_bytes", "Bytes for all models.", pool.shares.total)
        for name, text, value in (
            ("loads", "Models that were loaded.", pool.loads),
            ("failures", "Models that could not be loaded.", pool.failures),
            ("deaths", "Processes of models that ended unasked.", pool.deaths),
        ):
            yield CounterMetricFamily(f"headstart:model_{name}", text, value)


def merged(texts: Iterable[bytes]) -> bytes:
    """Several texts of metrics as one: all samples of a metric must stand together."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for text in texts:
        name = b""
        for line in text.splitlines():
            if line.startswith(b"# "):
                name = line.split(b" ", 3)[2]
            about, samples = families.setdefault(name, ([], []))
            if not line.startswith(b"# "):
                samples.append(line)
            elif line not in about:
                about.append(line)
    return b"".join(b"\n".join([*about, *samples, b""]) for about, samples in families.values())
