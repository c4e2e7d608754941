"""What the simulation took for faults of the program. A test is named for the fact that the simulation did not know."""

from __future__ import annotations

from headstart.testing.simulation.history import Happening, Scenario, Setup
from headstart.testing.simulation.run import run


def test_a_history_waits_for_a_crashed_server_that_comes_back() -> None:
    """One server rested and was stopped while the other one, whose process had been killed,
    was not started again yet. That one then ran for ever."""
    history = Scenario(
        207303,
        Setup(mode="exact", any_cut=True, slots=3, memory=87, objects=85, tenants=4, transfer=1024, explain=False, share=0.6),
        (
            Happening(0.5, "ask", how="turn", size=18, seed=184754731, reply=5),
            Happening(1.2705, "ask", who=3, talk=1, how="turn", size=16, seed=243234755, reply=4),
            Happening(1.3413, "second", reply=1),
            Happening(5.6851, "ask", who=1, talk=2, how="turn", size=19, seed=942375890, reply=5),
            Happening(18.234, "ask", how="turn", size=1, seed=566838492, reply=2),
            Happening(34.0776, "erase slot", who=3, size=100, reply=1),
            Happening(36.5063, "fault", how="kill", size=30, reply=1),
            Happening(38.0331, "fault", how="hung", reply=1),
            Happening(39.6798, "fault", how="power_loss", size=3, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_text_that_came_before_the_clock_was_set_back_is_kept_by_the_old_clock() -> None:
    """The simulation took it for younger than its server did, when the server computed it after the clock was set back."""
    history = Scenario(
        55,
        Setup(stateful=True, any_cut=True, slots=3, memory=14, objects=140, tenants=4, transfer=1024, expire=40.0, stall=0.02),
        (
            Happening(10.2315, "ask", talk=1, how="turn", size=1, seed=941620369, reply=5),
            Happening(18.2661, "fault", how="slow", reply=1),
            Happening(21.8257, "ask", who=2, talk=1, how="turn", size=2, seed=249903837, reply=9),
            Happening(21.8257, "ask", who=1, talk=2, how="turn", size=17, seed=752189561, reply=3),
            Happening(21.8632, "clock", size=-4000, reply=1),
            Happening(70.0, "ask", talk=2, how="turn", size=3, seed=1),
        ),
    )
    assert run(history).violation == ""


def test_a_checkpoint_of_an_open_tail_behind_a_pinned_chain_stays() -> None:
    """The checkpoint came after `rm --all`, behind text that it had spared."""
    history = Scenario(
        2600790,
        Setup(stateful=True, slots=4, memory=42, objects=142, transfer=256, settle=False, stall=0.02),
        (
            Happening(0.5, "ask", who=1, talk=2, how="turn", size=17, seed=781544771, reply=1),
            Happening(1.2792, "pin", who=1, talk=2, size=100, reply=1),
            Happening(9.4042, "rm", reply=1),
            Happening(15.3224, "ask", who=1, talk=2, how="turn", size=18, seed=3525647, reply=1),
            Happening(15.9257, "list", who=2, talk=2, size=100, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_could_not_be_deleted_goes_at_the_next_look() -> None:
    """The history ended before the next look."""
    history = Scenario(
        2700696,
        Setup(stateful=True, memory=12, objects=103, transfer=1024, expire=40.0, share=0.6),
        (
            Happening(0.3945, "fault", how="cut", size=3, reply=1),
            Happening(0.5, "ask", who=1, how="turn", size=7, seed=812158215, reply=7),
            Happening(1.4328, "fault", how="missing", reply=1),
            Happening(2.0665, "ask", who=1, how="branch", size=8, seed=527920636, reply=8),
            Happening(4.4579, "unpin", who=2, talk=2, size=100, reply=1),
            Happening(6.84, "pin", who=1, talk=1, size=20, reply=1),
            Happening(8.9684, "fault", how="hung", reply=1),
            Happening(11.0851, "ask", talk=1, how="turn", size=18, seed=113649353, reply=3),
            Happening(11.0851, "ask", talk=1, how="flood", size=1, seed=216732594, reply=3),
            Happening(11.5652, "fault", how="sql_io", size=3, reply=1),
            Happening(16.6154, "rm", size=5, reply=1),
            Happening(17.0686, "fault", how="kill", size=30, reply=1),
            Happening(20.3778, "ask", who=2, talk=1, how="turn", size=3, seed=18610725, reply=9),
            Happening(23.4092, "fault", how="emfile", size=10, reply=1),
            Happening(23.8049, "fault", how="sql_readonly", size=30, reply=1),
            Happening(27.0504, "ask", who=1, how="turn", size=17, seed=443245709, reply=1),
            Happening(27.0504, "ask", who=1, talk=1, how="turn", size=8, seed=285183230, reply=10),
            Happening(27.6505, "ask", talk=2, how="turn", size=4, seed=882919940, reply=8),
            Happening(30.2661, "unpin", who=1, talk=1, size=100, reply=1),
            Happening(30.6027, "fault", how="hung_read", size=1, reply=1),
            Happening(34.5737, "ask", who=2, talk=2, how="turn", size=11, seed=377609728, reply=8),
            Happening(35.3905, "ask", talk=2, how="flood", size=1, seed=975411472, reply=11),
            Happening(35.3905, "ask", how="turn", size=1, seed=835385229, reply=11),
            Happening(35.824, "rm", reply=1),
            Happening(40.1356, "fault", how="eperm", reply=1),
            Happening(40.2484, "fault", how="eacces", size=3, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_history_waits_until_all_have_heard_of_a_deletion_of_everything() -> None:
    """`headstart cache rm --older-than` found nothing on disk, so nobody waited."""
    history = Scenario(
        4050842,
        Setup(stateful=True, slots=1, memory=64, objects=58, transfer=256, queue=6, stall=0.02, mixed=True),
        (
            Happening(0.5, "ask", talk=1, how="turn", size=8, seed=626621664, reply=4),
            Happening(1.0, "second", reply=1),
            Happening(1.0269, "unpin", who=1, size=20, reply=1),
            Happening(1.3646, "ask", who=2, talk=2, how="turn", size=6, seed=564825605, reply=5),
            Happening(1.4558, "ask", talk=2, how="turn", size=10, seed=202178174, reply=5),
            Happening(2.3135, "ask", who=1, talk=2, how="turn", size=8, seed=471934335, reply=12),
            Happening(3.8048, "pin", size=100, reply=1),
            Happening(4.0841, "ask", who=1, talk=2, how="turn", size=5, seed=354847259, reply=8),
            Happening(11.2047, "ask", who=2, talk=1, how="turn", size=1, seed=516503390, reply=11),
            Happening(11.2512, "ask", who=2, talk=2, how="edit last", size=1, seed=296913672, reply=3),
            Happening(11.4687, "unpin", who=1, size=20, reply=1),
            Happening(11.7304, "pin", who=2, talk=1, size=20, reply=1),
            Happening(12.1819, "ask", who=2, how="turn", size=19, seed=901674724),
            Happening(12.2644, "ask", who=2, how="turn", size=7, seed=630171180, reply=5),
            Happening(12.3178, "ask", who=1, talk=1, how="turn", size=17, seed=1047565001, reply=3),
            Happening(12.9524, "delete", talk=1, size=20, reply=1),
            Happening(13.9122, "term", who=2, size=20, reply=1),
            Happening(15.4649, "delete", who=2, reply=1),
            Happening(16.3645, "term", talk=2, size=20, reply=1),
            Happening(20.4346, "ask", who=2, how="turn", size=10, seed=858161544, reply=8),
            Happening(20.5549, "ask", who=2, talk=1, how="again", size=1, seed=1020745480),
            Happening(22.1029, "ask", talk=2, how="turn", size=20, seed=262675198, reply=1),
            Happening(22.1029, "ask", how="turn", size=16, seed=257890945, reply=7),
            Happening(27.0049, "ask", who=1, talk=1, how="style", size=1, seed=178890105, reply=3),
            Happening(31.0806, "rm", size=15, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_checkpoint_of_an_open_tail_that_was_computed_again_stays() -> None:
    """The checkpoint is as old as the beginning of its chain, which was not deleted."""
    history = Scenario(
        4051697,
        Setup(stateful=True, any_cut=True, slots=1, memory=98, objects=14, explain=False, share=0.6, stall=0.02),
        (
            Happening(15.9141, "list", who=2, talk=1, size=20, reply=1),
            Happening(19.0277, "ask", who=2, talk=2, how="turn", size=12, seed=568693874, reply=12),
            Happening(21.1202, "ask", who=2, talk=2, how="turn", size=10, seed=586422864),
            Happening(21.213, "ask", who=2, talk=2, how="turn", size=5, seed=211620883, reply=3),
            Happening(22.2071, "ask", who=2, talk=2, how="turn", size=5, seed=692590944, reply=4),
            Happening(24.6805, "delete", who=2, talk=2, size=100, reply=1),
            Happening(31.7678, "ask", who=2, talk=2, how="again", size=9, seed=266762952, reply=1),
            Happening(31.7678, "ask", who=2, talk=2, how="flood", size=1, seed=147154121, reply=5),
        ),
    )
    assert run(history).violation == ""


def test_a_failed_import_costs_what_it_was_given() -> None:
    """What was imported may be the cause, so it goes, also if it is pinned."""
    history = Scenario(
        4002155,
        Setup(memory=64, objects=68, settle=False, share=0.3, stall=0.02, mixed=True),
        (
            Happening(0.5, "ask", who=1, talk=1, how="turn", size=1, seed=561650186, reply=7),
            Happening(0.539, "ask", who=2, how="turn", size=2, seed=911585441, reply=2),
            Happening(2.3853, "ask", who=1, how="turn", size=18, seed=79783606, reply=8),
            Happening(6.0607, "pin", who=2, size=100, reply=1),
            Happening(6.558, "fault", how="import", reply=1),
            Happening(12.9785, "ask", who=2, how="turn", size=1, seed=428805635, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_history_waits_until_what_hung_is_known_again() -> None:
    """The history ended between the end of a hang and the next look at the catalogue."""
    history = Scenario(
        4200145,
        Setup(any_cut=True, slots=1, memory=59, objects=151, settle=False, explain=False, share=0.3, queue=6),
        (
            Happening(15.6971, "ask", talk=2, how="turn", size=1, seed=355642940, reply=1),
            Happening(16.5571, "ask", who=1, talk=1, how="turn", size=1, seed=570374109),
            Happening(17.6602, "fault", how="hung_read", size=5, reply=1),
            Happening(20.9963, "fault", how="power_loss", size=1, reply=1),
            Happening(24.7367, "pin", talk=2, size=100, reply=1),
            Happening(25.2681, "ask", who=1, talk=1, how="turn", size=16, seed=691486225, reply=1),
            Happening(25.5242, "ask", talk=1, how="turn", size=4, seed=730604157, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_nothing_is_pinned_while_a_damaged_catalogue_is_replaced() -> None:
    """A check could not open a catalogue that was not there."""
    history = Scenario(
        4103867,
        Setup(memory=21, objects=16, tenants=4, transfer=256, explain=False, expire=200.0, queue=6, stall=0.02),
        (
            Happening(0.5, "ask", who=1, talk=2, how="turn", size=16, seed=235821738),
            Happening(1.0, "second", reply=1),
            Happening(1.2195, "fault", how="slow", reply=1),
            Happening(5.37, "fault", how="sql_corrupt", reply=1),
            Happening(6.9826, "unpin", who=1, talk=2, size=20, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_chain_is_unpinned_where_its_open_tail_is_not_known() -> None:
    """A second server sees the end of such a chain at its last full block."""
    history = Scenario(
        4101847,
        Setup(stateful=True, slots=3, memory=109, objects=32, explain=False, share=0.3),
        (
            Happening(0.8918, "ask", who=2, talk=1, how="turn", size=7, seed=904245552, reply=7),
            Happening(1.0, "second", reply=1),
            Happening(10.2988, "ask", talk=2, how="turn", size=1, seed=592824633, reply=7),
            Happening(17.8221, "delete", talk=2, reply=1),
            Happening(21.4123, "list", who=1, talk=1, size=100, reply=1),
            Happening(24.021, "delete", who=1, talk=2, size=100, reply=1),
            Happening(24.6987, "pin", who=2, talk=1, size=100, reply=1),
            Happening(40.4395, "unpin", who=2, talk=1, size=20, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_chain_is_pinned_while_another_server_unpins_one_with_the_same_blocks() -> None:
    """The disk hung in the second server, so its change of the catalogue came after the pin. That needs some of the blocks."""
    history = Scenario(
        4102598,
        Setup(mode="exact", any_cut=True, memory=16, objects=172, tenants=4, transfer=256),
        (
            Happening(0.7741, "ask", who=1, how="turn", size=20, seed=266727681, reply=7),
            Happening(0.7741, "ask", who=1, talk=2, how="flood", size=20, seed=208607049, reply=1),
            Happening(0.7741, "ask", who=2, talk=1, how="turn", size=14, seed=136067103, reply=7),
            Happening(0.8171, "ask", who=3, talk=2, how="turn", size=10, seed=925289004, reply=1),
            Happening(1.0, "second", reply=1),
            Happening(1.2157, "delete", who=1, talk=2, reply=1),
            Happening(2.7312, "ask", who=1, talk=1, how="turn", size=17, seed=738588200, reply=1),
            Happening(2.7329, "ask", talk=2, how="turn", size=7, seed=197770867, reply=4),
            Happening(2.7329, "ask", who=3, talk=1, how="turn", size=14, seed=781357185, reply=2),
            Happening(2.9643, "ask", who=2, how="turn", size=9, seed=675217234),
            Happening(2.9925, "ask", who=2, how="turn", size=12, seed=476267368, reply=12),
            Happening(2.9925, "ask", who=2, talk=2, how="turn", size=18, seed=753071874, reply=7),
            Happening(3.1996, "ask", talk=1, how="turn", size=6, seed=694886696, reply=12),
            Happening(3.2733, "delete", who=2, talk=2, reply=1),
            Happening(3.4004, "delete", talk=1, reply=1),
            Happening(3.631, "fault", how="hung", reply=1),
            Happening(5.3605, "ask", who=2, talk=1, how="turn", size=18, seed=1004966086, reply=5),
            Happening(9.0992, "unpin", who=3, talk=1, size=20, reply=1),
            Happening(32.1289, "pin", who=3, talk=2, size=20, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_the_clock_is_set_back_while_everything_is_deleted() -> None:
    """After that, times say nothing about what was deleted."""
    history = Scenario(
        4103609,
        Setup(
            stateful=True,
            slots=3,
            memory=100,
            objects=7,
            settle=False,
            expire=40.0,
            share=0.6,
            queue=6,
            stall=0.02,
            mixed=True,
            foreign=True,
        ),
        (
            Happening(0.5, "ask", who=2, talk=1, how="turn", size=1, seed=349633986, reply=11),
            Happening(0.5061, "fault", how="hung", size=3, reply=1),
            Happening(30.435, "rm", reply=1),
            Happening(34.5457, "clock", size=-4000, reply=1),
            Happening(58.5515, "ask", who=1, how="turn", size=13, seed=977304885, reply=5),
        ),
    )
    assert run(history).violation == ""


def test_a_program_that_evicts_nothing_may_find_too_much() -> None:
    """A power failure had brought an evicted object back."""
    history = Scenario(
        4300716,
        Setup(mode="exact", slots=1, memory=12, objects=15, expire=200.0, stall=0.02),
        (
            Happening(0.4644, "fault", how="bit_rot", size=1, reply=1),
            Happening(0.4844, "clock", size=-4000, reply=1),
            Happening(0.5, "ask", who=1, talk=1, how="turn", size=15, seed=177193834, reply=9),
            Happening(0.5337, "ask", talk=2, how="turn", size=15, seed=294458989, reply=3),
            Happening(0.7474, "ask", how="turn", size=5, seed=142485874, reply=5),
            Happening(0.8021, "ask", talk=2, how="again", size=1, seed=555615329, reply=11),
            Happening(0.8311, "ask", who=2, talk=1, how="flood", size=1, seed=962633982, reply=1),
            Happening(0.8311, "ask", who=2, talk=1, how="flood", size=1, seed=593821950, reply=1),
            Happening(0.8311, "ask", who=2, talk=1, how="turn", size=3, seed=612553360, reply=1),
            Happening(1.3978, "fault", how="power_loss", size=30, reply=1),
            Happening(3.4281, "fault", how="slow", reply=1),
            Happening(4.605, "rm", size=15, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_is_pinned_for_a_term_stays_when_another_chain_is_unpinned() -> None:
    """The checks forgot the pin when the owner got a term, which was not over."""
    history = Scenario(
        4402458,
        Setup(slots=4, memory=13, objects=30, transfer=1024, settle=False, share=0.6, queue=6, stall=0.02, mixed=True),
        (
            Happening(0.5226, "ask", who=1, talk=1, how="turn", size=9, seed=439653108, reply=8),
            Happening(11.4486, "pin", who=1, talk=1, size=100, reply=1),
            Happening(13.4519, "term", who=1, size=100, reply=1),
            Happening(18.9131, "ask", who=1, talk=2, how="turn", size=14, seed=467312343, reply=1),
            Happening(19.3293, "unpin", who=1, talk=2, size=100, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_longer_term_that_another_server_was_given_counts() -> None:
    """Each server was held to the term that it had been given itself."""
    history = Scenario(
        4750282,
        Setup(memory=93, objects=73, tenants=4, expire=200.0, share=0.6),
        (
            Happening(1.0, "second", reply=1),
            Happening(1.9008, "term", who=2, size=20, reply=1),
            Happening(2.0965, "delete", size=20, reply=1),
            Happening(2.9548, "pin", who=3, size=100, reply=1),
            Happening(3.3621, "term", who=3, talk=1, size=100, reply=1),
            Happening(3.4917, "pin", who=2, size=100, reply=1),
            Happening(7.4006, "ask", who=1, talk=1, how="turn", size=10, seed=110529041),
            Happening(8.4641, "ask", who=2, how="turn", size=17, seed=425959208, reply=1),
            Happening(12.8048, "list", talk=2, size=100, reply=1),
            Happening(14.5693, "term", who=2, talk=2, size=100, reply=1),
            Happening(34.4276, "ask", who=3, talk=2, how="turn", size=20, seed=329956643, reply=8),
            Happening(34.4739, "ask", who=3, how="turn", size=6, seed=946560000, reply=1),
            Happening(35.5534, "ask", who=2, how="turn", size=9, seed=962392077, reply=10),
        ),
    )
    assert run(history).violation == ""


def test_a_reply_that_goes_on_during_a_deletion_may_say_the_same_again() -> None:
    """The checks did not know that the block was new, whose last token no reply computes."""
    history = Scenario(
        4801145,
        Setup(mode="exact", any_cut=True, memory=53, objects=8, transfer=1024, expire=40.0, stall=0.02, mixed=True),
        (
            Happening(0.5275, "ask", talk=2, how="turn", size=18, seed=97304072, reply=11),
            Happening(2.3556, "ask", who=2, how="turn", size=19, seed=418949828, reply=10),
            Happening(4.1429, "ask", talk=1, how="turn", size=20, seed=953320002, reply=9),
            Happening(4.4473, "fault", how="power_loss", size=3, reply=1),
            Happening(5.1646, "ask", talk=1, how="turn", size=17, seed=796238966, reply=11),
            Happening(5.3397, "ask", talk=2, how="edit", size=1, seed=316681953, reply=1),
            Happening(6.3488, "ask", talk=1, how="edit", size=1, seed=71418087, reply=12),
            Happening(6.5316, "ask", who=1, talk=1, how="turn", size=19, seed=561442080, reply=8),
            Happening(11.0116, "ask", talk=1, how="again", size=1, seed=822576138, reply=1),
            Happening(11.0506, "delete", talk=1, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_pin_during_a_deletion_of_everything_does_not_keep_an_open_tail() -> None:
    """The checks expected it to."""
    history = Scenario(
        6000653,
        Setup(slots=3, memory=15, objects=93, tenants=4, transfer=1024, settle=False, share=0.3, stall=0.02),
        (
            Happening(2.5994, "ask", who=1, talk=1, how="turn", size=8, seed=373479456, reply=1),
            Happening(3.6928, "rm", reply=1),
            Happening(3.7237, "pin", who=1, talk=1, size=100, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_a_killed_program_has_left_is_found_at_the_next_clean_up() -> None:
    """The checks excused only what killed servers leave. `cache rm --all` could not delete an object, and was killed
    when it gave it its row again."""
    history = Scenario(
        19050728,
        Setup(mode="exact", slots=3, memory=32, objects=29, transfer=1024, explain=False, expire=200.0),
        (
            Happening(0.5402, "ask", who=2, talk=2, how="turn", size=18, seed=482169454, reply=1),
            Happening(3.5949, "fault", how="kill while writing", size=1, reply=1),
            Happening(4.5805, "fault", how="eperm", reply=1),
            Happening(5.4877, "rm", reply=1),
            Happening(6.0981, "ask", talk=1, how="turn", size=1, seed=364529892, reply=10),
            Happening(6.0981, "ask", how="turn", size=7, seed=297272021, reply=10),
            Happening(6.0981, "ask", talk=2, how="turn", size=7, seed=123654106, reply=10),
            Happening(7.3592, "ask", who=2, talk=1, how="turn", size=3, seed=235077888, reply=4),
            Happening(7.5385, "ask", who=2, talk=1, how="edit", size=5, seed=428476176, reply=12),
        ),
    )
    assert run(history).violation == ""


def test_what_is_neither_deleted_nor_listed_is_known() -> None:
    """The checks took for forgotten what a server could not evict, and not give its row again, but counts."""
    history = Scenario(
        20051248,
        Setup(
            mode="exact",
            stateful=True,
            any_cut=True,
            slots=4,
            memory=52,
            objects=81,
            tenants=4,
            transfer=1024,
            explain=False,
            foreign=True,
            shared="valkey",
            encrypt=True,
            apart=True,
        ),
        (
            Happening(0.4322, "fault", how="store_hung", size=10, reply=1),
            Happening(0.5, "ask", who=2, talk=2, how="turn", size=7, seed=1056287124, reply=12),
            Happening(0.5258, "ask", talk=2, how="turn", size=5, seed=820197552, reply=8),
            Happening(0.6797, "abort", talk=2, reply=1),
            Happening(1.0, "second", reply=1),
            Happening(1.713, "ask", talk=1, how="turn", size=7, seed=495576594, reply=9),
            Happening(10.491, "ask", who=2, talk=2, how="turn", size=2, seed=94213245, reply=5),
            Happening(10.6547, "ask", who=3, talk=1, how="turn", size=5, seed=506427434, reply=1),
            Happening(10.7609, "fault", how="power_loss while writing", reply=1),
            Happening(11.2616, "ask", who=3, how="turn", size=3, seed=450506519, reply=5),
            Happening(15.3835, "fault", how="hung_read", reply=1),
            Happening(21.8739, "delete", who=1, reply=1),
            Happening(22.6381, "fault", how="sql_busy", size=10, reply=1),
            Happening(22.9371, "ask", who=3, talk=1, how="turn", size=20, seed=1004494563, reply=1),
            Happening(33.6964, "fault", how="eacces", size=3, reply=1),
            Happening(34.8628, "fault", how="slow", reply=1),
            Happening(40.2026, "fault", how="eio", size=1, reply=1),
            Happening(46.4869, "ask", who=2, how="turn", size=10, seed=977671904, reply=2),
        ),
    )
    assert run(history).violation == ""


def test_what_has_just_been_pinned_is_heard_of_at_the_next_look() -> None:
    """The history ended before the other server had looked."""
    history = Scenario(
        22057487,
        Setup(
            stateful=True,
            any_cut=True,
            slots=3,
            memory=85,
            objects=51,
            tenants=4,
            transfer=1024,
            settle=False,
            explain=False,
            share=0.6,
            shared="valkey",
            store=20,
        ),
        (
            Happening(0.5, "ask", talk=2, how="turn", size=12, seed=708262682, reply=8),
            Happening(1.0, "second", reply=1),
            Happening(4.2412, "ask", who=2, how="turn", size=2, seed=184609711, reply=5),
            Happening(8.7137, "term", talk=2, size=20, reply=1),
            Happening(9.8601, "ask", who=1, talk=2, how="turn", size=1, seed=25538167),
            Happening(10.8343, "unpin", who=1, talk=1, size=20, reply=1),
            Happening(26.9946, "ask", who=2, talk=1, how="turn", size=16, seed=972579863, reply=10),
            Happening(29.1462, "ask", talk=2, how="turn", size=12, seed=19326303),
            Happening(30.0504, "ask", how="turn", size=3, seed=408660520),
            Happening(31.4175, "ask", who=3, talk=2, how="turn", size=15, seed=527971534, reply=3),
            Happening(51.8079, "pin", who=1, talk=2, size=100, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_another_server_could_not_delete_is_found_at_the_next_clean_up() -> None:
    """One server could neither delete an object nor give it a row again, and then its disk failed. The
    other one wrote as if the object were not there."""
    history = Scenario(
        28011472,
        Setup(stateful=True, slots=3, objects=18, tenants=4, transfer=1024, explain=False, share=0.6, mixed=True),
        (
            Happening(0.8119, "ask", who=1, talk=2, how="turn", size=12, seed=1070736253, reply=11),
            Happening(1.0, "second", reply=1),
            Happening(11.535, "ask", who=2, talk=1, how="turn", size=9, seed=557027626, reply=9),
            Happening(11.714, "fault", how="short_write", size=3, reply=1),
            Happening(11.8392, "pin", who=3, talk=1, size=100, reply=1),
            Happening(11.9205, "fault", how="eacces", reply=1),
            Happening(12.71, "fault", how="eperm", reply=1),
            Happening(14.5545, "fault", how="sql_readonly", size=10, reply=1),
            Happening(15.6981, "ask", talk=1, how="turn", size=12, seed=508694433, reply=9),
            Happening(20.9436, "fault", how="enospc", reply=1),
            Happening(24.4676, "fault", how="eio", reply=1),
            Happening(34.7258, "restart", seed=716132508, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_row_may_stay_if_sqlite_fails_when_its_object_is_put_aside() -> None:
    """`headstart cache rm` put a damaged object into quarantine, could not remove its row, and ended."""
    history = Scenario(
        34053493,
        Setup(
            slots=1,
            memory=20,
            objects=29,
            tenants=4,
            transfer=1024,
            settle=False,
            explain=False,
            stall=0.02,
            shared="valkey",
            store=100,
            apart=True,
        ),
        (
            Happening(0.5, "ask", who=2, talk=2, how="turn", size=13, seed=230888922, reply=11),
            Happening(3.8019, "fault", how="sql_readonly", size=10, reply=1),
            Happening(6.0205, "fault", how="decode", reply=1),
            Happening(6.4925, "fault", how="bit_rot", size=1, reply=1),
            Happening(7.7093, "ask", talk=1, how="turn", size=1, seed=477064279, reply=7),
            Happening(11.0243, "rm", size=15, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_refused_unpin_leaves_what_is_pinned() -> None:
    """The end of a chain was evicted, so an unpin of it was refused. Its pinned beginning stayed pinned."""
    history = Scenario(
        34054016,
        Setup(memory=17, objects=104, transfer=256, share=0.6, queue=6, stall=0.02, mixed=True, templates=True, fills=1),
        (
            Happening(0.5, "ask", who=2, talk=2, how="turn", size=1, seed=718776538, reply=10),
            Happening(0.5, "ask", who=1, talk=2, how="turn", size=11, seed=516950512, reply=1),
            Happening(0.5, "ask", talk=1, how="turn", size=3, seed=612315280),
            Happening(0.5, "ask", who=1, how="turn", size=16, seed=887121189, reply=12),
            Happening(0.5133, "ask", talk=2, how="turn", size=6, seed=978908277, reply=7),
            Happening(1.3621, "ask", who=1, how="branch", size=2, seed=421414697, reply=7),
            Happening(1.494, "ask", who=1, talk=1, how="turn", size=12, seed=784873714, reply=10),
            Happening(1.4977, "ask", how="turn", size=1, seed=413614919, reply=11),
            Happening(10.0829, "ask", who=1, how="turn", size=10, seed=528007588, reply=2),
            Happening(13.8869, "delete", who=1, size=20, reply=1),
            Happening(15.7767, "pin", talk=2, size=20, reply=1),
            Happening(16.3233, "pin", who=1, talk=2, size=20, reply=1),
            Happening(19.8629, "ask", who=1, talk=2, how="turn", size=12, seed=59183564, reply=12),
            Happening(25.2214, "pin", talk=1, size=100, reply=1),
            Happening(25.4897, "pin", who=1, size=20, reply=1),
            Happening(26.576, "ask", who=2, talk=1, how="turn", size=17, seed=486135528, reply=11),
            Happening(26.7209, "ask", who=1, talk=2, how="turn", size=11, seed=129783738, reply=9),
            Happening(30.17, "unpin", who=1, talk=2, size=100, reply=1),
            Happening(31.4441, "unpin", who=1, talk=1, size=20, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_a_killed_program_leaves_behind_waits_for_the_next_start() -> None:
    """`headstart cache rm` was killed when it gave rows back to what it could not delete. No server that runs need know."""
    history = Scenario(
        47066998,
        Setup(
            stateful=True,
            slots=3,
            memory=99,
            objects=156,
            tenants=4,
            explain=False,
            share=0.6,
            shared="valkey",
            encrypt=True,
            store=20,
            apart=True,
            fills=1,
        ),
        (
            Happening(0.5, "ask", who=3, talk=1, how="turn", size=19, seed=698362896, reply=1),
            Happening(0.5, "ask", who=2, talk=2, how="turn", size=2, seed=70562503, reply=7),
            Happening(4.5256, "pin", who=2, talk=2, size=100, reply=1),
            Happening(6.5506, "ask", who=3, talk=2, how="turn", size=18, seed=488844022, reply=1),
            Happening(10.925, "ask", who=3, talk=1, how="branch", size=20, seed=951722713, reply=10),
            Happening(11.2955, "fault", how="sql_full", size=30, reply=1),
            Happening(11.6503, "ask", who=2, talk=1, how="turn", size=1, seed=375656910, reply=7),
            Happening(15.4115, "fault", how="sql_io", size=1, reply=1),
            Happening(19.0066, "rm", reply=1),
            Happening(20.9822, "fault", how="kill while writing", reply=1),
            Happening(21.5461, "fault", how="eperm", size=30, reply=1),
            Happening(25.391, "fault", how="kill while writing", size=3, reply=1),
            Happening(26.3739, "rm", reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_history_is_not_over_before_the_disk_has_answered() -> None:
    """An index dropped pinned entries while it heard of a deletion, and had yet to ask its disk for them."""
    history = Scenario(
        47014788,
        Setup(
            mode="exact",
            slots=3,
            memory=106,
            objects=101,
            tenants=4,
            transfer=256,
            share=0.6,
            shared="valkey",
            store=20,
            apart=True,
            pieces=True,
        ),
        (
            Happening(0.5, "ask", who=1, talk=1, how="turn", size=20, seed=76366450, reply=5),
            Happening(1.0, "second", reply=1),
            Happening(1.9529, "fault", how="prefill", reply=1),
            Happening(2.5834, "ask", who=2, how="turn", size=7, seed=329408268, reply=9),
            Happening(2.6125, "ask", who=3, talk=1, how="turn", size=1, seed=401815116),
            Happening(2.6125, "ask", who=3, talk=2, how="turn", size=1, seed=333161109, reply=11),
            Happening(3.2512, "ask", who=3, how="turn", size=2, seed=531933755, reply=2),
            Happening(4.3068, "ask", who=3, talk=1, how="edit last", size=11, seed=402646968, reply=4),
            Happening(4.3068, "ask", who=3, talk=2, how="turn", size=4, seed=270887368, reply=2),
            Happening(6.3955, "fault", how="prefill", reply=1),
            Happening(6.9334, "erase slot", who=3, size=100, reply=1),
            Happening(7.5099, "list", who=3, talk=2, size=100, reply=1),
            Happening(9.7936, "pin", who=3, size=100, reply=1),
            Happening(11.3736, "pin", who=3, talk=2, size=100, reply=1),
            Happening(15.6025, "pin", who=3, talk=1, size=20, reply=1),
            Happening(21.4499, "delete", who=2, talk=1, size=100, reply=1),
            Happening(23.9187, "ask", who=3, how="turn", size=6, seed=93110817, reply=1),
            Happening(23.955, "delete", who=3, size=100, reply=1),
            Happening(25.3676, "ask", how="turn", size=18, seed=416283030, reply=1),
            Happening(26.3523, "ask", who=2, talk=2, how="turn", size=19, seed=1043365740, reply=9),
            Happening(27.255, "ask", who=3, talk=2, how="turn", size=8, seed=627701008, reply=10),
            Happening(27.8273, "ask", who=1, how="turn", size=7, seed=311493701, reply=3),
            Happening(28.7667, "ask", who=1, talk=1, how="turn", size=16, seed=555965759, reply=1),
            Happening(44.4198, "ask", who=1, talk=1, how="turn", size=10, seed=995917913, reply=8),
            Happening(45.0902, "fault", how="prefill", reply=1),
            Happening(50.1464, "fault", how="eacces", size=1, reply=1),
            Happening(50.9067, "delete", who=2, talk=2, size=20, reply=1),
            Happening(52.2284, "restart", seed=752621751, reply=1),
            Happening(52.8083, "ask", who=2, talk=2, how="turn", size=2, seed=82573803, reply=12),
            Happening(52.9461, "ask", who=2, talk=2, how="branch", size=1, seed=279978331, reply=10),
            Happening(54.7971, "ask", who=3, how="turn", size=5, seed=93199325, reply=9),
        ),
    )
    assert run(history).violation == ""


def test_a_fleet_asks_the_first_server_again_for_what_others_have_of_a_chain() -> None:
    """The first server had lost a block in the middle, and left what was before it. A fleet asks all servers twice."""
    history = Scenario(
        47018708,
        Setup(
            slots=1,
            memory=118,
            objects=127,
            transfer=256,
            settle=False,
            explain=False,
            expire=200.0,
            mixed=True,
            shared="valkey",
            encrypt=True,
            apart=True,
        ),
        (
            Happening(0.5041, "ask", who=2, talk=1, how="turn", size=3, seed=607768176, reply=9),
            Happening(0.5531, "ask", how="turn", size=3, seed=634609823, reply=5),
            Happening(0.6191, "ask", who=1, talk=2, how="turn", size=13, seed=975211607, reply=3),
            Happening(1.0, "second", reply=1),
            Happening(1.2362, "fault", how="sql_full", size=1, reply=1),
            Happening(4.5873, "term", who=1, talk=2, size=20, reply=1),
            Happening(8.1822, "ask", who=2, talk=2, how="turn", size=1, seed=937933394, reply=9),
            Happening(8.3241, "ask", who=1, talk=2, how="turn", size=20, seed=109208895, reply=12),
            Happening(11.0359, "pin", who=1, talk=1, size=100, reply=1),
            Happening(11.3977, "ask", who=1, talk=2, how="turn", size=8, seed=298969648, reply=9),
            Happening(12.5701, "ask", how="turn", size=12, seed=26949560),
            Happening(20.5058, "restart", seed=300596124, reply=1),
            Happening(20.5058, "fault", how="cut", size=2, reply=1),
            Happening(20.5058, "fault", how="cut", size=2, reply=1),
            Happening(20.5058, "fault", how="bit_rot", size=2, reply=1),
            Happening(21.7706, "delete", who=1, talk=2, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_a_rebuilt_catalogue_knows_again_goes_at_the_next_look() -> None:
    """`verify --repair` hung while it rebuilt one, and ended after the last look of each server."""
    history = Scenario(
        47040077,
        Setup(stateful=True, slots=3, memory=97, objects=105, expire=200.0, stall=0.02, fills=4),
        (
            Happening(0.6879, "ask", who=1, how="turn", size=18, seed=89489317, reply=5),
            Happening(0.7118, "ask", how="turn", size=20, seed=24623949, reply=3),
            Happening(0.8386, "fault", how="hung_read", reply=1),
            Happening(1.6123, "second", reply=1),
            Happening(1.8105, "fault", how="sql_io", size=10, reply=1),
            Happening(2.4522, "fault", how="sql_corrupt", size=3, reply=1),
            Happening(3.2171, "fault", how="eacces", size=3, reply=1),
            Happening(3.6481, "pin", who=2, talk=2, size=20, reply=1),
            Happening(3.7732, "ask", who=1, talk=2, how="turn", size=2, seed=43508421, reply=8),
            Happening(5.4494, "list", who=1, size=20, reply=1),
            Happening(7.6929, "ask", talk=1, how="turn", size=20, seed=851468035, reply=1),
            Happening(10.7843, "clock", size=4000, reply=1),
            Happening(11.5274, "fault", how="sql_corrupt", size=30, reply=1),
            Happening(12.1212, "unpin", who=2, talk=2, size=20, reply=1),
            Happening(12.6376, "ask", talk=1, how="turn", size=11, seed=417849015, reply=5),
            Happening(12.6384, "ask", who=1, talk=1, how="flood", size=6, seed=351589309, reply=5),
            Happening(12.6384, "ask", who=1, how="flood", size=1, seed=792700254, reply=5),
            Happening(12.6384, "ask", who=1, talk=2, how="turn", size=6, seed=935869526, reply=5),
            Happening(12.6384, "ask", who=1, how="flood", size=6, seed=1035174112, reply=1),
            Happening(12.6384, "restart", seed=760142769, reply=1),
            Happening(12.6602, "ask", who=1, how="turn", size=18, seed=463557886, reply=7),
            Happening(12.6602, "ask", who=1, talk=2, how="turn", size=18, seed=480973655, reply=7),
            Happening(12.6783, "erase slot", who=1, talk=1, size=100, reply=1),
            Happening(12.7485, "ask", who=1, talk=1, how="retry", size=12, seed=701205531, reply=1),
            Happening(13.4662, "verify", size=5, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_another_server_needed_at_a_deletion_may_leave_ghosts_there() -> None:
    """The other server evicted all of it before anybody looked."""
    history = Scenario(
        47088972,
        Setup(
            mode="exact",
            slots=4,
            memory=29,
            objects=100,
            tenants=4,
            expire=40.0,
            share=0.6,
            queue=6,
            mixed=True,
            shared="valkey",
            store=20,
            apart=True,
            pieces=True,
        ),
        (
            Happening(3.4919, "fault", how="store_down", size=3, reply=1),
            Happening(4.3509, "ask", who=2, how="turn", size=14, seed=990515275, reply=2),
            Happening(4.3743, "ask", who=1, talk=1, how="turn", size=1, seed=538501870, reply=5),
            Happening(4.5566, "delete", who=1, talk=1, reply=1),
            Happening(4.6144, "ask", talk=1, how="turn", size=1, seed=33840251, reply=9),
            Happening(5.9856, "delete", talk=1, reply=1),
            Happening(9.6353, "delete", who=1, talk=2, size=100, reply=1),
            Happening(10.6031, "space", size=35651584, reply=1),
            Happening(13.2774, "ask", who=2, how="edit", size=20, seed=956342330, reply=12),
            Happening(14.5044, "ask", who=3, how="turn", size=8, seed=905056282, reply=4),
            Happening(21.7779, "ask", who=3, how="branch", size=5, seed=241278417, reply=9),
            Happening(28.3978, "ask", who=1, talk=1, how="turn", size=13, seed=663917944, reply=12),
            Happening(28.7063, "ask", talk=1, how="branch", size=12, seed=700357318, reply=7),
            Happening(28.7635, "ask", who=2, talk=1, how="turn", size=10, seed=309395382),
            Happening(30.9906, "delete", who=2, talk=2, reply=1),
            Happening(35.9664, "second", reply=1),
            Happening(37.8744, "ask", who=2, how="turn", size=13, seed=291541388),
            Happening(39.4199, "fault", how="store_hung", size=3, reply=1),
            Happening(40.9718, "ask", how="turn", size=1, seed=244935932, reply=12),
            Happening(40.9718, "ask", who=2, talk=2, how="turn", size=10, seed=749930967, reply=8),
            Happening(42.702, "ask", who=3, how="turn", size=6, seed=401716493, reply=1),
            Happening(42.7611, "ask", who=2, how="edit", size=8, seed=141313275, reply=12),
            Happening(43.5157, "fault", how="store_hung", reply=1),
            Happening(44.7276, "ask", who=2, how="style", size=13, seed=943216253, reply=1),
            Happening(44.771, "delete", who=2, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_hung_server_hears_of_a_deletion_when_its_disk_answers() -> None:
    """Another server of the folder had deleted a chain, and had been stopped since."""
    history = Scenario(
        47042715,
        Setup(memory=19, objects=189, transfer=256, explain=False, share=0.6, mixed=True, fills=1),
        (
            Happening(0.5, "ask", who=1, talk=2, how="turn", size=10, seed=747050675, reply=12),
            Happening(1.0, "second", reply=1),
            Happening(1.2807, "ask", who=1, how="turn", size=4, seed=803248311, reply=8),
            Happening(1.7855, "ask", talk=1, how="turn", size=10, seed=864805739),
            Happening(2.1434, "ask", who=1, how="edit", size=20, seed=455473896, reply=10),
            Happening(2.1542, "ask", who=2, talk=2, how="turn", size=10, seed=668835759, reply=1),
            Happening(2.2062, "fault", how="power_loss", size=1, reply=1),
            Happening(2.4168, "ask", who=2, how="turn", size=1, seed=737092403),
            Happening(2.4168, "ask", who=2, talk=2, how="branch", size=15, seed=105018420, reply=8),
            Happening(3.3455, "fault", how="cut", size=5, reply=1),
            Happening(3.4964, "ask", talk=1, how="edit last", size=1, seed=763884765, reply=9),
            Happening(4.1368, "delete", talk=1, reply=1),
            Happening(5.4385, "ask", who=1, talk=1, how="turn", size=8, seed=180493192, reply=8),
            Happening(5.4777, "ask", who=2, talk=1, how="turn", size=9, seed=999214277, reply=7),
            Happening(5.6865, "ask", talk=2, how="turn", size=8, seed=1041164526, reply=9),
            Happening(5.6865, "ask", who=1, talk=1, how="turn", size=12, seed=642323163, reply=1),
            Happening(6.1586, "delete", who=1, talk=1, reply=1),
            Happening(8.0142, "fault", how="power_loss", size=30, reply=1),
            Happening(12.4264, "fault", how="export", size=3, reply=1),
            Happening(13.4039, "fault", how="decode", reply=1),
            Happening(13.927, "ask", who=1, talk=2, how="turn", size=1, seed=167773319, reply=9),
            Happening(17.4435, "fault", how="hung", size=1, reply=1),
            Happening(19.2604, "fault", how="sql_full", size=1, reply=1),
            Happening(21.5983, "ask", talk=2, how="edit last", size=19, seed=407923246, reply=7),
            Happening(21.6873, "delete", talk=2, reply=1),
            Happening(21.7824, "ask", who=2, talk=1, how="turn", size=1, seed=1012080357, reply=9),
            Happening(21.7824, "ask", who=1, how="turn", size=18, seed=613971740, reply=4),
            Happening(22.4148, "ask", talk=1, how="edit", size=14, seed=7339453, reply=9),
            Happening(24.1741, "ask", who=1, talk=1, how="turn", size=5, seed=590985620, reply=1),
            Happening(24.1759, "ask", talk=1, how="turn", size=1, seed=395809346, reply=1),
            Happening(25.2864, "ask", how="turn", size=15, seed=733107778, reply=7),
            Happening(26.5318, "ask", talk=2, how="turn", size=1, seed=885901614, reply=9),
            Happening(30.6258, "fault", how="sql_full", size=1, reply=1),
            Happening(33.0177, "fault", how="bit_rot", size=2, reply=1),
            Happening(33.3925, "delete", who=1, talk=2, size=100, reply=1),
            Happening(33.8284, "restart", seed=876504181, reply=1),
            Happening(35.4039, "ask", who=2, talk=2, how="turn", size=16, seed=348564523, reply=11),
            Happening(35.5133, "delete", who=2, talk=2, reply=1),
            Happening(37.33, "second", how="stop", reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_a_hung_server_believes_in_may_be_deleted_and_on_its_way_again() -> None:
    """`gc` had deleted an object. Power failed while the server wrote it again."""
    history = Scenario(
        47043468,
        Setup(
            slots=1,
            memory=62,
            objects=112,
            transfer=1024,
            expire=40.0,
            stall=0.02,
            mixed=True,
            templates=True,
            fills=1,
            pieces=True,
        ),
        (
            Happening(0.5, "ask", who=1, talk=1, how="turn", size=20, seed=282409325, reply=8),
            Happening(0.5017, "ask", who=1, talk=1, how="branch", size=8, seed=173470690, reply=1),
            Happening(0.7683, "ask", who=2, talk=1, how="turn", size=9, seed=262169881, reply=3),
            Happening(0.7813, "ask", who=2, talk=2, how="turn", size=18, seed=592514678, reply=8),
            Happening(1.7211, "ask", who=2, talk=2, how="edit last", size=10, seed=635273888, reply=5),
            Happening(1.7269, "ask", talk=2, how="turn", size=11, seed=278167490, reply=7),
            Happening(1.9925, "fault", how="hung", size=1, reply=1),
            Happening(2.5207, "ask", who=2, talk=2, how="edit", size=19, seed=310799335, reply=3),
            Happening(4.4106, "gc", size=5, reply=1),
            Happening(16.0748, "erase slot", talk=2, size=20, reply=1),
            Happening(16.6852, "fault", how="power_loss while writing", size=10, reply=1),
            Happening(24.5257, "ask", talk=1, how="turn", size=19, seed=1158888, reply=2),
        ),
    )
    assert run(history).violation == ""
