from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headstart.models.gauges import merged

ONE = b'# HELP x_total X.\n# TYPE x_total counter\nx_total{m="a"} 1.0\n# HELP y Y.\n# TYPE y gauge\ny{m="a"} 2.0\n'
OTHER = b'# HELP y Y.\n# TYPE y gauge\ny{m="b"} 3.0\n# HELP x_total X.\n# TYPE x_total counter\nx_total{m="b"} 4.0\n'


def test_samples_of_all_models_stand_under_one_metric() -> None:
    families = {family.name: family for family in text_string_to_metric_families(merged([ONE, OTHER]).decode())}
    assert sorted(families) == ["x", "y"]
    assert [(sample.labels["m"], sample.value) for sample in families["x"].samples] == [("a", 1.0), ("b", 4.0)]
    assert merged([ONE, OTHER]).count(b"# TYPE y gauge") == 1
