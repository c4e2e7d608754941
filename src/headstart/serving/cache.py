"""Cache: index + retention + tiers, as the scheduler uses them. Saves what a slot holds, restores it, forgets it.

Rows go from a slot to memory, and whole blocks from there on to disk, behind the engine's back. Rows on disk come to
memory before they go into a slot. Checkpoints, in models with state, go the same ways; they are taken at the very moment at
which a slot is as long as they say, never later.

Used from the engine thread only. A fault in here is a miss with a reason, never a failed request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from headstart.errors import EngineError
from headstart.explain.fingerprint import Opening, Openings
from headstart.interfaces.engine import Engine, Span
from headstart.interfaces.landmarks import Landmarks
from headstart.interfaces.tier import Kind
from headstart.interfaces.tokens import BlockId, as_tokens
from headstart.prefix_cache.blocks import Chain, block_id, checkpoint_id, root_id
from headstart.prefix_cache.checkpoints import LOOSE, Placement, worth
from headstart.prefix_cache.eviction import Retention
from headstart.prefix_cache.expiry import Terms
from headstart.prefix_cache.index import Entry, Index
from headstart.prefix_cache.planner import Mode, Plan
from headstart.prefix_cache.quota import owner_of
from headstart.prefix_cache.reuse_model import UNKNOWN, About
from headstart.prompt.reply_tokens import Spelled, Spellings
from headstart.serving.kv_restore import Restored, Restorer
from headstart.serving.memory_budget import Room, pinned
from headstart.serving.offload import Spill
from headstart.serving.prefetch import Fetch
from headstart.serving.slots import Slot
from headstart.tiers.disk import Label, Note
from headstart.tiers.memory import Cell, Memory
from headstart.tiers.no_disk import NoDisk

NOWHERE = Landmarks()

SECURE = 5.0
"""Seconds of work after which finished blocks are copied out of a busy slot: what a crash may cost."""
SECURE_SHARE = 0.02
"""Most of the engine's time that this may take."""


class Cache:
    """What is outside of the slots.

    Attributes:
        seconds: of prefill that a token costs; whoever measures it says so.
        counters: pieces `saved`, `evicted`, `thinned` and `erased`; refusals as `skipped_<reason>`; faults as `fault_<reason>`.
        terms: how long anything may be kept, by `wall`: seconds since 1970.
    """

    def __init__(
        self,
        engine: Engine,
        memory: Memory,
        mode: Mode,
        clock: Callable[[], float],
        policy: str = "value",
        disk: NoDisk | None = None,
        spellings: Spellings | None = None,
        terms: Terms | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.index = Index(engine.traits.grid)
        self.memory = memory
        self.disk = NoDisk() if disk is None else disk
        self.seconds = 1e-3
        self.counters: Counter[str] = Counter()
        self._engine = engine
        self._mode = mode
        self._clock = clock
        self.terms = Terms() if terms is None else terms
        self.wall = wall
        self._grid = engine.traits.grid
        self._save_cost = 0.0  # seconds that the last copy out of a busy slot took
        self._retention = Retention(memory.name, self.index, self._saved_per_byte, policy)
        self._openings = Openings()
        self.spill = Spill(
            self.index,
            memory,
            self.disk,
            Spellings() if spellings is None else spellings,
            self._openings,
            self._label,
            self._stored,
            lambda: self._clock(),
        )
        self.room = Room(
            self.index,
            memory,
            self._retention,
            self.spill,
            self.counters,
            ctx=engine.shape.ctx,
            row_bytes=engine.shape.row_bytes,
            transfer_bytes=engine.shape.transfer_bytes,
            release=engine.release,
            keeps_on=self.disk.name,
        )
        self.fetch = Fetch(self.disk, self.room, self._label, engine.shape.row_bytes, lambda: self._clock())
        self._restorer = Restorer(engine, mode, self.room, self.fetch, self.disk.name)

    def _saved_per_byte(self, entry: Entry) -> float:
        # In units of one token's prefill. That later tokens cost more is left out: it would rank the end of a long prompt
        # above the beginning of every other.
        rows = self._engine.shape.row_bytes
        if entry.state:
            return worth(self._gap(entry), self.memory.state_bytes, rows, firm=entry.firm)
        if not rows:
            return 0.0
        return LOOSE / rows if self._mode.traits.stateful else len(entry.tokens) / self.memory.cell_bytes

    def _gap(self, state: Entry) -> int:
        """Tokens between a checkpoint and the one before it on its line: what it saves."""
        if state.gap:
            return state.gap
        piece = self.index.get(state.parent)
        while piece is not None and piece.start:
            if self._marked(piece.parent):
                return state.stop - piece.start
            piece = self.index.get(piece.parent)
        return state.stop

    # ── save ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, slot: Slot, *, needed: bool = False, spare: Sequence[Entry] = (), again: bool = False) -> None:
        """Copies out what `slot` holds and memory lacks (or has only derived). Afterwards the slot is not dirty, unless some of
        it has to wait; it is `kept` if nothing was refused.

        `needed`: a request waits for these rows, so they are let in whatever else they displace, but for `spare`.
        `again`: it is tried every now and then, so that what is refused does not count as a use.
        """
        if slot.forsaken:
            slot.dirty, slot.kept = False, True
        if not slot.dirty:
            return
        slot.kept = not slot.busy and (self.checkpoint(slot, spare=spare) is not None or self._checkpoint_at(slot) is None)
        wanted = self._wanted(slot)
        # Derived rows that are being written must stay as they are until then.
        slot.dirty = any(entry.id in self.spill.writing for entry, _ in wanted)
        if not wanted:
            return
        with pinned(spare):
            if not self.room.claim(len(slot)):
                slot.kept = False
                return
            wanted = [(entry, _) for entry, _ in self._wanted(slot) if entry.id not in self.spill.writing]  # some was evicted
            held = [known for piece in slot.ids if (known := self.index.get(piece)) is not None]
            with pinned(held):
                self._copy_out(slot, wanted, needed=needed, again=again)

    def _copy_out(self, slot: Slot, wanted: Sequence[tuple[Entry, bool]], *, needed: bool, again: bool) -> None:
        now, cells = self._clock(), list[Cell]()
        for entry, _ in wanted:
            if (cell := self.room.take(entry, now, needed=needed, about=slot.about)) is None:
                break
            cells.append(cell)
        refused = wanted[len(cells) :]
        if refused:
            slot.kept = False
            self.room.skip("budget", len(refused))
        spans = [Span(entry.start, entry.stop, self.memory.cell(cell)) for (entry, _), cell in zip(wanted, cells, strict=False)]
        try:
            if spans and self.memory.cell_bytes:
                self._engine.export_rows(slot.number, spans)
        except BaseException as error:
            for cell in cells:
                self.memory.release(cell)
            if not isinstance(error, EngineError):
                raise
            self.room.fault("export", error)
            slot.kept = False
            return
        for (entry, canonical), cell in zip(wanted, cells, strict=False):
            self._publish(entry, cell, now, canonical=canonical)
        for entry, _ in refused if not again else ():  # behind what was let in: that is what they follow
            self._retention.refuse(entry, now, slot.about)
        if slot.about is not UNKNOWN:
            self._retention.replied([entry.id for entry, _ in wanted], slot.about)

    def _checkpoint_at(self, slot: Slot, landmarks: Landmarks = NOWHERE, *, firm: bool = True) -> Entry | None:
        """The checkpoint of `slot` as it is now; None if memory has one as good, or it is of no use."""
        if not self._mode.traits.stateful:
            return None
        length = len(slot)
        canonical = slot.canonical == length
        number, rest = divmod(length, self._grid)
        if not length or (self._mode.exact and (rest or not canonical)):
            return None
        start = length - (rest or self._grid)
        tokens = as_tokens(slot.tokens[start:])
        parent = block_id(slot.parent_of(number), tokens) if rest else slot.ids[number - 1]
        owner, written = owner_of(slot.root), slot.written(0, length)
        entry = Entry(checkpoint_id(parent), parent, tokens, start, state=True, firm=firm, owner=owner, written=written)
        if slot.forsaken or self.spent(entry):
            return None
        if entry.id in self.spill.writing or not self.index.wants(entry.id, self.memory.name, canonical=canonical):
            return None
        stay = {mark // self._grid for mark in (landmarks.anchor, landmarks.turn)}
        before = (at for at in range(start // self._grid, 0, -1) if self._marked(slot.ids[at - 1]))
        if firm:  # others may be gone when it is needed
            before = (at for at in before if at in stay or self.index.parts(slot.ids[at - 1]))
        entry.gap = length - next(before, 0) * self._grid
        return entry

    def mark(self, slot: Slot, before: BlockId | None) -> BlockId | None:
        """Takes a checkpoint while a reply goes on, in place of the one `before`: only its last block may be left again."""
        taken = self.checkpoint(slot, firm=False)
        known = self.index.get(before) if taken is not None and before is not None else None
        if known is not None and not (known.firm or known.canonical):  # it may be somebody else's by now
            self.room.discard(known.id)
        return taken or before

    def checkpoint(
        self, slot: Slot, landmarks: Landmarks = NOWHERE, *, firm: bool = True, spare: Sequence[Entry] = ()
    ) -> BlockId | None:
        """Takes the checkpoint of `slot` as it is now, if it has one that memory lacks (or has only derived): its id, then.

        `landmarks` of the prompt, and whether the point is `firm`, say what it is worth: see `prefix_cache/checkpoints`.
        """
        entry = self._checkpoint_at(slot, landmarks, firm=firm)
        if entry is None:
            return None
        canonical = slot.canonical == len(slot)
        known = [self.index.get(piece) for piece in slot.ids]
        with pinned([*spare, *(piece for piece in known if piece is not None)]):
            if not self.room.claim(len(slot)):
                return None
            now = self._clock()
            cell = self.room.take(entry, now, needed=False, about=slot.about)
            if cell is None:
                self.room.skip("budget", 1)
                self._retention.refuse(entry, now, slot.about)
                return None
            try:
                size = self._engine.export_checkpoint(slot.number, self.memory.cell(cell))
            except BaseException as error:
                self.memory.release(cell)
                if not isinstance(error, EngineError):
                    raise
                self.room.fault("export", error)
                return None
            self._publish(entry, cell, now, canonical=canonical, size=size)
            return entry.id

    def give_way(self, ids: Sequence[BlockId], stem: Chain, forgotten: Sequence[bytes]) -> None:
        """`stem` has taken the place of `ids`: what is derived of these blocks, and how they were spelled, leaves the disk."""
        stays, dead = set(stem.ids), set[BlockId]()
        for piece in reversed(ids):
            after = [entry.id for entry in self.index.following(piece) if len(entry.tokens) == self._grid]
            entry = self.index.get(piece)
            if piece in stays or (entry is not None and entry.canonical) or not dead.issuperset(after):
                break
            dead.add(piece)
        self.spill.bury([key for piece in dead for key in (checkpoint_id(piece), piece)])
        if stem.ids:
            for key in forgotten:
                self.disk.note(Note(key, stem.ids[-1], b""))

    def _marked(self, piece: BlockId) -> bool:
        return self.index.checkpoint(piece, canonical_only=False) is not None

    def thin(self, slot: Slot, placement: Placement, kept: Collection[int]) -> None:
        """Drops the checkpoints that `slot`'s line need not have any more. `kept`: lengths at which they stay in any case."""
        if not self._mode.traits.stateful:
            return
        held = {entry.stop: entry for piece in slot.ids if (entry := self.index.get(checkpoint_id(piece))) is not None}
        stay = {length // self._grid * self._grid for length in kept}
        stay |= {length for length, entry in held.items() if entry.pins or self.index.parts(entry.parent)}
        for length in placement.surplus(sorted(held), max(held, default=0), stay):
            self.room.discard(held[length].id)
        # Of the ends that the line once had, the last one stays: the client may go on from there after all.
        blocks = (
            (slot.parent_of(number), slot.tokens[number * self._grid :][: self._grid]) for number in range(len(slot.ids) + 1)
        )
        ends = [tail for parent, tokens in blocks for tail in self.index.covered(parent, tokens)]
        for tail in sorted(ends, key=lambda tail: tail.stop)[:-1]:
            self.room.discard(checkpoint_id(tail.id))
            self.room.discard(tail.id)

    def secure(self, slots: Sequence[Slot]) -> None:
        """Copies finished blocks out of a slot that has been at work for a while, one slot at a time."""
        now = self._clock()
        for slot in slots:
            if now >= slot.secured + max(SECURE, self._save_cost / SECURE_SHARE) and self._exposed(slot):
                self.save(slot, again=True)
                slot.secured = self._clock()
                self._save_cost = slot.secured - now
                return

    def _exposed(self, slot: Slot) -> bool:
        """Whether a crash would lose finished blocks of `slot`."""
        if not (self.disk.on and slot.dirty):
            return False
        last = (slot.canonical if self._mode.exact else len(slot)) // self._grid - 1
        canonical = (last + 1) * self._grid <= slot.canonical
        return last >= 0 and self.index.wants(slot.ids[last], self.memory.name, canonical=canonical)

    def _wanted(self, slot: Slot) -> list[tuple[Entry, bool]]:
        """The rows of a slot that are worth saving, and whether they are canonical."""
        if not self._mode.traits.movable:
            return []
        found: list[tuple[Entry, bool]] = []
        tokens, name, owner = slot.tokens, self.memory.name, owner_of(slot.root)
        whole = len(tokens) // self._grid
        for number, piece in enumerate(slot.ids):
            start = number * self._grid
            canonical = start + self._grid <= slot.canonical
            if (canonical or not self._mode.exact) and self.index.wants(piece, name, canonical=canonical):
                block, written = as_tokens(tokens[start : start + self._grid]), slot.written(start, start + self._grid)
                found.append((Entry(piece, slot.parent_of(number), block, start, owner=owner, written=written), canonical))
        rest = tokens[whole * self._grid :]
        canonical = self._mode.any_cut
        if len(rest) and (canonical or not self._mode.exact):
            tail = as_tokens(rest)
            parent = slot.parent_of(whole)
            written = slot.written(whole * self._grid)
            entry = Entry(block_id(parent, tail), parent, tail, whole * self._grid, owner=owner, written=written)
            if self._mode.traits.stateful:  # rows in a longer piece would not do for a checkpoint at this very end
                wanted = self.index.wants(entry.id, name, canonical=canonical)
            else:
                wanted = not self.index.covers(parent, tail)
            if wanted:
                found.append((entry, canonical))
        return [(entry, canonical) for entry, canonical in found if not self.spent(entry)]

    def spent(self, entry: Entry) -> bool:
        """Whether a piece has been kept for long enough."""
        return entry.written <= self.terms.due(entry.owner, self.wall())

    def erase(self, entry: Entry) -> None:
        """Forgets what memory has of a piece, and that it ever had it."""
        state = self.index.get(checkpoint_id(entry.id))
        self.room.drop(entry)
        self._retention.lay([entry.id] if state is None else [entry.id, state.id])
        self.counters["erased"] += 1

    def forget_hints(self) -> None:
        """Forgets what is remembered of pieces that are not here any more, and how conversations began."""
        self._retention.lay()
        self._openings.clear()
        self.disk.keep(())

    def _publish(self, entry: Entry, cell: Cell, now: float, *, canonical: bool, size: int | None = None) -> None:
        for shorter in () if entry.state else self.index.covered(entry.parent, entry.tokens):
            if not (shorter.pins or self._marked(shorter.id)):  # what has a checkpoint, `thin` decides on
                self.room.drop(shorter)
        if not self.index.add(entry, self.memory.name, canonical=canonical):
            self.memory.release(cell)
            return
        self.memory.commit(entry.id, cell, size)
        known = self.index.get(entry.id)
        assert known is not None
        known.gap, known.firm = entry.gap, entry.firm
        self._retention.use(known, now, anew=True)
        self.counters["saved"] += 1
        self.spill.offer(known)
        state = self.index.get(checkpoint_id(entry.id))
        if state is not None:  # it waited for its rows
            self.spill.offer(state)

    def _label(self, entry: Entry, canonical: bool) -> Label:
        tokens = tuple(entry.tokens.tolist())
        seconds = (self._gap(entry) if entry.state else len(tokens)) * self.seconds
        kind: Kind = "state" if entry.state else "rows"
        fingerprint, parent, start = self._engine.fingerprint, entry.parent, entry.start
        return Label(entry.id, parent, fingerprint, start, tokens, canonical, seconds, kind, entry.written, entry.owner)

    def flush(self, slots: Sequence[Slot]) -> None:
        """Offers the disk all that it lacks, rows of slots too: before the end."""
        if self.disk.on:
            for slot in slots:
                slot.busy = False
                self.save(slot)
            self.spill.flush()

    # ── restore ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def ahead(self, plan: Plan, seconds: float) -> bool:
        """Brings pieces of a plan to memory, for about so long; whether that was all, or all there is room for."""
        return self._restorer.ahead(plan, seconds)

    def restore(self, slot: Slot, chain: Chain, plan: Plan) -> Restored | None:
        """Brings what `plan` needs into `slot`, as far as there is room. None, and the slot is empty, if a piece is bad."""
        return self._restorer.restore(slot, chain, plan)

    def hit(self, chain: Chain, plan: Plan) -> None:
        """Counts a use of all that the request stands on, wherever it was found."""
        now = self._clock()
        pieces = [*chain.ids[: plan.start // self._grid], *([] if plan.state is None else [plan.state.id])]
        for piece in pieces:
            entry = self.index.get(piece)
            if entry is not None and self.memory.name in entry.copies and piece not in self.fetch.fetched:
                self._retention.use(entry, now)
        if plan.restore and len(plan.restore[-1].tokens) != self._grid:
            self._retention.use(plan.restore[-1], now)
        if self.disk.on:
            self.disk.keep(())
            self.disk.use(pieces)
            self.spill.revive(pieces)
        self.fetch.fetched.clear()

    def elsewhere(self, chain: Chain, salt: str) -> int:
        """Leading tokens that are on disk as computed by another model, engine or setting; for the same salt only."""
        most = 0
        for other, keys in self.disk.foreign().items():
            blocks, piece = 0, root_id(other, salt)
            while blocks < len(chain.ids) and (piece := block_id(piece, chain.block(blocks))) in keys:
                blocks += 1
            most = max(most, blocks)
        return most * self._grid

    def _stored(self, piece: BlockId) -> None:
        if (about := self._retention.about(piece)) is not UNKNOWN:
            self.disk.replied([piece], about)

    def seen(self, chain: Chain, plan: Plan) -> tuple[int, int]:
        """Leading tokens of a prompt that were ever used here, and how many prompts went on behind them; -1 if none were."""
        blocks, siblings = self._retention.seen(chain.ids)
        return (blocks * self._grid, siblings) if blocks * self._grid >= plan.start else (plan.start, 0)  # not saved yet

    def replied(self, slot: Slot, about: About) -> None:
        """Tells of the request that has used all that `slot` stands on, now that its reply is over."""
        slot.about = about
        pieces = [*slot.ids, *(map(checkpoint_id, slot.ids) if self._mode.traits.stateful else ())]
        for tier in (self._retention, self.disk):
            tier.replied(pieces, about)

    def spelled(self, chain: Chain, spelled: Spelled) -> None:
        """Keeps how the reply to a prompt was spelled: without that, the rows of what follows could not be found again."""
        if chain.ids:
            self.disk.note(Note(spelled.key, chain.ids[-1], spelled.pack()))

    def opened(self, chain: Chain, opening: Opening) -> None:
        """Keeps how a conversation begins beside its first block, for `otherwise`."""
        if self.disk.on and chain.ids and self._openings.learn(opening):
            self.disk.note(Note(opening.key, chain.ids[0], opening.pack()))

    def otherwise(self, opening: Opening | None) -> int:
        """Tokens of an earlier prompt that began with the same messages, rendered by another template; 0 if none did."""
        return self._openings.otherwise(opening) if opening is not None else 0

    def check(self) -> None:
        """Raises AssertionError if index, retention and memory disagree."""
        self.index.check()
        self.memory.check()
        held = [entry for entry in self.index if self.memory.name in entry.copies]
        assert len(held) == len(self.memory) == len(self._retention)
        assert all(entry.id in self.memory for entry in held)
        assert all(entry.pins == (entry.id in self.spill.writing) for entry in self.index)
