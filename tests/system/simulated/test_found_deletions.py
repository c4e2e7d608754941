"""What the simulation has found in deletions: something stayed, or something was taken that should stay."""

from __future__ import annotations

from headstart.testing.simulation.history import Happening, Scenario, Setup
from headstart.testing.simulation.run import run


def test_a_deletion_leaves_no_ghost_of_a_checkpoint_that_was_evicted() -> None:
    """The catalogue kept the id of the checkpoint: the deletion named only the entries that were still there."""
    history = Scenario(
        67,
        Setup(mode="exact", stateful=True, slots=4, memory=116, objects=109, share=0.6),
        (
            Happening(11.6698, "ask", how="turn", size=1, seed=737494829, reply=7),
            Happening(16.5216, "delete", size=100, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_server_whose_disk_is_opened_late_hears_of_an_earlier_deletion() -> None:
    """Its first look at the catalogue took `headstart cache rm --all`, of some seconds before, for one from before its start.
    So it kept what was deleted, and wrote it to disk again."""
    history = Scenario(
        207,
        Setup(slots=1, memory=33, objects=28, transfer=256, share=0.6, stall=0.02),
        (
            Happening(32.9761, "restart", seed=147572639, reply=1),
            Happening(33.2886, "fault", how="sql_full", reply=1),
            Happening(36.3589, "ask", who=2, how="turn", size=6, seed=414088134, reply=10),
            Happening(36.6383, "rm", reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_deletion_finds_texts_whose_last_token_ends_a_block() -> None:
    """The last token of a reply is in no slot. So the record of such a request lacked the id of its last block, and stayed when
    another request with the same text was deleted."""
    history = Scenario(
        83,
        Setup(mode="exact", any_cut=True, slots=4, memory=120, objects=54, expire=200.0),
        (
            Happening(0.6432, "ask", who=1, how="turn", size=11, seed=292040525, reply=12),
            Happening(0.6893, "ask", who=1, how="flood", size=1, seed=453395459, reply=11),
            Happening(0.6893, "ask", who=1, how="flood", size=1, seed=675451389, reply=11),
            Happening(5.2113, "delete", who=1, size=20, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_a_deletion_of_everything_spares_stays_in_slots() -> None:
    """It has old times, so it counted as deleted, and the slot was emptied at each look. A turn was settled for ever."""
    history = Scenario(
        144,
        Setup(mode="exact", any_cut=True, memory=25, objects=105, share=0.3, stall=0.02, mixed=True),
        (
            Happening(1.323, "ask", talk=2, how="turn", size=16, seed=551186109, reply=12),
            Happening(7.6652, "pin", talk=2, reply=1),
            Happening(7.9233, "rm", reply=1),
            Happening(11.0984, "ask", how="turn", size=18, seed=547678295, reply=7),
            Happening(11.1307, "term", who=2, size=100, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_deletion_empties_the_quarantine_for_good() -> None:
    """Its files were deleted, but not durably: a power failure would have brought a damaged part of a deleted chain back."""
    history = Scenario(
        1000072,
        Setup(mode="exact", any_cut=True, slots=1, memory=12, objects=119, tenants=4, explain=False, expire=200.0, share=0.6),
        (
            Happening(0.531, "ask", talk=1, how="turn", size=20, seed=510320637, reply=2),
            Happening(29.5707, "ask", who=1, talk=1, how="turn", size=15, seed=866985371, reply=12),
            Happening(29.8343, "fault", how="cut", size=2, reply=1),
            Happening(33.0722, "ask", talk=1, how="again", size=1, seed=145053179, reply=5),
            Happening(34.2528, "delete", talk=1, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_an_open_tail_that_is_younger_does_not_save_its_checkpoint() -> None:
    """After `rm --older-than`, a checkpoint at the end of young text stayed in memory, which covers the deleted text too."""
    history = Scenario(
        2400049,
        Setup(stateful=True, slots=1, memory=90, objects=132, share=0.3, queue=6),
        (
            Happening(17.2758, "ask", who=1, how="turn", size=11, seed=699346802, reply=1),
            Happening(22.2014, "ask", who=1, how="turn", size=16, seed=413087493, reply=2),
            Happening(37.0336, "rm", size=15, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_deletion_finds_what_could_not_be_read() -> None:
    """A file was missing, so the block left the index. Its row stayed in the catalogue, with its text and the id of a deleted
    block. The first block of the chain stayed too: the disk hung when it was read, and it was reported after the deletion."""
    history = Scenario(
        4000945,
        Setup(mode="exact", slots=1, memory=20, objects=169, tenants=4, transfer=1024, explain=False, mixed=True),
        (
            Happening(0.5, "ask", how="turn", size=8, seed=424964047, reply=11),
            Happening(3.1965, "ask", how="turn", size=9, seed=1050576243, reply=9),
            Happening(7.6182, "fault", how="missing", size=10, reply=1),
            Happening(9.1909, "restart", seed=70125970, reply=1),
            Happening(18.216, "fault", how="hung_read", size=5, reply=1),
            Happening(29.6392, "ask", how="turn", size=12, seed=295695847, reply=4),
            Happening(30.6392, "delete", reply=1),
            Happening(30.8371, "restart", seed=243726143, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_pinned_checkpoint_whose_block_is_damaged_stays() -> None:
    """A deletion of everything spares what pinned blocks need. It forgot that a checkpoint may have lost its block."""
    history = Scenario(
        4353866,
        Setup(stateful=True, slots=4, memory=110, objects=167, transfer=256, settle=False, share=0.3, stall=0.02),
        (
            Happening(0.009, "fault", how="bit_rot", size=2, reply=1),
            Happening(0.5, "ask", who=1, talk=1, how="turn", size=15, seed=275342543, reply=8),
            Happening(5.2791, "pin", who=1, talk=1, size=20, reply=1),
            Happening(33.6437, "fault", how="rewind", reply=1),
            Happening(46.7816, "ask", talk=2, how="turn", size=19, seed=1065248003, reply=11),
            Happening(47.511, "ask", who=1, talk=1, how="turn", size=20, seed=387513166, reply=1),
            Happening(47.5563, "ask", who=1, how="turn", size=2, seed=863929292, reply=10),
            Happening(47.5563, "ask", who=2, how="turn", size=10, seed=281610133, reply=1),
            Happening(47.5767, "ask", how="turn", size=4, seed=220463180, reply=11),
            Happening(51.0184, "rm", reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_deletion_up_to_an_earlier_time_is_heard_too() -> None:
    """The clock was set back after a deletion of everything. The next one deletes less, so no server heard of it."""
    history = Scenario(
        4450980,
        Setup(stateful=True, slots=1, memory=41, objects=86, tenants=4, settle=False, share=0.3, mixed=True),
        (
            Happening(10.106, "rm", reply=1),
            Happening(37.6672, "ask", how="turn", size=17, seed=473794467, reply=1),
            Happening(37.671, "ask", who=2, talk=1, how="turn", size=18, seed=356242733, reply=11),
            Happening(37.718, "clock", size=-30, reply=1),
            Happening(44.2136, "rm", size=5, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_deletion_takes_checkpoints_out_of_the_shared_store_that_were_evicted_here() -> None:
    """A deletion named only the checkpoints that the server still had. Thinned ones stayed in the store."""
    history = Scenario(
        1138,
        Setup(
            mode="exact", stateful=True, slots=4, memory=48, objects=19, transfer=1024, stall=0.02, shared="valkey", apart=True
        ),
        (
            Happening(9.0861, "ask", who=1, how="turn", size=15, seed=873968639, reply=8),
            Happening(18.4641, "delete", who=1, size=100, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_deletion_takes_what_a_waiting_request_has_pinned() -> None:
    """The request had to wait for a slot. Until it had one, what was deleted stayed in memory."""
    history = Scenario(
        8560682,
        Setup(mode="exact", slots=3, memory=28, objects=102, explain=False, queue=6, stall=0.02, shared="s3", apart=True),
        (
            Happening(0.2503, "fault", how="store_unanswered", reply=1),
            Happening(0.5, "ask", who=1, how="turn", size=16, seed=91042921, reply=7),
            Happening(0.5213, "ask", who=1, talk=1, how="turn", size=17, seed=293235916, reply=3),
            Happening(0.5434, "ask", who=2, talk=2, how="turn", size=19, seed=789876351, reply=3),
            Happening(0.5434, "ask", who=2, talk=1, how="flood", size=19, seed=299946725, reply=1),
            Happening(0.5434, "ask", who=2, how="turn", size=19, seed=672248530, reply=3),
            Happening(0.5434, "ask", who=2, talk=1, how="turn", size=19, seed=310956024, reply=3),
            Happening(0.5434, "ask", who=2, talk=2, how="turn", size=19, seed=65106273, reply=3),
            Happening(0.5434, "ask", who=2, talk=2, how="flood", size=1, seed=576490106, reply=3),
            Happening(0.5434, "ask", who=2, talk=2, how="flood", size=19, seed=963242908, reply=1),
            Happening(0.5434, "ask", who=2, how="flood", size=19, seed=15421517, reply=1),
            Happening(0.5434, "ask", who=2, talk=1, how="flood", size=19, seed=499068878, reply=1),
            Happening(0.5434, "ask", who=2, talk=2, how="flood", size=19, seed=223492972, reply=1),
            Happening(0.5752, "ask", talk=2, how="turn", size=11, seed=733245207, reply=1),
            Happening(0.5842, "ask", who=1, talk=1, how="turn", size=1, seed=583516161, reply=1),
            Happening(0.5842, "ask", who=2, talk=2, how="turn", size=16, seed=858214735),
            Happening(0.6837, "delete", who=1, talk=1, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_running_request_saves_nothing_that_follows_what_is_being_deleted() -> None:
    """A deletion found its entries, and went on in pieces. In between, a slot saved blocks that followed them, which stayed."""
    history = Scenario(
        35051411,
        Setup(
            mode="exact",
            stateful=True,
            slots=3,
            memory=28,
            objects=141,
            tenants=4,
            transfer=256,
            expire=200.0,
            stall=0.02,
            shared="s3",
            encrypt=True,
            apart=True,
            fills=4,
            pieces=True,
        ),
        (
            Happening(0.5, "ask", who=3, talk=1, how="turn", size=1, seed=837496115, reply=3),
            Happening(0.5, "ask", who=3, how="turn", size=17, seed=577987515, reply=12),
            Happening(0.5793, "ask", who=3, talk=1, how="turn", size=15, seed=4982934, reply=1),
            Happening(0.6336, "ask", how="turn", size=12, seed=662063571),
            Happening(0.7505, "delete", who=3, talk=1, reply=1),
        ),
    )
    assert run(history).violation == ""
