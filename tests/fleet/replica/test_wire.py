"""Reports as bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from headstart.fleet.replica.wire import decode, encode
from headstart.fleet.router.curve import Curve
from headstart.fleet.router.reports import Load, ReplicaReport, Speed, Tier

SECONDS = st.floats(0, 1e9, allow_nan=False)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
IDS = st.lists(NAMES, max_size=4).map(tuple)
KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=5)
TIERS = st.dictionaries(st.sampled_from([tier for tier in Tier if tier is not Tier.COMING]), KEYS)
LOADS = st.builds(Load, st.lists(SECONDS, max_size=5).map(tuple), SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
SPEEDS = st.builds(Speed, st.builds(Curve, SECONDS, SECONDS), SECONDS, SECONDS, st.none() | SECONDS, SECONDS)
NUMBERS = st.integers(0, 2**64 - 1)
REPORTS = st.builds(ReplicaReport, NAMES, NUMBERS, NUMBERS, LOADS, TIERS, TIERS, st.booleans(), IDS, IDS, SPEEDS)


@given(REPORTS)
@examples(400)
def test_a_report_arrives_as_it_was(report: ReplicaReport) -> None:
    data = encode(report)
    assert decode(data) == report
    assert encode(decode(data)) == data


@given(REPORTS, st.data())
@examples(800)
def test_what_is_no_report_is_refused(report: ReplicaReport, data: st.DataObject) -> None:
    """Or it is another report, byte by byte."""
    whole = encode(report)
    with pytest.raises(ValueError, match="cut off"):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ValueError, match="follows"):
        decode(whole + b"\0")
    place, value = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    changed = whole[:place] + bytes([value]) + whole[place + 1 :]
    try:
        read = decode(changed)
    except ValueError:
        return
    assert encode(read) == changed


@given(st.binary(max_size=80))
@examples(200)
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, encode(ReplicaReport("a", 0, 0))[:22] + noise):
        try:
            read = decode(data)
        except ValueError:
            continue
        assert encode(read) == data


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (ReplicaReport("a", -1, 0), "argument"),
        (ReplicaReport("a", 0, 2**64), "int too large|argument"),
        (ReplicaReport("a" * 70_000, 0, 0), "too long"),
        (ReplicaReport("\ud800", 0, 0), "surrogates"),
        (ReplicaReport("a", 0, 0, Load(queued=float("nan"))), "nan"),
        (ReplicaReport("a", 0, 0, Load(prefills=(-1.0,))), "-1.0"),
        (ReplicaReport("a", 0, 0, speed=Speed(fetch=float("inf"))), "inf"),
        (ReplicaReport("a", 0, 0, added={Tier.COMING: [1]}), "coming"),
        (ReplicaReport("a", 0, 0, added={Tier.LIVE: [-1]}), "not a key"),
        (ReplicaReport("a", 0, 0, removed={Tier.LIVE: [2**64]}), "not a key"),
    ],
    ids=range(10),
)
def test_what_no_replica_says_cannot_be_written(report: ReplicaReport, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        encode(report)


def test_another_version_is_refused() -> None:
    data = encode(ReplicaReport("a", 3, 4))
    with pytest.raises(ValueError, match="version 3"):
        decode(data[:4] + b"\3" + data[5:])
    with pytest.raises(ValueError, match="not a report"):
        decode(b"x" + data[1:])


def test_a_key_takes_eight_bytes() -> None:
    report = ReplicaReport("a", 0, 0, dump=True)
    keys = list(range(1 << 63, (1 << 63) + 10_000))
    assert len(encode(replace(report, added={Tier.MEMORY: keys}))) == len(encode(report)) + 5 + 8 * len(keys)
