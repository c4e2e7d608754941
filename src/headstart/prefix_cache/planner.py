"""Planner: prompt + index + slots → `Plan`. Pure.

A plan says which slot serves a request, which rows it starts from, and what it computes. It is the cheapest by measured
cost, and never plans beyond what is restorable; at least one token is always computed, so logits are never stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headstart.interfaces.engine import Traits
from headstart.interfaces.tokens import BlockId, Tokens, common_prefix
from headstart.prefix_cache.blocks import Chain, last_block_boundary
from headstart.prefix_cache.index import Entry, Index, Match


@dataclass(frozen=True, slots=True)
class SlotView:
    """What the planner sees of a live sequence.

    Attributes:
        root: root id of its content.
        tokens: what it holds.
        canonical: how many leading tokens have canonical rows.
        free: whether no request is using it.
        last_used: seconds on any clock; 0 for a slot that was never used.
    """

    number: int
    root: BlockId
    tokens: Tokens
    canonical: int
    free: bool
    last_used: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds a token: prefilled, or restored from memory."""

    prefill: float = 1e-3
    restore: float = 1e-6


@dataclass(frozen=True, slots=True)
class Mode:
    """Which rows may be used. `exact`: canonical ones only."""

    exact: bool
    traits: Traits

    @property
    def any_cut(self) -> bool:
        """Whether computing on from any token, not only from a block boundary, keeps rows canonical."""
        return self.traits.decode_is_prefill


@dataclass(frozen=True, slots=True)
class Plan:
    """How to serve one prompt.

        0 ───── keep or restore ───── start ───── compute ───── length

    Attributes:
        slot: number of the slot.
        keep: tokens that stay live in the slot; 0 if rows are restored into it.
        restore: pieces to import, end to end from position 0; the last may be used in part (`take`).
        take: how many tokens of the last piece are used.
        state: the checkpoint to bring in at `start`: with the rows, or into the slot whose rows stay.
        start: tokens that need not be computed.
        canonical: how many of them have canonical rows.
        length: tokens of the prompt.
    """

    slot: int
    keep: int
    restore: tuple[Entry, ...]
    take: int
    start: int
    canonical: int
    length: int
    state: Entry | None = None

    @property
    def needs(self) -> tuple[Entry, ...]:
        """All pieces that it wants to bring in."""
        return self.restore if self.state is None else (*self.restore, self.state)

    @property
    def computed(self) -> int:
        return self.length - self.start

    @property
    def restored(self) -> int:
        return 0 if self.keep else self.start

    def __str__(self) -> str:
        source = f"keep {self.keep} live" if self.keep else f"restore {self.start} in {len(self.restore)} pieces"
        source += " and a checkpoint" if self.state is not None else ""
        return f"slot {self.slot}: {source}, compute {self.computed} of {self.length}"


def _goes_on(held: int, shared: int) -> bool:
    """Whether a prompt that shares the first `shared` of `held` tokens goes on at their end, give or take what a stop text
    or a cut-off character left behind, rather than leaving them in their middle."""
    return held - shared <= min(8, shared // 4)


def _completes(chain: Chain, boundary: int) -> bool:
    """Whether a block that begins at `boundary` would become canonical by computing the prompt from there."""
    return last_block_boundary(len(chain), chain.block_size) > boundary


@dataclass(frozen=True, slots=True)
class Kept:
    """How many leading tokens of a slot can stay, and the checkpoint that takes it back there if it has gone on."""

    tokens: int = 0
    state: Entry | None = None


def keepable(slot: SlotView, chain: Chain, index: Index, mode: Mode) -> Kept:
    """How much of `slot` can stay for the prompt `chain`.

    A prompt that goes on at the slot's end goes on at the very token. One that leaves the slot before returns to the last
    checkpoint; or, where KV can be truncated, to the last canonical block boundary, if less than a block is lost by that and a
    block of its own becomes canonical.
    """
    if slot.root != chain.root:
        return Kept()
    shared = min(common_prefix(slot.tokens, chain.tokens), len(chain) - 1)
    usable = min(shared, slot.canonical) if mode.exact and not mode.any_cut else shared
    if not mode.traits.sliceable:
        return Kept(usable) if usable == len(slot.tokens) else _rewound(usable, chain, index, mode)
    if mode.any_cut:
        return Kept(shared)
    block_size = mode.traits.block_size
    canonical = min(shared, slot.canonical) // block_size * block_size
    if mode.exact:
        return Kept(canonical)
    back = shared - canonical < block_size and not _goes_on(len(slot.tokens), shared) and _completes(chain, canonical)
    return Kept(canonical if back else shared)


def _rewound(usable: int, chain: Chain, index: Index, mode: Mode) -> Kept:
    """The last checkpoint within the first `usable` tokens."""
    block_size = mode.traits.block_size
    for count in range(usable // block_size if mode.traits.stateful else 0, 0, -1):
        state = index.checkpoint(chain.ids[count - 1], canonical_only=mode.exact and not mode.any_cut)
        if state is not None:
            return Kept(count * block_size, state)
    return Kept()


def restorable(index: Index, chain: Chain, mode: Mode) -> Match:
    """The longest prefix of `chain` that can be imported: whole blocks, and in fast mode a part of one more piece.

    A model with state needs a checkpoint at its end, and takes the last piece wholly or not at all. Else, behind canonical
    blocks, a part is used only where a prompt would go on at that very token in a slot too: see `keepable`.
    """
    limit = len(chain) - 1
    if not mode.traits.sliceable:
        return index.resume(chain, limit, canonical_only=mode.exact) if mode.traits.stateful else Match(())
    found = index.match(chain, limit, canonical_only=mode.exact, partial=not mode.exact or mode.any_cut)
    tail = found.tail
    if tail is None or mode.any_cut or found.canonical < tail.start or not _completes(chain, tail.start):
        return found
    going_on = not tail.canonical and _goes_on(tail.stop, tail.start + found.take)
    return found if going_on else Match(found.blocks)


def known(chain: Chain, index: Index, slots: Sequence[SlotView]) -> int:
    """How many leading tokens other prompts have brought, whether or not one could go on from there."""
    found = index.match(chain, len(chain) - 1, canonical_only=False, partial=False).tokens
    return max([found, *(common_prefix(slot.tokens, chain.tokens) for slot in slots if slot.root == chain.root)])


def plan(chain: Chain, index: Index, slots: Sequence[SlotView], costs: Costs, mode: Mode, *, reuse: bool = True) -> Plan | None:
    """The cheapest way to serve `chain` with one of the free slots; None if none is free.

    Staying in a slot that goes on with another text costs what its owner must restore later. A slot to overwrite is the
    one unused for longest. Without `reuse` everything is computed.
    """
    free = [slot for slot in slots if slot.free]
    if not free:
        return None
    length = len(chain)
    oldest = min(free, key=lambda slot: (slot.last_used, slot.number))
    found = restorable(index, chain, mode) if reuse else Match(())
    if found.tokens:
        pieces = found.pieces
        take = found.take if found.tail is not None else len(pieces[-1].tokens)
        canonical = found.canonical
        if mode.any_cut and found.tail is not None and found.tail.canonical and canonical == found.tail.start:
            canonical = found.tokens
        best = Plan(oldest.number, 0, pieces, take, found.tokens, canonical, length, found.state)
    else:
        best = Plan(oldest.number, 0, (), 0, 0, 0, length)
    cost = best.restored * costs.restore + best.computed * costs.prefill
    for slot in free if reuse else ():
        keep = keepable(slot, chain, index, mode)
        worth = slot.canonical if mode.exact and not mode.any_cut else len(slot.tokens)  # what its owner could use
        lost = worth if keep.tokens < worth else 0  # rows are imported whole, never appended
        seconds = (length - keep.tokens) * costs.prefill + lost * costs.restore
        if keep.tokens and seconds <= cost:
            cost, best = seconds, _staying(slot, keep, length)
    if reuse and not best.keep:
        # It overwrites the oldest slot; what that has in common with the prompt need not be copied over itself.
        stay = _staying(oldest, keepable(oldest, chain, index, mode), length)
        if stay.keep and stay.start >= best.start and stay.canonical >= best.canonical:
            best = stay
    return best


def _staying(slot: SlotView, keep: Kept, length: int) -> Plan:
    canonical = min(keep.tokens, slot.canonical)
    if keep.state is not None and not keep.state.canonical:
        canonical = min(canonical, keep.state.start)
    return Plan(slot.number, keep.tokens, (), 0, keep.tokens, canonical, length, keep.state)


def next_call(position: int, length: int, canonical: int, limit: int, traits: Traits, stops: Iterable[int] = ()) -> int:
    """How many tokens the next prefill call takes, of those from `position` to `length`.

    On canonical ground: whole blocks up to the last block boundary, then the open tail in a call of its own, so that a warm run
    computes the same pieces as a cold one. On derived ground the pieces do not matter. `limit` (tokens) is what the stall
    target allows; a call is never smaller than one block, but it ends at each of `stops`, which are block boundaries.
    """
    block_size = traits.block_size
    limit = max(block_size, limit // block_size * block_size)
    limit = min([limit, *(stop - position for stop in stops if stop > position)])
    end = last_block_boundary(length, block_size)
    if position >= end:
        return length - position
    if position != canonical or position % block_size:
        return min(limit, length - position)
    if not traits.chunking:
        return block_size
    return min(limit, end - position)
