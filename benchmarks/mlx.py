"""headstart with MLX against mlx_lm.server, with the same models: `python -m benchmarks.mlx [--only NAME …] [--rounds N]`.

Models: tiny ones with random weights, of each kind of cache, and the bundled one, converted. Both servers have their defaults,
run a workload one after the other in alternating order, and the next one begins when the last one is idle. A round begins with
empty caches. On Linux both get OpenBLAS if it is found (or named in OPENBLAS), because MLX's own BLAS is many times slower.

`O` is the optimum: the tokens of a prompt after its longest common prefix with any earlier prompt and reply. `most` is what
headstart may compute: 1.02 × O, and one block a request.

With `--decode`: tokens a second of replies, alone and four at a time, and the milliseconds of CPU of the server for each token,
which mean something on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.client import Client, Messages
from benchmarks.fixtures import of_tests
from benchmarks.histories import HISTORIES, History, reasoning
from benchmarks.processor import caption
from benchmarks.restart import spread
from benchmarks.seat import WARM_UP, Ideal, Seat, Start
from benchmarks.servers import Setup, demo_model, headstart, mlx_server
from benchmarks.state import Figure
from benchmarks.workloads import WORDS, text

OURS, PEER = "headstart", "mlx_lm.server"
TINY = {"llama": "llama", "gemma3_text": "Gemma 3", "lfm2": "LFM2", "qwen3_5": "Qwen3.5"}
BUNDLED = "SmolLM2 135M"
REPLIES = {1: 160, 4: 128}
"""Tokens of a reply, by the number of replies at a time."""
MOST_ATTEMPTS = 20
"""Times that replies are asked for at the same time."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is measured.

    Attributes:
        folder: of the model, in Hugging Face's form.
        bias: `logit_bias`: replies have digits only, so that they do not end early, and have the tokens that the tokenizer
            would choose.
        template: a Jinja chat template in place of the model's own.
        threads: of each server.
    """

    name: str
    folder: Path
    histories: dict[str, History]
    bias: dict[str, float]
    template: Path | None = None
    threads: int = 1

    def starts(self, cache: Path) -> dict[str, Start]:
        setup = Setup(self.folder, threads=self.threads, template=self.template)
        return {OURS: partial(headstart, setup, cache=cache), PEER: partial(mlx_server, setup, self.folder)}


def cases(root: Path, only: Sequence[str]) -> Iterator[Case]:
    tiny_hf, templates = of_tests("tiny_hf"), of_tests("templates")
    stripping = root / "reasoning.jinja"
    stripping.write_text(templates.REASONING)
    learnt = " ".join([*WORDS, *(word.capitalize() for word in WORDS)])
    for kind, name in TINY.items():
        if kind in tiny_hf.KINDS and _wanted(name, only):
            folder = tiny_hf.write(root / kind, kind, words=learnt, max_position_embeddings=8192)
            yield Case(f"{name}, tiny", folder, HISTORIES, digits(folder))
            yield Case(f"{name}, tiny, reasoning", folder, {"reasoning stripped": reasoning}, digits(folder), stripping)
    if _wanted(BUNDLED, only):
        from benchmarks.mlx_models import convert

        folder = root / "bundled"
        convert(demo_model(), folder)
        yield Case(BUNDLED, folder, HISTORIES, digits(folder), threads=2)
        yield Case(f"{BUNDLED}, reasoning", folder, {"reasoning stripped": reasoning}, digits(folder), stripping, threads=2)


def _wanted(name: str, only: Sequence[str]) -> bool:
    return any(name.startswith(begin) for begin in only)


def digits(folder: Path) -> dict[str, float]:
    known = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    return {str(known[digit]): 100.0 for digit in "0123456789"}


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a case. `block`: headstart's block size in tokens."""

    figures: list[Figure]
    block: int


def measure(case: Case, rounds: int, console: Console) -> Measured:
    figures: list[Figure] = []
    block = 0
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            seats: dict[str, Seat] = {}
            for name, start in case.starts(Path(folder)).items():
                seats[name] = Seat(start, case.bias)
                stack.callback(seats[name].close)
            block = block_size(seats[OURS].url)
            ideal = {name: Ideal(seats[OURS].tokens(WARM_UP)) for name in seats}
            order = list(seats) if number % 2 == 0 else list(reversed(seats))
            for history, run in case.histories.items():
                done = {name: len(seat.asked) for name, seat in seats.items()}
                for name in order:
                    run(seats[name])
                    seats[name].rest()
                    console.print(f"[dim]{case.name}: round {number + 1}: {history}: {name}[/]")
                order.reverse()
                for name, seat in seats.items():
                    figures += figures_of(case.name, history, name, seat, done[name], seats[OURS], ideal[name])
    return Measured(figures, block)


def figures_of(case: str, history: str, name: str, seat: Seat, begin: int, counter: Seat, ideal: Ideal) -> Iterator[Figure]:
    """The figures of the requests of a server from number `begin` on. `counter`: the server that counts tokens."""
    for number, (messages, sample) in enumerate(seat.asked[begin:], 1):
        prompt = counter.tokens(messages)
        if len(prompt) != sample.prompt:
            raise SystemExit(f"{name} counts {sample.prompt} tokens of a prompt of {len(prompt)}")
        least = ideal.computes(prompt)
        ideal.keep(counter.tokens(messages, sample.text))
        yield Figure(case, history, name, number, sample.prompt, sample.computed, least, sample.ttft)


def block_size(url: str) -> int:
    return int(httpx.get(f"{url}/props").json()["headstart"]["block_size"])


def table(case: str, measured: Measured, rounds: int) -> Table:
    times = (f"{OURS}: first token, ms", f"{PEER}: first token, ms", "ratio")
    result = Table("workload", "requests", "prompts", "O", "most", OURS, PEER, *times, title=f"{case}: prompt tokens computed")
    result.caption = f"per round, of {rounds}; times: medians (min – max), ratio: median of pairs; blocks of {measured.block}"
    for history in dict.fromkeys(one.history for one in measured.figures):
        found = [one for one in measured.figures if one.history == history]
        result.add_row(history, *row(found, measured.block, rounds))
    return result


def row(found: Sequence[Figure], block: int, rounds: int) -> Iterator[str]:
    """Cells of a workload. A `!` marks more tokens than the aim."""
    ours, theirs = ([one for one in found if one.server == name] for name in (OURS, PEER))
    prompts, least, computed = (sum(getattr(one, name) for one in ours) for name in ("prompt", "least", "computed"))
    most = 1.02 * least + block * len(ours)
    for count in (len(ours), prompts, least, most):
        yield f"{count / rounds:,.0f}"
    yield f"{computed / rounds:,.0f}{' !' if computed > most else ''}"
    yield f"{sum(one.computed for one in theirs) / rounds:,.0f}"
    for side in (ours, theirs):
        times = [1000 * one.ttft for one in side]
        yield f"{statistics.median(times):.0f} ({min(times):.0f} – {max(times):.0f})"
    yield f"{statistics.median(a.ttft / b.ttft for a, b in zip(ours, theirs, strict=True)):.2f}"


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Rate:
    """Of replies at the same time.

    Attributes:
        speed: tokens a second while all of them are decoded. The prompts are not in it: mlx_lm.server computes all of them
            before it sends a first token, and headstart one after the other.
        cost: milliseconds of CPU of the server for each token, prompts included.
    """

    speed: float
    cost: float


def rate(client: Client, number: int, streams: int, bias: dict[str, float]) -> Rate:
    """The rate of replies that were decoded together for at least half of the time. mlx_lm.server sometimes begins with one of
    them alone; then they are asked for again."""
    for attempt in range(MOST_ATTEMPTS):
        prompts: list[Messages] = [[{"role": "user", "content": text(f"{number} {attempt} {i}", 30)}] for i in range(streams)]
        before = cpu_seconds(client)
        samples = client.together(prompts, REPLIES[streams], logit_bias=bias)
        seconds, tokens = cpu_seconds(client) - before, sum(sample.completion for sample in samples)
        begun, ended = max(sample.at[0] for sample in samples), min(sample.at[-1] for sample in samples)
        if 2 * (ended - begun) >= max(sample.at[-1] for sample in samples) - min(sample.at[0] for sample in samples):
            shares = (sum(begun < at <= ended for at in sample.at) / len(sample.at) for sample in samples)
            decoded = sum(share * sample.completion for share, sample in zip(shares, samples, strict=True))
            return Rate(decoded / (ended - begun), 1000 * seconds / tokens)
        client.server.rest()
    raise SystemExit(f"{client.server.name} does not decode {streams} replies at the same time.")


def cpu_seconds(client: Client) -> float:
    return sum(client.server.process.cpu_times()[:2])


def decode(case: Case, rounds: int) -> Table:
    result = Table("replies at a time", "figure", OURS, PEER, "ratio of pairs", title=f"{case.name}: decoding")
    result.caption = f"{rounds} rounds: medians (min – max)"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        clients = {name: Client(stack.enter_context(start())) for name, start in case.starts(Path(folder)).items()}
        for client in clients.values():
            client.chat(WARM_UP, 2, logit_bias=case.bias)
        for streams in REPLIES:
            found: dict[str, list[Rate]] = {name: [] for name in clients}
            for number in range(rounds):
                for name in clients if number % 2 == 0 else reversed(clients):
                    found[name].append(rate(clients[name], number, streams, case.bias))
                    clients[name].server.rest()
            for figure, of in (("tokens/s", "speed"), ("CPU, ms a token", "cost")):
                own, peer = ([getattr(one, of) for one in found[name]] for name in (OURS, PEER))
                ratios = [a / b for a, b in zip(own, peer, strict=True)]
                result.add_row(str(streams), figure, *map(spread, (own, peer, ratios)))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mlx", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="models whose name begins so")
    parser.add_argument("--workloads", nargs="*", default=[""], help="workloads whose name begins so")
    parser.add_argument("--rounds", type=int, default=1, help="rounds (1)")
    parser.add_argument("--decode", action="store_true", help="measure decoding, not prompts")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for mlx.json")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    given.out.mkdir(parents=True, exist_ok=True)
    figures: list[Figure] = []
    console.print(caption())
    with tempfile.TemporaryDirectory() as root:
        for case in cases(Path(root), given.only):
            if given.decode:
                if not case.template:
                    console.print(decode(case, given.rounds))
                continue
            wanted = {name: run for name, run in case.histories.items() if _wanted(name, given.workloads)}
            if not wanted:
                continue
            measured = measure(replace(case, histories=wanted), given.rounds, console)
            console.print(table(case.name, measured, given.rounds))
            figures += measured.figures
            (given.out / "mlx.json").write_text(json.dumps([asdict(one) for one in figures], indent=1))


if __name__ == "__main__":
    main()
