"""Makes docs/monitoring/dashboard.json, a dashboard for Grafana: `make docs`.

Each panel is a line below: what it shows, in which unit, and its queries. Places and ids follow from the order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.cli.look import LOOKS

ONLY = '{instance=~"$instance",model_name=~"$model"%s}'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def of(metric: str, more: str = "") -> str:
    """A metric of the chosen servers."""
    return metric + ONLY % (more and f",{more}")


def rate(metric: str, more: str = "") -> str:
    return f"rate({of(metric, more)}[$__rate_interval])"


def share(part: str, whole: str) -> str:
    """The share that a counter has of another one, over the time that the dashboard shows."""
    return f"sum(increase({of(part)}[$__range])) / sum(increase({of(whole)}[$__range]))"


def quantile(of_all: float, histogram: str) -> str:
    return f"histogram_quantile({of_all}, sum by (le) ({rate(f'{histogram}_bucket')}))"


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """A panel. `queries`: each with the name of its lines. `width`: of 24 columns."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    about: str = ""
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class RowSpec:
    title: str
    panels: Sequence[PanelSpec] = field(default_factory=list)


def stat(title: str, unit: str, query: str, about: str) -> PanelSpec:
    return PanelSpec(title, unit, [(query, "")], about, "stat", 6)


SECONDS_A_TOKEN = f"sum({rate('vllm:request_prefill_time_seconds_sum')}) / sum({rate('headstart:computed_tokens_total')})"

ROWS = (
    RowSpec(
        "Reuse",
        [
            stat(
                "Prompt tokens that were cached",
                "percentunit",
                share("vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_total"),
                "Of all prompt tokens of finished requests, in the time shown.",
            ),
            stat(
                "Tokens not computed again",
                "short",
                f"sum(increase({of('vllm:prompt_tokens_cached_total')}[$__range]))",
                "Cached prompt tokens, in the time shown.",
            ),
            stat(
                "Tokens computed again",
                "percentunit",
                share("headstart:recomputed_tokens_total", "vllm:prompt_tokens_total"),
                "Prompt tokens that an earlier prompt had computed, as a share of all.",
            ),
            stat(
                "Servers",
                "short",
                f"count({of('headstart:slots')})",
                "Servers that answer Prometheus and have loaded their model.",
            ),
            PanelSpec(
                "Prompt tokens by where they came from",
                "short",
                [
                    (f"sum by (tier) ({rate('headstart:cached_tokens_total')})", "{{tier}}"),
                    (f"sum({rate('headstart:computed_tokens_total')})", "computed"),
                ],
                "Tokens a second.",
                width=12,
                stacked=True,
            ),
            PanelSpec(
                "Tokens computed again, by cause",
                "short",
                [(f"sum by (cause) ({rate('headstart:recomputed_tokens_total')})", "{{cause}}")],
                "Tokens a second. docs/explain.md explains the causes; `headstart explain` shows the place in the prompt.",
                width=12,
                stacked=True,
            ),
            PanelSpec(
                "Seconds of prefill saved, about",
                "s",
                [(f"sum({rate('vllm:prompt_tokens_cached_total')}) * {SECONDS_A_TOKEN}", "saved a second")],
                "Cached tokens a second, times the seconds that a computed token takes now. Empty while nothing is computed.",
                width=12,
            ),
            PanelSpec(
                "Finished turns that were settled",
                "short",
                [
                    (f"sum({rate('headstart:settled_turns_total')})", "settled"),
                    (f"sum({rate('headstart:settle_given_up_total')})", "given up"),
                    (f"sum({rate('headstart:settled_tokens_total')})", "tokens computed for it"),
                ],
                "A second. Settling computes a finished turn, when idle, as the next request will send it.",
                width=12,
            ),
        ],
    ),
    RowSpec(
        "Latency",
        [
            PanelSpec(
                title,
                "s",
                [(quantile(0.5, histogram), "median"), (quantile(0.95, histogram), "95 %")],
                about,
            )
            for title, histogram, about in (
                ("Time to first token", "vllm:time_to_first_token_seconds", "From the arrival of a request."),
                ("Waiting for a slot", "vllm:request_queue_time_seconds", "Long waits: give more --slots."),
                ("Prefill", "vllm:request_prefill_time_seconds", "From a slot to the first token."),
                ("Between two parts of a reply", "vllm:inter_token_latency_seconds", "--stall limits pauses."),
                ("Decoding a reply", "vllm:request_decode_time_seconds", "From the first token to the last."),
                ("Whole requests", "vllm:e2e_request_latency_seconds", "From arrival to the end of the answer."),
            )
        ],
    ),
    RowSpec(
        "Requests",
        [
            PanelSpec(
                "Replies by how they ended",
                "reqps",
                [(f"sum by (finished_reason) ({rate('vllm:request_success_total')})", "{{finished_reason}}")],
            ),
            PanelSpec(
                "Running and waiting",
                "short",
                [
                    (f"sum({of('vllm:num_requests_running')})", "running"),
                    (f"sum({of('vllm:num_requests_waiting')})", "waiting"),
                    (f"sum({of('headstart:slots')})", "slots"),
                ],
            ),
            PanelSpec(
                "Refused, by status",
                "reqps",
                [(f"sum by (status) ({rate('headstart:refused_total')})", "{{status}}")],
                "429: the queue was full. Empty if nothing was refused since the start.",
            ),
            PanelSpec(
                "Tokens of replies",
                "short",
                [(f"sum({rate('vllm:generation_tokens_total')})", "tokens a second")],
                width=12,
            ),
            PanelSpec(
                "Requests that computed known text, by cause",
                "reqps",
                [(f"sum by (cause) ({rate('headstart:misses_total')})", "{{cause}}")],
                width=12,
                stacked=True,
            ),
        ],
    ),
    RowSpec(
        "Tiers",
        [
            PanelSpec(
                "Budget in use",
                "percentunit",
                [
                    (
                        f"sum by (tier) ({of('headstart:store_used_bytes')})"
                        f" / (sum by (tier) ({of('headstart:store_budget_bytes')}) > 0)",
                        "{{tier}}",
                    )
                ],
                "A full tier is normal: it evicts what is least useful.",
            ),
            PanelSpec(
                "Bytes in use",
                "bytes",
                [
                    (f"sum by (tier) ({of('headstart:store_used_bytes')})", "{{tier}}"),
                    (f"sum by (tier) ({of('headstart:store_reserved_bytes')})", "{{tier}} reserved"),
                ],
            ),
            PanelSpec(
                "Entries", "short", [(f"sum by (tier) ({of('headstart:store_entries')})", "{{tier}}")], "Blocks, checkpoints."
            ),
            PanelSpec(
                "Stored, evicted and erased entries",
                "short",
                [
                    (f"sum by (tier) ({rate('headstart:store_saved_total')})", "{{tier}} stored"),
                    (f"sum by (tier) ({rate('headstart:store_evictions_total')})", "{{tier}} evicted"),
                    (f"sum by (tier) ({rate('headstart:store_erased_total')})", "{{tier}} erased"),
                ],
                "A second.",
            ),
            PanelSpec(
                "Not stored, by reason",
                "short",
                [(f"sum by (tier, reason) ({rate('headstart:store_skipped_total')})", "{{tier}}: {{reason}}")],
                "Entries a second. Empty if all were stored.",
            ),
            PanelSpec(
                "Faults, by reason",
                "short",
                [(f"sum by (tier, reason) ({rate('headstart:store_faults_total')})", "{{tier}}: {{reason}}")],
                "A second. Each was treated as a miss. Empty if there was none.",
            ),
            PanelSpec(
                "Restored tokens",
                "short",
                [(f"sum by (tier) ({rate('headstart:restored_tokens_total')})", "{{tier}}")],
                "Tokens a second that were loaded into a slot.",
                width=12,
            ),
            PanelSpec(
                "Fetched from the shared store",
                "bytes",
                [(f"sum by (tier) ({rate('headstart:store_fetched_bytes_total')})", "{{tier}}")],
                "Bytes a second. All 0 without --shared.",
                width=12,
            ),
        ],
    ),
)


def _panels() -> Iterator[dict[str, Any]]:
    top, number, height = 0, 0, 0
    for row in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, top, 24, 1),
        }
        top, left = top + 1, 0
        for spec in row.panels:
            if left + spec.width > 24:
                top, left = top + height, 0
            number, height = number + 1, 4 if spec.kind == "stat" else 8
            yield _panel(spec, number, _place(left, top, spec.width, height))
            left += spec.width
        top += height


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(spec: PanelSpec, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if spec.stacked else {"fillOpacity": 0}
    return {
        "id": number,
        "type": spec.kind,
        "title": spec.title,
        "description": spec.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": spec.unit, "min": 0, **({"custom": custom} if spec.kind == "timeseries" else {})},
            "overrides": [_colour(name, look.dark) for name, look in LOOKS.items()] if spec.stacked else [],
        },
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for at, (query, legend) in enumerate(spec.queries)
        ],
    }


def _colour(name: str, colour: str) -> dict[str, Any]:
    fixed = {"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}
    return {"matcher": {"id": "byName", "options": name}, "properties": [fixed]}


def _variable(name: str, label: str) -> dict[str, Any]:
    query = f"label_values(headstart:slots, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> str:
    """docs/monitoring/dashboard.json."""
    made = {
        "uid": "headstart",
        "title": "headstart",
        "description": "What a prefix cache saves, and what it costs (docs/monitoring).",
        "tags": ["headstart", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                _variable("instance", "instance"),
                _variable("model", "model_name"),
            ]
        },
        "panels": [*_panels()],
    }
    return json.dumps(made, indent=1) + "\n"
