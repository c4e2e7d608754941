"""What a grammar costs while a reply is decoded: `python -m benchmarks.constrained [--rounds 9] [--tokens 128]`.

For each case, each round samples a reply with the grammar and one of the same length without it, for the same prompt, in
alternating order, in one process. Reported: tokens a second of both, the median of the ratios within pairs, and the time to
compile the grammar.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.servers import demo_model
from benchmarks.workloads import text
from headstart.config import Settings
from headstart.engines.llama import LlamaEngine
from headstart.interfaces.conversation import Conversation
from headstart.interfaces.generation import GenerationParams
from headstart.interfaces.sampling import GREEDY, Grammar, Sampling
from headstart.serving.request import Failed, Finished, Report, Request
from headstart.serving.runtime import Runtime

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "pattern": "^[a-z]{1,20}@[a-z]{1,20}\\.com$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}


def people() -> Grammar:
    return Grammar("json_schema", json.dumps({"type": "array", "items": PERSON, "minItems": 60, "maxItems": 80}))


def tools() -> dict[str, Any]:
    """16 tools with 12 arguments each, about as large as those of a coding agent. The reply must call one."""

    def arguments(tool: int) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"type": "string", "description": text(f"{tool}", 30)},
            {"type": "integer", "minimum": 0},
            {"type": "boolean"},
            {"type": "array", "items": {"type": "string"}},
            {"enum": ["read", "write", "append"]},
            {"type": "object", "properties": {"path": {"type": "string"}}, "additionalProperties": False},
        ]
        names = [f"{word}_{number}" for number in range(2) for word in ("path", "limit", "all", "globs", "mode", "where")]
        properties = {name: kinds[number % len(kinds)] for number, name in enumerate(names)}
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}

    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f"tool_{number}"}, "arguments": arguments(number)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number in range(16)
    ]
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 20, "maxItems": 30}


def lazy() -> Grammar:
    """Free text, then perhaps a call: the grammar of a reply that may call tools."""
    call = json.dumps(tools()["items"])
    return Grammar("lark", f'start: TEXT ("<tool_call>" call "</tool_call>")?\nTEXT: /[^<]*/\ncall: %json {call}')


@dataclass(frozen=True)
class Case:
    """`alike`: how many replies are sampled together."""

    grammar: Grammar
    sampling: Sampling = Sampling(seed=1)  # noqa: RUF009
    alike: int = 1


def cases() -> dict[str, Case]:
    large = Grammar("json_schema", json.dumps(tools()))
    return {
        "JSON schema": Case(people()),
        "JSON schema, greedy": Case(people(), GREEDY),
        "JSON schema, four at once": Case(people(), alike=4),
        f"schema of 16 tools ({len(large.text) >> 10} KiB)": Case(large),
        "free text before a call": Case(lazy()),
        "regular expression": Case(Grammar("regex", "([A-Z][a-z]{2,9} ){200}")),
    }


def speed(runtime: Runtime, case: Case, grammar: Grammar | None, tokens: int) -> float:
    """Tokens a second of each reply, from its first token on."""
    ends = tuple((token, -1000.0) for token in sorted(runtime.engine.tokenizer.eog))
    sampling = Sampling(
        temperature=case.sampling.temperature, seed=case.sampling.seed, logit_bias=ends
    )  # both have the greatest length allowed
    prompt = runtime.chat_prompt(Conversation(({"role": "user", "content": "Write a long list of people as JSON."},)))
    request = Request(prompt, GenerationParams(sampling, max_tokens=tokens, choices=case.alike), grammar=grammar)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    runtime.submit(request, events.put)
    reports: list[Report] = []
    while len(reports) < case.alike:
        match events.get():
            case Finished(report=report):
                reports.append(report)
            case Failed(error=error):
                raise error
    assert all(report.completion == tokens for report in reports), "a reply ended early"
    return (tokens - 1) / statistics.median(report.decode for report in reports)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.constrained", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="paired rounds (9)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a reply (128)")
    parser.add_argument("--model", type=Path, default=None, help="a GGUF; the bundled model by default")
    given = parser.parse_args()
    settings = Settings(str(given.model or demo_model()), ctx=1024, slots=4, settle="off")
    result = Table("reply", "compiled in", "free", "constrained", "ratio (median of pairs)")
    with Runtime(lambda: LlamaEngine.load(settings.engine_options()), settings) as runtime:
        runtime.check_grammar(Grammar("regex", "once"))  # makes the tokenizer ready
        for name, case in cases().items():
            begun = time.perf_counter()
            runtime.check_grammar(case.grammar)
            compiled = time.perf_counter() - begun
            free: list[float] = []
            held: list[float] = []
            for number in range(-1, given.rounds):  # the first pair warms up
                order = [(held, case.grammar), (free, None)]
                for values, grammar in order if number % 2 else order[::-1]:
                    values.append(speed(runtime, case, grammar, given.tokens))
            free, held = free[1:], held[1:]
            ratios = [one / other for one, other in zip(held, free, strict=True)]
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} – {max(ratios):.3f})"
            speeds = [f"{statistics.median(values):.1f} tokens/s" for values in (free, held)]
            result.add_row(name, f"{compiled * 1e3:.0f} ms", *speeds, spread)
    Console().print(result)


if __name__ == "__main__":
    main()
