"""Metrics of a fleet: those of all replicas on one page, each sample with the label `replica`; and which replicas answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Pages(Collector):
    def __init__(self, pages: Mapping[str, bytes]) -> None:
        self._pages = pages

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("headstart:replica_up", "1 if the replica answers.", labels=["replica"])
        families: dict[str, Metric] = {up.name: up}
        for replica, page in self._pages.items():
            up.add_metric([replica], bool(page))
            for found in text_string_to_metric_families(page.decode()):
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        yield from families.values()


def merged(pages: Mapping[str, bytes]) -> bytes:
    """One page in Prometheus' text format, from the pages of the replicas by their tags; b"" for one that does not answer."""
    registry = CollectorRegistry()
    registry.register(_Pages(pages))
    return generate_latest(registry)
