"""Plots of the benchmarks, as SVG: of a run, or of the tables in docs/benchmarks.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

from headstart.cli.charts import CurvePanel, Ratio, curve_panels, ratios

KINDS = {"value": "first", "lru": "second", "optimum": "best"}
"""How curves of policies are drawn; all others are `other`."""
_VALUE = re.compile(r"\**([\d.]+)\**(?: \(([\d.]+) – ([\d.]+)\))?")


def pair_ratios(series: Mapping[str, Mapping[str, Sequence[float]]], peer: str) -> str:
    """The ratios of a run: of each figure the median of its pairs, the least and the greatest."""
    rows = []
    for name, values in series.items():
        found = [a / b for a, b in zip(values["headstart"], values[peer], strict=True) if b]
        if found:
            rows.append(Ratio(name, *(round(value, 3) for value in (statistics.median(found), min(found), max(found)))))
    return ratios(rows, peer)


def policy_curves(shares: Mapping[tuple[str, str, str], float]) -> str:
    """One panel a trace: the share of prompt tokens that hit, by trace, budget and policy."""
    traces, budgets, names = (list(dict.fromkeys(key[at] for key in shares)) for at in range(3))
    panels = [
        CurvePanel(trace, budgets, {name: [shares.get((trace, budget, name)) for budget in budgets] for name in names})
        for trace in traces
    ]
    return curve_panels("Prompt tokens that hit, by budget", panels, {name: KINDS.get(name, "other") for name in names})


def growth_curves(medians: Mapping[str, Sequence[float | None]], sizes: Sequence[int]) -> str:
    """One panel an operation: its median (microseconds, or bytes) by the number of entries."""
    places = [f"10^{len(str(size)) - 1}" for size in sizes]
    panels = [CurvePanel(operation, places, {"median": values}) for operation, values in medians.items()]
    return curve_panels("Microseconds of CPU, or bytes, by stored entries", panels, {"median": "first"}, percent=False)


def page_ratios(page: str) -> str:
    """The ratios of the first table of the page."""
    _, rows = _table(page, "| figure | headstart | llama-server | ratio |")
    found = [(row[0], _VALUE.fullmatch(row[3])) for row in rows]
    return ratios([Ratio(name, *_numbers(one)) for name, one in found if one is not None], "llama-server")


def page_policies(page: str) -> str:
    """The hits of each policy in the page's table of policies."""
    head, rows = _table(page, "| trace | budget | value |")
    names = head[2 : head.index("optimum") + 1]
    shown = {(row[0], row[1], name): cell for row in rows for name, cell in zip(names, row[2:], strict=False)}
    return policy_curves({key: float(cell.removesuffix("%")) / 100 for key, cell in shown.items()})


def _numbers(found: re.Match[str]) -> Iterator[float]:
    yield float(found[1])
    yield float(found[2] or found[1])
    yield float(found[3] or found[1])


def _table(page: str, begins: str) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the first table that begins so."""
    found = page[page.index(begins) :].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in found]
    return cells[0], cells[2:]
