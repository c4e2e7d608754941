"""The metrics of a fleet on one page."""

from __future__ import annotations

from prometheus_client.metrics_core import Sample
from prometheus_client.parser import text_string_to_metric_families

from headstart.fleet.cluster.metrics import merged
from headstart.observe.metrics import Metrics


def test_each_sample_of_each_replica_is_there_once() -> None:
    pages = {}
    for number, tag in enumerate(("aa", "bb")):
        metrics = Metrics("model", lambda: None)
        for _ in range(number + 1):
            metrics.refused(400)
        pages[tag] = metrics.render()
    found = list(text_string_to_metric_families(merged(pages).decode()))
    assert len({family.name for family in found}) == len(found)
    for tag, page in pages.items():
        alone = {(one.name, tuple(sorted(one.labels.items())), one.value) for one in _samples(page.decode())}
        of_tag = [one for family in found for one in family.samples if one.labels["replica"] == tag and not is_up(one)]
        assert alone == {
            (one.name, tuple(sorted((k, v) for k, v in one.labels.items() if k != "replica")), one.value) for one in of_tag
        }
    refused = {one.labels["replica"]: one.value for family in found for one in family.samples if "refused_total" in one.name}
    assert refused == {"aa": 1.0, "bb": 2.0}


def is_up(sample: Sample) -> bool:
    return sample.name == "headstart:replica_up"


def test_a_replica_that_does_not_answer_is_named() -> None:
    page = merged({"aa": Metrics("model", lambda: None).render(), "bb": b""}).decode()
    assert {one.labels["replica"]: one.value for one in _samples(page) if is_up(one)} == {"aa": 1.0, "bb": 0.0}


def _samples(page: str) -> list:  # type: ignore[type-arg]
    return [one for family in text_string_to_metric_families(page) for one in family.samples]


def test_no_replica() -> None:
    assert not _samples(merged({}).decode())
