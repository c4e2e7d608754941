"""What the simulation has found in requests: they waited for each other, or met what changes meanwhile."""

from __future__ import annotations

from headstart.testing.simulation.history import Happening, Scenario, Setup
from headstart.testing.simulation.run import run


def test_nothing_changes_under_a_scheduler_that_is_being_stopped() -> None:
    """A call that came while the server was being stopped was carried out at once, on the caller's thread. The engine thread
    was still reading entries from disk, and they left the index meanwhile."""
    history = Scenario(
        158,
        Setup(slots=1, memory=93, objects=111, settle=False),
        (
            Happening(0.5, "ask", who=2, talk=2, how="turn", size=9, seed=70302686, reply=4),
            Happening(0.5044, "ask", who=1, talk=2, how="turn", size=6, seed=178457525, reply=12),
            Happening(2.1026, "fault", how="hung", size=10, reply=1),
            Happening(5.7771, "ask", who=2, talk=1, how="turn", size=10, seed=699863647),
            Happening(6.1659, "fault", how="eio", size=40, reply=1),
            Happening(11.3143, "fault", how="hung_read", size=1, reply=1),
            Happening(11.6824, "term", who=1, size=100, reply=1),
            Happening(13.3912, "fault", how="import", reply=1),
            Happening(14.4042, "pin", who=2, talk=1, size=100, reply=1),
            Happening(14.5081, "fault", how="eacces", reply=1),
            Happening(14.6384, "ask", who=2, how="turn", size=13, seed=869872406, reply=4),
            Happening(16.6026, "restart", seed=1013477983, reply=1),
            Happening(16.9672, "fault", how="cut", reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_request_that_waits_behind_a_hung_read_uses_nothing_that_expired_meanwhile() -> None:
    """The engine thread waited for the disk, and began the next request before it looked for what is due."""
    history = Scenario(
        4151200,
        Setup(any_cut=True, slots=3, memory=25, objects=200, tenants=4, queue=6, stall=0.02),
        (
            Happening(0.5, "ask", who=3, talk=2, how="turn", size=15, seed=666394168, reply=9),
            Happening(0.5, "ask", who=3, talk=2, how="edit", size=1, seed=666641885, reply=1),
            Happening(0.6849, "fault", how="prefill", reply=1),
            Happening(0.8071, "ask", who=3, talk=1, how="turn", size=5, seed=419949335, reply=11),
            Happening(1.1036, "ask", talk=2, how="turn", size=6, seed=149440794),
            Happening(1.1036, "ask", talk=1, how="turn", size=12, seed=924816141, reply=12),
            Happening(2.247, "fault", how="eacces", reply=1),
            Happening(10.4044, "ask", who=3, talk=1, how="turn", size=11, seed=654443886, reply=7),
            Happening(11.1378, "fault", how="hung", reply=1),
            Happening(11.7383, "ask", who=2, talk=2, how="turn", size=15, seed=207952353, reply=4),
            Happening(12.5769, "ask", talk=2, how="turn", size=8, seed=337812951, reply=1),
            Happening(12.5769, "ask", who=1, talk=1, how="turn", size=15, seed=550992607, reply=1),
            Happening(12.5769, "ask", who=3, how="turn", size=17, seed=778229540, reply=4),
            Happening(15.2652, "term", who=3, size=20, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_prompt_does_not_wait_for_what_is_being_deleted() -> None:
    """A deletion waited for a hung disk. A request whose text it concerned gave its slot back to load it, and could not: it
    computed it once more, and its report had more tokens than its prompt."""
    history = Scenario(
        1243,
        Setup(mode="exact", slots=1, memory=56, objects=30, mixed=True, shared="valkey", store=100),
        (
            Happening(0.1982, "fault", how="hung", size=10, reply=1),
            Happening(2.9893, "ask", who=1, talk=1, how="turn", size=6, seed=293373673, reply=9),
            Happening(6.5988, "delete", who=1, talk=1, size=20, reply=1),
            Happening(10.6226, "ask", who=1, talk=1, how="turn", size=18, seed=824665442, reply=1),
            Happening(15.558, "erase slot", talk=2, size=20, reply=1),
            Happening(20.1447, "ask", who=1, talk=1, how="turn", size=13, seed=820014191, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_requests_that_wait_for_the_shared_store_do_not_wait_for_each_other() -> None:
    """Of two choices, one had brought its prompt into memory and could not load it. Then it followed the other, which waited
    until the first had loaded its prompt."""
    history = Scenario(
        8504785,
        Setup(
            any_cut=True,
            slots=4,
            memory=26,
            objects=179,
            transfer=1024,
            settle=False,
            share=0.3,
            stall=0.02,
            shared="valkey",
            store=100,
            apart=True,
        ),
        (
            Happening(1.0, "second", reply=1),
            Happening(2.0807, "erase slot", who=1, talk=2, size=100, reply=1),
            Happening(2.2727, "fault", how="emfile", size=3, reply=1),
            Happening(4.8203, "delete", who=1, talk=1, size=20, reply=1),
            Happening(5.5552, "fault", how="eperm", size=1, reply=1),
            Happening(5.6491, "fault", how="export", size=10, reply=1),
            Happening(7.8227, "ask", who=2, talk=2, how="turn", size=8, seed=718730243, reply=1),
            Happening(7.8665, "fault", how="export", reply=1),
            Happening(8.0549, "ask", how="turn", size=9, seed=931393483, reply=3),
            Happening(8.1301, "ask", how="turn", size=12, seed=845573249, reply=4),
            Happening(8.1364, "ask", who=2, talk=1, how="turn", size=19, seed=382704609, reply=11),
            Happening(11.1881, "fault", how="slow", reply=1),
            Happening(14.0533, "ask", who=2, how="turn", size=20, seed=282389244, reply=1),
            Happening(14.0533, "ask", who=2, talk=1, how="edit last", size=16, seed=1031613702, reply=1),
            Happening(14.0533, "ask", who=1, how="turn", size=15, seed=795166149, reply=5),
            Happening(14.2262, "delete", talk=1, size=100, reply=1),
            Happening(14.2439, "ask", who=1, talk=1, how="turn", size=13, seed=407451122, reply=7),
            Happening(14.5309, "fault", how="hung", size=10, reply=1),
            Happening(14.7671, "pin", who=2, talk=2, size=100, reply=1),
            Happening(14.7822, "fault", how="decode", reply=1),
            Happening(14.9134, "ask", who=2, talk=2, how="turn", size=6, seed=795645745, reply=2),
            Happening(16.4969, "fault", how="sql_full", reply=1),
            Happening(16.63, "fault", how="slow", reply=1),
            Happening(16.6644, "erase slot", who=2, talk=1, size=100, reply=1),
            Happening(17.6309, "fault", how="export", reply=1),
            Happening(17.6824, "list", who=1, talk=1, size=20, reply=1),
            Happening(18.5135, "ask", talk=2, how="turn", size=17, seed=542412870, reply=2),
            Happening(18.5611, "ask", talk=1, how="turn", size=10, seed=826497968, reply=9),
            Happening(18.5611, "ask", who=2, how="turn", size=7, seed=367612396, reply=2),
            Happening(18.6651, "ask", who=1, how="turn", size=10, seed=597752203, reply=9),
            Happening(19.4807, "restart", seed=379035164, reply=1),
            Happening(19.7001, "fault", how="import", size=3, reply=1),
            Happening(20.3007, "delete", size=100, reply=1),
            Happening(22.6461, "pin", who=2, size=100, reply=1),
            Happening(25.4399, "ask", talk=1, how="style", size=14, seed=175058787, reply=1),
            Happening(25.4399, "ask", who=2, how="turn", size=16, seed=711224676),
            Happening(25.7209, "fault", how="decode", reply=1),
            Happening(26.3645, "ask", who=2, how="turn", size=6, seed=878987967, reply=9),
            Happening(27.3519, "fault", how="import", reply=1),
            Happening(27.6682, "ask", talk=1, how="turn", size=6, seed=925754398, reply=3),
            Happening(27.6787, "ask", who=1, how="turn", size=3, seed=330789452, reply=3),
            Happening(27.6787, "ask", who=1, talk=2, how="turn", size=3, seed=334417720, reply=3),
            Happening(27.6787, "ask", who=1, how="flood", size=3, seed=694090791, reply=1),
            Happening(27.6787, "ask", who=1, talk=1, how="flood", size=3, seed=1056028323, reply=1),
            Happening(27.6787, "ask", who=1, talk=1, how="flood", size=1, seed=277365452, reply=3),
            Happening(27.7339, "delete", who=2, talk=1, size=100, reply=1),
        ),
    )
    assert run(history).violation == ""
