"""The plots of the benchmarks show the numbers of docs/benchmarks.md, and those of a run."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.plots import page_policies, page_ratios, pair_ratios

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md").read_text("utf-8")


def titles(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]


def test_the_ratios_of_the_page_are_drawn() -> None:
    found = titles(page_ratios(PAGE))
    table = PAGE.partition("| figure | headstart | llama-server | ratio |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(found) == len(table) == 9
    for title, row in zip(found, table, strict=True):
        name, _, value = title.rpartition(": ")
        assert name in row
        assert float(row.split("|")[4].replace("*", "").split("(")[0]) == float(value)


def test_the_hits_of_the_page_are_drawn() -> None:
    found = titles(page_policies(PAGE))
    assert "value: 24.8%, 31.7%, 38.3%" in found
    assert "optimum: 46.5%, 62.2%, 81.5%" in found
    assert sum(title.startswith("lru: ") for title in found) == 5


def test_a_run_is_drawn() -> None:
    series = {
        "seconds": {"headstart": [1.0, 2.0, 3.0], "peer": [2.0, 2.0, 2.0]},
        "never": {"headstart": [1.0], "peer": [0.0]},
    }
    svg = pair_ratios(series, "peer")
    assert titles(svg) == ["seconds: 1"]
    assert "1 (0.5 – 1.5)" in svg


def test_a_page_without_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="substring not found"):
        page_ratios("# Benchmarks\n")
