# ruff: noqa: E501
"""Planted faults: changes of the code that must be found, by the simulation or by a test. Each is a text of a module, and what
replaces it. `python tests/planted.py` searches them all, and prints the table of docs/simulation.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import headstart

SOURCE = Path(headstart.__file__).parent
TESTS = Path(__file__).parent
HISTORIES = 2000
"""Most histories for a fault."""


@dataclass(frozen=True)
class Planted:
    """A fault. `old` stands once in the module. If histories hardly ever find it, `rare` says why, and `test` finds it."""

    name: str
    module: str
    old: str
    new: str
    rare: str = ""
    test: str = ""

    def plant(self, source: Path) -> None:
        path = source / self.module
        text = path.read_text("utf-8")
        assert text.count(self.old) == 1, f"{self.name}: the text stands {text.count(self.old)} times in {self.module}"
        path.write_text(text.replace(self.old, self.new), "utf-8")


@dataclass(frozen=True)
class Found:
    """How a planted fault was found; `line` is empty if it was not. `seconds` are of CPU time, with the start of Python."""

    line: str
    seconds: float


def search(planted: Planted, folder: Path) -> Found:
    """Runs histories up to the first that fails, or the fault's test, with a copy of the code in which it is planted.

    Without it, the same history or test must not fail.
    """
    copy = folder / "headstart"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    planted.plant(copy)
    before = os.times()
    test = "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", planted.test
    ended = _run(folder, *(test if planted.test else _simulate(f"0..{HISTORIES - 1}")))
    after = os.times()
    begins = ("FAILED ",) if planted.test else ("seed ",)
    found = next((line for line in ended.stdout.splitlines() if line.startswith(begins)), "")
    assert found or ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-2000:]
    if found:
        seed = found.removeprefix("seed ").partition(":")[0]
        without = _run(SOURCE.parent, *(test if planted.test else _simulate(f"{seed}..{seed}")))
        assert without.returncode == 0, f"it fails without the planted fault too: {without.stdout}"
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return Found(found.split(" - ")[0], seconds)


def _simulate(seeds: str) -> tuple[str, ...]:
    return "headstart.testing.simulation", "--seeds", seeds, "--first", "--no-shrink"


def _run(code: Path, module: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs a module with the code in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", module, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=TESTS.parent)


PLANTED = (
    Planted(
        "a file is not synced",
        "tiers/disk/files.py",
        "        os.fsync(file)\n    except BaseException:",
        "    except BaseException:",
    ),
    Planted(
        "a folder is not synced",
        "tiers/disk/store.py",
        "                files.sync(self.objects)\n                self.catalog.add",
        "                self.catalog.add",
    ),
    Planted(
        "a short write is taken for a whole one",
        "tiers/disk/files.py",
        "            while done < len(part):\n",
        "            if done < len(part):\n",
    ),
    Planted(
        "a checksum is not compared", "tiers/disk/reader.py", "    if format.checksum(out) != header.checksum:", "    if False:"
    ),
    Planted(
        "two renames are swapped",
        "tiers/disk/store.py",
        "for path, file in zip(temporary, new, strict=False):",
        "for path, file in zip(temporary[::-1], new, strict=False):",
    ),
    Planted(
        "what cannot be deleted and gets no row is not counted",
        "tiers/disk/store.py",
        "            self._strange |= {row.label.key: row.allocated for row in rows}\n",
        "",
        rare="two faults must meet one eviction: of the file, and of the catalogue",
        test="tests/tiers/disk/test_store.py::test_an_object_that_cannot_be_deleted_and_gets_no_row_again_counts_in_the_budget",
    ),
    Planted(
        "evicted files stay",
        "tiers/disk/store.py",
        '                self.path(key).unlink(missing_ok=True)\n            except OSError as error:\n                log.warning("cannot delete',
        '                pass\n            except OSError as error:\n                log.warning("cannot delete',
    ),
    Planted(
        "stored objects are not counted",
        "tiers/disk/store.py",
        "        return self.catalog.used() + sum(self._strange.values()) + files.occupied(self._temporary) + self._quarantine.used",
        "        return files.occupied(self._temporary) + self._quarantine.used",
    ),
    Planted(
        "a bad object keeps its row",
        "tiers/disk/store.py",
        "            if self._allocated(key) is None:\n                self.catalog.remove([key])\n",
        "            pass\n",
    ),
    Planted(
        "a file goes before its row",
        "tiers/disk/store.py",
        "        (forget or (lambda: self.catalog.remove(keys)))()\n        stuck",
        "        for key in keys:\n            self.path(key).unlink(missing_ok=True)\n        (forget or (lambda: self.catalog.remove(keys)))()\n        stuck",
    ),
    Planted(
        "a notice is missed",
        "tiers/write_behind.py",
        "        self._end(one, ObjectRefused(one.label, reason))\n",
        "",
    ),
    Planted(
        "the queue of the disk never gets shorter",
        "tiers/write_queue.py",
        "            self.waiting -= len(one.payload)",
        "            pass",
    ),
    Planted(
        "an eviction is not announced",
        "tiers/write_behind.py",
        '        self.counters["evicted"] += len(gone)\n        self._forget(gone)\n        done',
        '        self.counters["evicted"] += len(gone)\n        done',
        rare="the look at the catalogue that follows finds it too, so it matters only if that look fails",
        test="tests/tiers/test_write_behind.py::test_what_is_evicted_is_told_before_what_takes_its_place",
    ),
    Planted("an entry that is written is not pinned", "serving/offload.py", "        entry.holds += 1\n", ""),
    Planted(
        "what memory has to drop is offered",
        "serving/offload.py",
        "entry.owner in self._barred.owners or entry.id in self._barred or entry.id in self.erased",
        "entry.owner in self._barred.owners",
        rare="it must wait for the disk just when the disk deletes it; then only a moment is lost, because the disk is asked again",
        test="tests/serving/test_expiry.py::test_what_memory_has_to_drop_is_not_offered",
    ),
    Planted(
        "what is over here is not asked for",
        "serving/offload.py",
        "            self._doubt(key, entry.owner)\n",
        "",
        rare="another server must have stored it later; what the disk only keeps a little longer soon goes there too",
        test="tests/serving/test_expiry.py::test_what_is_over_here_may_be_younger_on_disk",
    ),
    Planted(
        "what is on its way goes with an older one",
        "serving/offload.py",
        "(self._erased_meanwhile if key in self.writing else self.erased).add(key)",
        "self.erased.add(key)",
        rare="a chain that is due must be computed again just before the disk deletes it",
        test="tests/serving/test_expiry.py::test_an_entry_on_its_way_to_the_disk_outlives_the_end_of_an_older_one",
    ),
    Planted(
        "what was deleted on its way to the disk is offered again",
        "serving/offload.py",
        "                    if label.key in self._erased_meanwhile:",
        "                    if not label.key:",
        rare="another process must delete it in the middle of a look, while a better copy is on its way",
        test="tests/serving/test_expiry.py::test_what_the_disk_has_deleted_and_refuses_is_dropped",
    ),
    Planted(
        "a tombstone is told before what it has deleted",
        "tiers/catalog_watch.py",
        "self._owners_erased(catalog, self._buried_before)",
        "self._owners_erased(catalog, catalog.ages.last_tombstone())",
        rare="another process must delete in the middle of a look",
        test="tests/tiers/test_catalog_watch.py::test_a_tombstone_is_told_after_all_that_it_has_deleted",
    ),
    Planted(
        "what a failed look was to tell is not told",
        "tiers/write_behind.py",
        "            if again:\n                self._reads.again = True\n",
        "",
        rare="the catalogue must fail in the look after a hung read",
        test="tests/tiers/test_write_behind.py::test_a_fault_of_the_look_that_tells_anew_loses_nothing",
    ),
    Planted(
        "a cell is freed while a hung read may write into it",
        "serving/prefetch.py",
        "                    self._lent.append((result.over, cell))",
        "                    self._memory.release(cell)",
    ),
    Planted(
        "a failed read keeps its cell",
        "serving/prefetch.py",
        "                else:\n                    self._memory.release(cell)\n",
        "",
    ),
    Planted(
        "a cell is freed twice",
        "tiers/memory.py",
        "        if old is not None:\n            self._give(self._leave(old))",
        "        if old is not None:\n            self._give(self._at(old))\n            self._give(self._leave(old))",
    ),
    Planted(
        "a replaced cell is lost",
        "tiers/memory.py",
        "        if old is not None:\n            self._give(self._leave(old))",
        "        pass",
    ),
    Planted(
        "memory goes beyond its budget", "tiers/memory.py", "self.used + size <= self._budget)", "self.used <= self._budget)"
    ),
    Planted("a quota is not counted", "tiers/memory.py", "        self.quota.hold(cell.owner, -arena.size)\n", ""),
    Planted(
        "KV after derived KV counts as canonical",
        "serving/slots.py",
        "        if canonical and self.canonical == self._length:\n            self.canonical = end",
        "        self.canonical = end",
    ),
    Planted(
        "decoded KV counts as canonical",
        "serving/slots.py",
        "        if canonical and self.canonical == self._length:\n            self.canonical += 1",
        "        self.canonical = self._length + 1",
    ),
    Planted(
        "a derived checkpoint counts as canonical",
        "serving/state_checkpoints.py",
        "        canonical = slot.canonical == len(slot)\n        known",
        "        canonical = True\n        known",
    ),
    Planted(
        "restored KV counts as canonical",
        "serving/kv_restore.py",
        "slot.assign(chain, plan.start, plan.canonical, [",
        "slot.assign(chain, plan.start, plan.start, [",
    ),
    Planted(
        "a slot is not cut where the prompt differs",
        "serving/admission.py",
        "            self._engine.truncate(slot.number, choice.keep)\n",
        "",
    ),
    Planted(
        "what follows a stop text stays",
        "serving/running_jobs.py",
        "                self._engine.truncate(slot.number, seen)\n",
        "                pass\n",
    ),
    Planted(
        "a slot keeps what a failed prefill left",
        "serving/running_jobs.py",
        "        if slot is not None and not computed:\n            self._admission.empty(slot)",
        "        pass",
    ),
    Planted(
        "KV of other positions is saved",
        "serving/kv_save.py",
        "spans = [Span(entry.start, entry.stop, ",
        "spans = [Span(0, len(entry.tokens), ",
    ),
    Planted(
        "a decoded token is not recorded",
        "serving/decode.py",
        "                job.slot.append(job.token, canonical=self._mode.any_cut)\n",
        "",
    ),
    Planted("computed tokens are not counted", "serving/prefill.py", "        job.computed += size\n", ""),
    Planted(
        "a failed request hears nothing",
        "serving/running_jobs.py",
        "        job.ticket.emit(Failed(error))\n        slot = job.slot",
        "        slot = job.slot",
    ),
    Planted("a slot stays busy", "serving/running_jobs.py", "            job.slot.busy = False\n", ""),
    Planted("the ranks forget nothing", "serving/memory_budget.py", "        self.retention.forget(entry)\n", ""),
    Planted(
        "a refusal by the engine ends the save",
        "serving/kv_save.py",
        "            if not isinstance(error, EngineError):\n                raise",
        "            raise",
    ),
    Planted(
        "tenants share a root",
        "prefix_cache/blocks.py",
        "return owner + blake3(head + utf8(salt)).digest()[OWNER:]",
        "return blake3(head).digest()",
    ),
    Planted(
        "settling uses nobody's salt",
        "serving/settle.py",
        "root = root_id(self._engine.fingerprint, task.turn.prompt.salt)",
        'root = root_id(self._engine.fingerprint, "")',
    ),
    Planted(
        "the last token is not computed", "prefix_cache/planner.py", "    limit = len(chain) - 1\n", "    limit = len(chain)\n"
    ),
    Planted(
        "a fault of an owner's call ends the disk's thread",
        "tiers/write_behind.py",
        "        except Exception as error:  # any error: the thread must go on, or offered objects get no answer",
        "        except OSError as error:",
    ),
    Planted(
        "a deletion leaves its files",
        "tiers/disk/store.py",
        "            gone = set(self._remove(keys, lambda: self.catalog.ages.wipe(keys, before, self._clock(), buried)))\n",
        "            gone = set(keys)\n            self.catalog.ages.wipe(keys, before, self._clock(), buried)\n",
    ),
    Planted(
        "a deletion leaves the ghosts of checkpoints",
        "serving/stored.py",
        "                keys |= set(map(checkpoint_id, blocks))  # one that was evicted has left a ghost\n",
        "",
    ),
    Planted(
        "a deletion leaves ghosts in the catalogue",
        "tiers/disk/ages.py",
        '"objects WHERE key = ?", "ghosts WHERE key = ?", ',
        '"objects WHERE key = ?", ',
    ),
    Planted("a deletion leaves notes", "tiers/disk/ages.py", ', "notes WHERE block = ?"):', "):"),
    Planted(
        "a deletion leaves slots",
        "serving/expiry.py",
        "            slot.unsavable |= erased.within(slot)\n",
        "",
    ),
    Planted(
        "a deletion leaves open tails in slots",
        "serving/erased_text.py",
        "                if as_tokens(rest).tobytes().startswith(packed):\n",
        "                if False:\n",
    ),
    Planted("a deletion leaves the history", "serving/expiry.py", "        self._history.forget(over)\n", ""),
    Planted(
        "nothing expires in slots",
        "serving/expiry.py",
        "        if not (slot.unsavable or over):\n",
        "        if not slot.unsavable:\n",
    ),
    Planted(
        "a deletion is not durable",
        "tiers/disk/store.py",
        "        files.sync(self.objects)\n        return self._scrub(spare)",
        "        return self._scrub(spare)",
    ),
    Planted(
        "a deletion leaves the quarantine",
        "tiers/disk/store.py",
        "            self._quarantine.empty()\n            self._sweep",
        "            self._sweep",
    ),
    Planted(
        "deleted text stays in the log of the catalogue",
        "tiers/disk/schema.py",
        '    busy, *_ = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()\n',
        "    busy = 0\n",
    ),
    Planted(
        "deleted text stays in pages of the catalogue",  # without `VACUUM` alone, `secure_delete` still overwrites nearly all of it
        "tiers/disk/schema.py",
        '    database.execute("VACUUM")\n',
        '    database.execute("PRAGMA secure_delete=OFF")\n',
    ),
    Planted("a deleted turn is settled", "serving/expiry.py", "        self._settle.forget(given_up)\n", ""),
    Planted(
        "the loss of the catalogue undoes a deletion",
        "tiers/disk/catalog_file.py",
        "        if catalog.ages.wiped()[1]:\n            return\n",
        "        return\n",
        rare="a catalogue must be lost before a server hears of a deletion",
        test="tests/tiers/disk/test_store.py::test_the_loss_of_the_catalogue_does_not_undo_a_deletion",
    ),
    Planted("pinned objects are evicted", "tiers/disk/ranks.py", "children = 0 AND pinned = 0{whose}", "children = 0{whose}"),
    Planted(
        "pinned entries leave memory",
        "serving/pins.py",
        "            entry.pinned = True\n            self._held",
        "            self._held",
    ),
    Planted(
        "pins are not limited on disk",
        "tiers/disk/store.py",
        "            if not all(limits.fits(held[owner]",
        "            if False and not all(limits.fits(held[owner]",
    ),
    Planted(
        "pins are not limited in memory",
        "serving/pins.py",
        "        if self._fits(entry.owner, size, size):\n",
        "        if True:\n",
    ),
    Planted("a pin is not marked", "tiers/disk/store.py", "            self.catalog.pin(keys)\n", ""),
    Planted(
        "a pin is answered too early",
        "serving/stored.py",
        "            fits = self._wait(on_disk)\n",
        "            fits = True\n",
    ),
    Planted(
        "an unpinned object stays pinned",
        "tiers/write_behind.py",
        "            disk.catalog.unpin(gone)\n",
        "",
        rare="the answers to all earlier pins of the history must be known",
        test="tests/serving/test_stored.py::test_a_pin_outlives_the_server",
    ),
    Planted(
        "unpinning takes what other pinned chains need",
        "serving/stored.py",
        "                if any(child.id in self._pins and child.id not in gone for child in self._index.children(block)):\n",
        "                if False:\n",
        rare="the catalogue leaves what other pinned objects need too",
        test="tests/serving/test_stored.py::test_shared_beginnings_stay_pinned_as_long_as_one_needs_them",
    ),
    Planted(
        "a pinned chain can be deleted",
        "serving/stored.py",
        "            if any(entry.id in self._pins for entry in going):\n",
        "            if False:\n",
        rare="the disk looks for pins too, so only a pinned open tail shows it",
        test="tests/serving/test_stored.py::test_shared_beginnings_stay_pinned_as_long_as_one_needs_them",
    ),
    Planted(
        "what is being deleted is saved again",
        "serving/kv_save.py",
        " or self._store.barred.meets(slot.ids):",
        ":",
        rare="a request must repeat a text, and end, while the disk deletes it; then its slot is saved once more, and nothing is missing",
        test="tests/serving/test_barred.py::test_what_is_asked_again_while_it_is_deleted_is_saved_afterwards",
    ),
    Planted(
        "what another server has pinned can be deleted",
        "tiers/disk/store.py",
        "                if any(row.pinned for row in rows):\n",
        "                if False:\n",
        rare="one server must pin a chain within a quarter of a second before another one deletes it",
        test="tests/serving/test_barred.py::test_what_another_server_has_just_pinned_is_not_deleted",
    ),
    Planted(
        "what only memory has stays after a deletion elsewhere",
        "serving/expiry.py",
        "                        if entry.owner not in barred.owners or ",
        "                        if True or ",
    ),
    Planted(
        "slots stay after a deletion elsewhere",
        "serving/expiry.py",
        "            slot.unsavable |= len(slot) > 0 and owner_of(slot.root) in whose\n",
        "",
        rare="a slot must keep text that is nowhere else when another server deletes it",
        test="tests/serving/test_barred.py::test_what_the_disk_has_evicted_is_forgotten_too",
    ),
    Planted(
        "texts stay after a deletion elsewhere",
        "serving/expiry.py",
        "                limits[salt] = math.inf if owner in whose else self._terms.due(owner, now)\n",
        "                limits[salt] = self._terms.due(owner, now)\n",
    ),
    Planted(
        "what was offered before a deletion elsewhere is written",
        "tiers/catalog_watch.py",
        "        return owners is None or label.owner in owners or (bool(owners) and not label.owner)\n",
        "        return False\n",
        rare="an object must wait for the disk just while another server deletes it",
        test="tests/serving/test_barred.py::test_what_was_offered_before_is_not_written_afterwards",
    ),
    Planted(
        "a deletion elsewhere takes what is pinned",
        "serving/expiry.py",
        " or disk in entry.copies or entry.id in pins:\n",
        " or disk in entry.copies:\n",
        rare="the pinned chain must have a part that only memory has",
        test="tests/serving/test_barred.py::test_what_is_pinned_stays",
    ),
    Planted(
        "a server forgets what a deletion of everything spares",
        "serving/kv_store.py",
        "        if entry.written > self.terms.before or self._on_disk(self.index.get(entry.id)):\n",
        "        if entry.written > self.terms.before:\n",
    ),
    Planted(
        "a deletion of everything leaves memory",
        "serving/expiry.py",
        "                self._walk_again = True\n                for slot",
        "                for slot",
    ),
    Planted(
        "an emptied quarantine comes back",
        "tiers/disk/files.py",
        "        raise errors[0]\n    sync(folder)\n",
        "        raise errors[0]\n",
        rare="a damaged object must have left the quarantine for want of space before its chain is deleted",
        test="tests/system/simulated/test_found_deletions.py::test_a_deletion_empties_the_quarantine_for_good",
    ),
    Planted(
        "a deletion leaves the shared store",
        "serving/stored.py",
        "self._cache.shared.erase(labels)\n",
        "self._cache.shared.erase(())\n",
    ),
    Planted(
        "a deletion leaves evicted checkpoints in the shared store",
        "serving/cache.py",
        "        if entry.state or not self._stateful:\n",
        "        if True:\n",
    ),
    Planted(
        "a deletion is answered before memory has the store's answer",
        "serving/stored.py",
        "                self._cache.store.shared_offer.take_answers()  # of what the shared store was being sent\n",
        "",
        rare="an entry must be on its way to the store just when its deletion is answered",
        test="tests/system/test_shared_trouble.py::test_the_end_of_a_deletion_hears_what_the_store_has_just_answered",
    ),
    Planted(
        "a deletion ends before the shared store has deleted",
        "serving/stored.py",
        "            errors = self._error(on_disk), self._error(shared)  # as long as the store has it, a request would fetch it again\n",
        "            errors = self._error(on_disk), None\n",
        rare="the store must fail, or take longer than the disk, just when it deletes",
        test="tests/system/test_shared.py::test_who_deletes_hears_that_the_store_failed",
    ),
    Planted(
        "the tag of an object in the shared store is not compared",
        "tiers/shared/envelope.py",
        "        if not secrets.compare_digest(_tag(name, (blob[:-tag],), key), bytes(blob[-tag:])):\n",
        "        if False:\n",
    ),
    Planted(
        "another object under its name is taken from the shared store",
        "tiers/shared/envelope.py",
        "    if not label.canonical or not label.serves(wanted):\n",
        "    if not label.canonical:\n",
        rare="the tag covers the name too",
        test="tests/tiers/shared/test_envelope.py::test_each_wrong_object_has_its_reason",
    ),
    Planted(
        "a fleet leaves the earlier turns of a conversation that has moved",
        "serving/stored.py",
        "            ends = self._on_engine(lambda: self._ends(elsewhere))\n",
        "            ends = list[BlockId]()\n",
    ),
    Planted(
        "a fleet leaves what is computed during a deletion",
        "serving/stored.py",
        "            self._delete(list, lambda: elsewhere[0].owner, elsewhere)\n",
        "            pass\n",
    ),
    Planted(
        "what waits for the shared store is evicted",
        "serving/shared_offer.py",
        "            entry.holds += 1\n",
        "            pass\n",
    ),
    Planted(
        "what has arrived from the shared store keeps its pin",
        "serving/shared_fetch.py",
        "        entry.holds -= 1\n",
        "        pass\n",
    ),
    Planted(
        "what outlives its term stays in the shared store",
        "tiers/shared/writing.py",
        "            return self._link.store.put(name, blob, age=age, life=life)\n",
        "            return self._link.store.put(name, blob, age=age)\n",
    ),
)


def main() -> None:
    for planted in PLANTED:
        with tempfile.TemporaryDirectory() as folder:
            found = search(planted, Path(folder))
        seed, _, words = found.line.removeprefix("FAILED ").partition(": ")
        how = f"`{planted.test}`; histories hardly ever: {planted.rare}" if planted.test else f"{words} ({seed})"
        print(f"| {planted.name} | {how if found.line else '**not found**'} | {found.seconds:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
