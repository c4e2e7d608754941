from __future__ import annotations

import math
import os
import socket
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headstart.api.openai_responses.handover import Handover, PackedConversation
from headstart.api.served_models import ServedModel
from headstart.config import Settings
from headstart.interfaces.sampling import Sampling
from headstart.interfaces.traits import EngineProof, Traits
from headstart.models.channel import (
    CONNECTION,
    Commands,
    ProcessSetup,
    ReadyReport,
    Sayings,
    handover_lines,
    line,
    receive_setup,
    send_setup,
)


def test_a_setup_crosses_the_channel() -> None:
    near, far = socket.socketpair()
    with near, far:
        setup = ProcessSetup(Settings(model="a.gguf", expire="7d"), ("a", "b"), "01234567", "key")  # type: ignore[arg-type]
        send_setup(near, setup)
        assert receive_setup(far) == setup
        near.close()
        assert receive_setup(far) is None


@given(st.lists(st.integers(0, 3), max_size=12), st.data())
def test_connections_arrive_in_order_however_they_are_cut(kinds: list[int], data: st.DataObject) -> None:
    text = b"".join(CONNECTION if kind else b"stop 2.5\n" for kind in kinds)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    commands, found, number = Commands(), [], 0
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        part = text[begin:end]
        files = range(number, number + part.count(CONNECTION[:1]))  # a descriptor comes with the first byte
        number += len(files)
        found += commands.take(part, [*files])
    expected = iter(range(len(kinds)))
    assert found == [("connection", next(expected)) if kind else ("stop", 2.5) for kind in kinds]


def test_a_real_socket_keeps_descriptors_in_order() -> None:
    near, far = socket.socketpair()
    pipes = [os.pipe() for _ in range(3)]
    with near, far:
        for read, _ in pipes:
            socket.send_fds(near, [CONNECTION], [read])
        commands, found = Commands(), []
        while len(found) < 3:
            data, files, _, _ = socket.recv_fds(far, 4096, 8)
            found += [given for _, given in commands.take(data, files)]
        for (_, write), read in zip(pipes, found, strict=True):
            os.write(write, str(write).encode())
            assert os.read(read, 9) == str(write).encode()
    for descriptor in [*found, *(end for pipe in pipes for end in pipe)]:
        os.close(descriptor)


@given(st.lists(st.tuples(st.sampled_from([1.5, math.inf]), st.binary(max_size=9)), max_size=4), st.data())
def test_what_a_process_says_and_hands_over_arrives_however_it_is_cut(given: list[Any], data: st.DataObject) -> None:
    handed = Handover((1.0, 2), tuple(PackedConversation(ends, part) for ends, part in given))
    text = line(progress=0.5) + line(failed="a\nb") + handover_lines(handed)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    sayings = Sayings()
    found = [said for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True) for said in sayings.take(text[begin:end])]
    assert found == [{"progress": 0.5}, {"failed": "a\nb"}]
    assert sayings.handed == handed
    cut = Sayings()
    cut.take(text[:-1])
    assert cut.handed == Handover()


def test_a_card_crosses_the_channel() -> None:
    served = ServedModel("a", "loaded", ("b",), sampling=Sampling(temperature=0.5), facts={"n_ctx": 4})
    card = ReadyReport(5, served, (EngineProof("0f", Traits(128, chunking=False, notes=("one", "two")), 4),))
    assert ReadyReport.of_json(card.as_json) == card
