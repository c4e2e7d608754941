"""What the simulation has found in the disk tier: the catalogue, the budget, pins and the quarantine."""

from __future__ import annotations

from headstart.testing.simulation.history import Happening, Scenario, Setup
from headstart.testing.simulation.run import run


def test_a_disk_that_hangs_does_not_count_as_fast() -> None:
    """Reads that were refused at once set the seconds of a read to 0. The next plan divided by them, and its request failed."""
    history = Scenario(
        39,
        Setup(mode="exact", stateful=True, any_cut=True, memory=24, objects=62, explain=False, share=0.3),
        (
            Happening(1.0396, "ask", who=1, talk=2, how="turn", size=1, seed=487374877, reply=12),
            Happening(5.5362, "fault", how="hung_read", size=40, reply=1),
            Happening(5.708, "ask", who=1, talk=2, how="edit", size=7, seed=406758576, reply=1),
            Happening(7.2988, "ask", who=2, talk=1, how="turn", size=9, seed=437718295, reply=3),
            Happening(7.2988, "ask", who=1, how="turn", size=1, seed=207414468, reply=3),
            Happening(7.487, "ask", talk=2, how="turn", size=15, seed=433989543),
            Happening(7.7223, "ask", talk=1, how="turn", size=15, seed=730562342, reply=1),
            Happening(26.5018, "ask", who=1, talk=2, how="turn", size=13, seed=926493238, reply=1),
            Happening(26.5439, "ask", who=1, talk=1, how="turn", size=20, seed=679558843, reply=8),
            Happening(26.5762, "ask", talk=2, how="turn", size=8, seed=321393300, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_reconcile_puts_aside_loses_its_row() -> None:
    """A bad object went into quarantine after a fault of the disk, and its row stayed: it counted as stored for ever."""
    history = Scenario(
        89,
        Setup(mode="exact", stateful=True, any_cut=True, slots=1, memory=93, objects=68, share=0.6, stall=0.02),
        (
            Happening(6.4178, "ask", who=1, talk=1, how="turn", size=13, seed=152362250, reply=1),
            Happening(8.0493, "fault", how="cut", size=1, reply=1),
            Happening(14.6366, "fault", how="sql_full", size=1, reply=1),
            Happening(20.3261, "ask", who=2, talk=2, how="turn", size=17, seed=867160436, reply=1),
            Happening(20.4058, "fault", how="import checkpoint", reply=1),
            Happening(22.4591, "ask", who=1, how="turn", size=10, seed=572828633, reply=7),
            Happening(26.6461, "fault", how="emfile", reply=1),
            Happening(39.6417, "fault", how="enospc", reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_catalogue_that_cannot_be_deleted_whole_can_be_opened_again() -> None:
    """The log was deleted before the database, which could not be. A second server went on with the deleted log, so nobody
    could open the catalogue as long as it ran, and what it wrote was lost."""
    history = Scenario(
        362,
        Setup(mode="exact", slots=3, memory=106, objects=63, tenants=4),
        (
            Happening(18.2403, "second"),
            Happening(27.2451, "fault", how="eacces", size=1),
            Happening(35.3701, "fault", how="sql_corrupt", size=3),
            Happening(36.103, "fault", how="cut", size=1),
        ),
    )
    assert run(history).violation == ""


def test_an_owner_hears_that_the_disk_cannot_be_used() -> None:
    """A pin, unpin or deletion that met a fault of the disk raised SQLite's error, which no caller knows, not `Unavailable`."""
    history = Scenario(
        400,
        Setup(mode="exact", stateful=True, slots=1, memory=102, objects=84, tenants=4, transfer=1024, explain=False),
        (
            Happening(10.5711, "fault", how="hung_read", size=1),
            Happening(11.6168, "ask", who=1, talk=2, how="turn", size=12, seed=594361989, reply=8),
            Happening(12.2278, "ask", who=3, talk=2, how="turn", size=14, seed=155578352, reply=5),
            Happening(18.6355, "ask", talk=1, how="turn", size=1, seed=505146588, reply=10),
            Happening(18.6355, "ask", talk=1, how="flood", size=17, seed=199655217, reply=1),
            Happening(20.769, "unpin", who=1, talk=2, size=20),
            Happening(24.4088, "fault", how="sql_full"),
        ),
    )
    assert run(history).violation == ""


def test_a_look_that_fails_loses_no_news() -> None:
    """A fault of the catalogue ended a look at what another process had deleted. What it had found until then was lost, so the
    server went on to believe that it was on disk, and kept it in memory."""
    history = Scenario(
        1000150,
        Setup(mode="exact", memory=82, objects=11, tenants=4, settle=False, share=0.3, mixed=True),
        (
            Happening(0.5394, "ask", who=1, how="turn", size=15, seed=1071427921, reply=1),
            Happening(1.0519, "fault", how="sql_busy", reply=1),
            Happening(1.4953, "term", talk=2, size=20, reply=1),
            Happening(6.2786, "rm", size=5, reply=1),
            Happening(10.8597, "fault", how="sql_busy", size=3, reply=1),
            Happening(11.0094, "fault", how="sql_io", size=30, reply=1),
            Happening(12.3464, "fault", how="export", reply=1),
        ),
    )
    assert run(history).violation == ""


def test_a_damaged_catalogue_is_deleted_under_the_lock() -> None:
    """One server hung when it had deleted the catalogue, but not its log. A second one made a new catalogue with a new log, and
    lost that when the first one went on."""
    history = Scenario(
        4101183,
        Setup(stateful=True, slots=4, memory=92, objects=28, settle=False, explain=False, stall=0.02),
        (
            Happening(1.0, "second", reply=1),
            Happening(1.0966, "fault", how="hung", reply=1),
            Happening(3.3459, "fault", how="eio", reply=1),
            Happening(8.8615, "ask", who=2, talk=2, how="turn", size=15, seed=131015786, reply=9),
            Happening(8.891, "ask", talk=1, how="turn", size=1, seed=206443284, reply=10),
            Happening(10.22, "ask", how="turn", size=5, seed=882952444, reply=1),
            Happening(11.5327, "fault", how="sql_corrupt", size=10, reply=1),
            Happening(15.7039, "fault", how="sql_full", size=1, reply=1),
            Happening(27.204, "fault", how="hung", size=10, reply=1),
            Happening(31.7617, "fault", how="enospc", reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_a_killed_server_has_renamed_is_durable_before_it_is_listed() -> None:
    """It had not synced the folder. The next server listed the objects, and a power failure took them."""
    history = Scenario(
        7853469,
        Setup(mode="exact", slots=3, memory=31, objects=25, explain=False, queue=6, shared="valkey", apart=True),
        (
            Happening(0.5, "ask", who=1, talk=2, how="turn", size=1, seed=701732369, reply=8),
            Happening(0.7605, "delete", who=1, talk=2, size=20, reply=1),
            Happening(1.0, "second", reply=1),
            Happening(1.6973, "ask", who=1, talk=2, how="turn", size=6, seed=186584056, reply=1),
            Happening(1.6973, "ask", who=2, how="turn", size=15, seed=634558382, reply=3),
            Happening(3.9664, "fault", how="hung", size=10, reply=1),
            Happening(4.7365, "fault", how="slow", size=10, reply=1),
            Happening(4.9097, "restart", seed=1068844382, reply=1),
            Happening(5.2325, "ask", who=2, talk=2, how="turn", size=13, seed=490403533, reply=11),
            Happening(6.8511, "fault", how="store_rot", size=1, reply=1),
            Happening(7.9788, "ask", how="turn", size=19, seed=477480932),
            Happening(8.3481, "list", who=2, size=20, reply=1),
            Happening(8.7528, "unpin", size=100, reply=1),
            Happening(8.7973, "fault", how="bit_rot", size=3, reply=1),
            Happening(10.2812, "ask", who=1, talk=2, how="turn", size=7, seed=776129016, reply=11),
            Happening(10.4705, "fault", how="missing", size=3, reply=1),
            Happening(11.7235, "pin", who=2, talk=2, size=100, reply=1),
            Happening(11.7365, "fault", how="sql_readonly", size=3, reply=1),
            Happening(12.1331, "rm", reply=1),
            Happening(12.3892, "ask", who=1, talk=1, how="turn", size=19, seed=1033524628, reply=3),
            Happening(18.0775, "fault", how="sql_readonly", size=30, reply=1),
            Happening(18.457, "ask", talk=2, how="turn", size=8, seed=697094326, reply=10),
            Happening(18.5383, "fault", how="kill", size=30, reply=1),
            Happening(26.2129, "fault", how="power_loss", size=3, reply=1),
            Happening(55.8482, "fault", how="enospc", size=1, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_what_may_have_no_row_counts() -> None:
    """The catalogue was full, and then could not be read: nobody knew that what had just been written has no row. It did not
    count, and the folder became larger than its budget."""
    history = Scenario(
        22057337,
        Setup(
            mode="exact",
            slots=3,
            memory=35,
            objects=29,
            explain=False,
            share=0.6,
            queue=6,
            mixed=True,
            foreign=True,
            shared="valkey",
            encrypt=True,
            store=100,
            apart=True,
        ),
        (
            Happening(0.5, "ask", talk=1, how="turn", size=6, seed=478495752, reply=12),
            Happening(0.9356, "fault", how="prefill", reply=1),
            Happening(1.0, "second", reply=1),
            Happening(1.6234, "fault", how="sql_full", reply=1),
            Happening(4.4257, "fault", how="sql_corrupt", size=30, reply=1),
            Happening(5.544, "list", who=1, talk=2, size=20, reply=1),
            Happening(5.5627, "ask", who=2, talk=1, how="turn", size=11, seed=1010184945, reply=2),
            Happening(6.4361, "ask", who=2, talk=2, how="turn", size=6, seed=167501140, reply=4),
            Happening(7.3227, "fault", how="export", size=1, reply=1),
            Happening(8.2307, "ask", who=1, talk=2, how="turn", size=18, seed=860486453, reply=4),
            Happening(8.8333, "ask", who=2, talk=2, how="edit", size=9, seed=1041001853),
            Happening(9.1174, "ask", who=2, how="turn", size=11, seed=725604037),
            Happening(9.1556, "ask", how="turn", size=12, seed=229418611, reply=5),
            Happening(9.1556, "ask", who=2, talk=2, how="again", size=1, seed=664499695, reply=11),
            Happening(10.3687, "delete", size=100, reply=1),
            Happening(10.8063, "ask", who=1, talk=2, how="turn", size=1, seed=489694923, reply=11),
            Happening(10.8063, "ask", who=1, talk=1, how="turn", size=1, seed=489132888, reply=11),
        ),
    )
    assert run(history).violation == ""


def test_what_cannot_be_put_aside_stays_pinned() -> None:
    """A bad object, which the folder did not let into quarantine, lost its pin and stayed."""
    history = Scenario(
        22008905,
        Setup(any_cut=True, slots=1, memory=25, objects=85, explain=False, share=0.3, mixed=True, shared="s3", store=20),
        (
            Happening(0.5, "ask", how="turn", size=12, seed=288776936, reply=5),
            Happening(0.728, "ask", how="turn", size=1, seed=489625836, reply=3),
            Happening(0.7989, "ask", how="edit", size=2, seed=72387653, reply=3),
            Happening(1.0626, "fault", how="export", reply=1),
            Happening(1.2913, "ask", how="edit", size=15, seed=355263261, reply=1),
            Happening(1.6985, "delete", who=2, talk=2, size=20, reply=1),
            Happening(2.8248, "ask", who=2, how="turn", size=11, seed=1057103559, reply=4),
            Happening(3.175, "pin", who=2, talk=2, size=100, reply=1),
            Happening(4.6453, "delete", talk=2, size=100, reply=1),
            Happening(5.7933, "fault", how="enospc", reply=1),
            Happening(5.9254, "pin", size=20, reply=1),
            Happening(6.5135, "fault", how="decode", size=10, reply=1),
            Happening(6.5833, "fault", how="decode", reply=1),
            Happening(7.5005, "delete", who=2, talk=1, size=20, reply=1),
            Happening(7.9527, "delete", who=1, talk=1, size=100, reply=1),
            Happening(8.418, "fault", how="eacces", size=1, reply=1),
            Happening(8.4447, "fault", how="cut", size=2, reply=1),
            Happening(8.4636, "list", talk=1, size=20, reply=1),
            Happening(8.7548, "pin", who=2, talk=1, size=100, reply=1),
            Happening(8.7969, "fault", how="eperm", reply=1),
            Happening(9.3742, "fault", how="slow", size=3, reply=1),
            Happening(9.7519, "fault", how="sql_corrupt", reply=1),
            Happening(10.019, "pin", who=1, talk=2, size=20, reply=1),
            Happening(10.3107, "fault", how="prefill", size=1, reply=1),
            Happening(10.4076, "fault", how="sql_full", reply=1),
            Happening(10.5712, "list", talk=1, size=100, reply=1),
            Happening(10.8481, "delete", who=2, talk=1, size=100, reply=1),
            Happening(11.4473, "pin", who=1, talk=2, size=20, reply=1),
            Happening(11.5621, "fault", how="power_loss", size=90, reply=1),
            Happening(12.4289, "pin", size=100, reply=1),
            Happening(12.5035, "ask", talk=2, how="turn", size=1, seed=892682657, reply=11),
            Happening(16.4085, "ask", talk=1, how="turn", size=17, seed=197071065, reply=1),
            Happening(16.5704, "ask", how="turn", size=1, seed=312998929, reply=1),
            Happening(16.77, "ask", who=2, talk=2, how="turn", size=1, seed=289300914, reply=1),
            Happening(16.77, "ask", who=2, how="flood", size=1, seed=619506568, reply=1),
            Happening(16.77, "ask", who=2, how="flood", size=1, seed=929348641, reply=1),
            Happening(16.77, "ask", who=2, how="flood", size=1, seed=941649085, reply=1),
            Happening(16.77, "ask", who=2, talk=2, how="turn", size=5, seed=97847545, reply=1),
            Happening(16.77, "ask", who=2, talk=1, how="turn", size=5, seed=1067428605, reply=1),
            Happening(16.77, "restart", seed=313490720, reply=1),
            Happening(17.6856, "ask", how="turn", size=3, seed=622244714, reply=1),
            Happening(17.7252, "second", reply=1),
            Happening(17.766, "ask", talk=2, how="turn", size=1, seed=1009338941, reply=10),
        ),
    )
    assert run(history).violation == ""


def test_what_is_put_aside_keeps_its_pin_until_it_is_there() -> None:
    """A good object, which could not be read for a moment, lost its row; then power failed, and it stayed without its pin."""
    history = Scenario(
        28038364,
        Setup(any_cut=True, memory=23, objects=44, stall=0.02, fills=1),
        (
            Happening(0.5, "ask", who=1, talk=2, how="turn", size=19, seed=901740864, reply=10),
            Happening(0.8644, "pin", who=1, talk=2, size=20, reply=1),
            Happening(11.6621, "fault", how="sql_io", reply=1),
            Happening(15.2705, "fault", how="power_loss while writing", reply=1),
            Happening(16.7054, "fault", how="emfile", reply=1),
            Happening(17.5136, "fault", how="eacces", size=10, reply=1),
            Happening(27.8163, "verify", size=20, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_room_is_kept_for_what_a_crash_left_before_all_rows_are_read() -> None:
    """Power failed in a write, so objects had no row. A large folder is cleaned up when its rows have been read, and what was
    written until then filled the budget."""
    history = Scenario(
        1242,
        Setup(
            mode="exact",
            stateful=True,
            slots=4,
            memory=15,
            objects=26,
            transfer=256,
            expire=40.0,
            share=0.6,
            stall=0.02,
            shared="valkey",
            store=20,
            fills=1,
            pieces=True,
        ),
        (
            Happening(0.5, "ask", who=1, talk=2, how="turn", size=1, seed=586966839, reply=9),
            Happening(0.5092, "ask", who=1, how="turn", size=8, seed=921418273, reply=5),
            Happening(0.5277, "ask", how="turn", size=12, seed=1049811633, reply=10),
            Happening(2.0136, "ask", talk=2, how="turn", size=12, seed=270192871, reply=1),
            Happening(11.9325, "restart", seed=240554147, reply=1),
            Happening(12.0216, "fault", how="power_loss while writing", size=10, reply=1),
            Happening(12.0628, "ask", who=1, talk=1, how="turn", size=15, seed=788501010, reply=1),
        ),
    )
    assert run(history).violation == ""


def test_an_unpin_may_take_what_another_pinned_chain_began_with_once_that_is_damaged() -> None:
    """The disk damaged the fourth block of the other one, so nothing pinned continued the first three.
    This is a limit of pins, which is not mended: the checks allow it."""
    history = Scenario(
        47031071,
        Setup(slots=1, memory=24, objects=17, share=0.6, stall=0.02, fills=1, pieces=True),
        (
            Happening(0.5, "ask", who=2, how="turn", size=18, seed=999943025, reply=11),
            Happening(2.239, "pin", who=2, size=20, reply=1),
            Happening(3.5662, "ask", who=2, talk=1, how="turn", size=10, seed=48695765),
            Happening(4.4759, "fault", how="cut", size=1, reply=1),
            Happening(5.4106, "restart", seed=637870491, reply=1),
            Happening(5.7046, "ask", who=1, talk=1, how="turn", size=14, seed=324714334, reply=2),
            Happening(6.3412, "ask", who=2, talk=2, how="turn", size=3, seed=303858860, reply=12),
            Happening(31.5217, "unpin", who=2, talk=2, size=20, reply=1),
        ),
    )
    assert run(history).violation == ""
