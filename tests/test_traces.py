"""Recorded traffic is read as it was meant, whatever form it has."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from headstart.errors import ConfigError
from headstart.replay import working_set
from headstart.traces import Trace, read, sample


def jsonl(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def mooncake(at: int, ids: list[int], prompt: int) -> dict[str, Any]:
    return {"timestamp": at, "input_length": prompt, "output_length": 7, "hash_ids": ids}


def session(path: Path, *requests: tuple[float, list[int], int], size: int = 64) -> Path:
    found = [{"t": at, "in": prompt, "out": 9, "hash_ids": ids} for at, ids, prompt in requests]
    path.write_bytes(gzip.compress(json.dumps({"block_size": size, "requests": found}).encode()))
    return path


def blocks(trace: Trace) -> list[tuple[float, list[int]]]:
    return [(request.at, request.blocks.tolist()) for request in trace.requests]


def test_mooncake(tmp_path: Path) -> None:
    """Whole blocks before the last token only: a prompt of just two blocks computes the second."""
    path = jsonl(tmp_path / "a.jsonl", mooncake(3000, [1, 2], 1024), mooncake(0, [1, 2, 3], 1025), mooncake(500, [9], 100))
    trace = read([path])
    assert blocks(trace) == [(0.0, [0, 1]), (0.5, []), (3.0, [0])]
    assert [request.prompt for request in trace.requests] == [1025, 100, 1024]
    assert (trace.block_size, trace.requests[0].reply, trace.tokens) == (512, 7, 2149)


def test_sessions_are_kept_apart_and_begin_one_after_another(tmp_path: Path) -> None:
    session(tmp_path / "b.json.gz", (100.0, [1, 2], 200), (170.0, [1, 2, 3], 200))
    session(tmp_path / "a.json.gz", (5.0, [1, 2], 200), (25.0, [1, 2, 4], 200))
    trace = read([tmp_path], every=30.0)
    assert [request.at for request in trace.requests] == [0.0, 20.0, 30.0, 100.0]
    assert [request.session for request in trace.requests] == [0, 0, 1, 1]
    assert trace.requests[0].blocks[0] != trace.requests[2].blocks[0], "both begin with 1, of their own"
    assert working_set(trace) == (3 + 3) * 64
    assert trace.requests[2].blocks[0] == trace.requests[3].blocks[0]


def request(at: float, ids: list[int], prompt: int = 200) -> dict[str, Any]:
    return {"t": at, "type": "s", "in": prompt, "out": 9, "hash_ids": ids, "stop": "tool_use"}


@pytest.mark.parametrize("relative", [False, True], ids=["times of the file", "times of the sub-agent"])
def test_sub_agents_are_conversations_of_their_own(tmp_path: Path, relative: bool) -> None:
    """Two agents, one of which has started another; some recordings count their times from the marker."""
    first, inner, second = (0.0, 0.0, 0.0) if relative else (10.0, 12.0, 10.5)
    below = {"t": 2.0 if relative else 12.0, "type": "subagent", "requests": [request(inner, [7])]}
    agent = [request(first, [1, 5]), below, request(first + 4, [1, 5, 6])]
    found = [
        request(0.0, [1, 2]),
        {"t": 10.0, "type": "subagent", "agent_id": "a", "requests": agent},
        {"t": 10.5, "type": "subagent", "requests": [request(second, [8])]},
        {"t": 11.0, "type": "subagent", "requests": []},
        request(20.0, [1, 2, 3]),
    ]
    (tmp_path / "a.json").write_text(json.dumps({"block_size": 64, "requests": found}))
    session(tmp_path / "b.json.gz", (0.0, [1], 200))
    trace = read([tmp_path], every=30.0)
    assert [(one.at, one.session, one.blocks.tolist()) for one in trace.requests] == [
        (0.0, 0, [0, 1]),
        (10.0, 1, [0, 2]),
        (10.5, 3, [5]),
        (12.0, 2, [3]),
        (14.0, 1, [0, 2, 4]),
        (20.0, 0, [0, 1, 6]),
        (30.0, 4, [7]),
    ]
    assert trace.requests[1].called


def test_text_is_cut_into_blocks(tmp_path: Path) -> None:
    text = "x" * 256 + "y" * 256
    path = jsonl(
        tmp_path / "run.jsonl",
        {"timestamp": 5_000_000, "input": text + "z", "output": "o" * 40, "session_id": "s"},
        {"timestamp": 7_500_000, "input": text + "z" * 256 + "\ud800", "output": "", "session_id": "s"},
    )
    trace = read([path])
    first, second = trace.requests
    assert (second.at - first.at, first.reply, first.prompt) == (2.5, 10, 128)
    assert len(first.blocks) == 2
    assert second.blocks[:2].tolist() == first.blocks.tolist()
    assert len(second.blocks) == 3


def test_a_coarser_grid_hits_no_more(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", mooncake(0, [1, 2, 3, 4, 5], 9999), mooncake(9, [1, 2, 3, 7, 8], 9999))
    trace = read([path], block_size=1024)
    assert [ids for _, ids in blocks(trace)] == [[1, 3], [1, 5]]
    assert trace.block_size == 1024
    with pytest.raises(ConfigError, match="multiple"):
        read([path], block_size=600)


def test_what_is_no_trace_is_said(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    requests = '"requests": [{"t": 0, "in": 5, "out": 1, "hash_ids": [1]}]'
    for content, says in (
        ("", ""),
        ("{}", ""),
        ("[1]", ""),
        ("not json", ""),
        ('{"block_size": 64, "requests": []}', ""),
        (f'{{"block_size": 0, {requests}}}', "its block_size is 0"),
        (f'{{"block_size": -64, {requests}}}', "its block_size is -64"),
        (f'{{"block_size": 1e999, {requests}}}', ""),
        ("[" * 100_000, "nested too deeply"),
    ):
        bad.write_text(content)
        with pytest.raises(ConfigError, match=f"not a trace.*{says}"):
            read([bad])
    empty = tmp_path / "nothing"
    empty.mkdir()
    with pytest.raises(ConfigError, match="no trace"):
        read([empty])
    with pytest.raises(ConfigError, match="Cannot read"):
        read([tmp_path / "missing.jsonl"])
    with pytest.raises(ConfigError, match="different sizes"):
        read([jsonl(tmp_path / "a.jsonl", mooncake(0, [1], 600)), session(tmp_path / "b.json.gz", (0.0, [1], 200))])


def test_the_generated_trace_is_a_trace() -> None:
    trace = sample(seconds=300)
    times = [request.at for request in trace.requests]
    assert times == sorted(times)
    assert all(len(request.blocks) * 64 < request.prompt <= (len(request.blocks) + 1) * 64 for request in trace.requests)
    assert sample(seed=1, seconds=300).requests[0].at != times[0]


@pytest.mark.parametrize(
    ("name", "repeats"),
    [
        ("mooncake/conversation_trace.jsonl", 0.37),
        pytest.param("mooncake/synthetic_trace.jsonl", 0.65, marks=pytest.mark.slow),
        pytest.param("claude-code", 0.96, marks=pytest.mark.slow),
    ],
)
def test_recorded_traffic_repeats_as_it_is_said_to(data_dir: Path | None, name: str, repeats: float) -> None:
    if data_dir is None:
        pytest.skip("needs recorded traffic: see HEADSTART_DATA")
    trace = read([data_dir / name], block_size=512)
    total = sum(len(request.blocks) for request in trace.requests)
    assert 1 - working_set(trace) / 512 / total == pytest.approx(repeats, abs=0.03)
