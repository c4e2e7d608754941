"""Planner: which slot serves a prompt, what is reused, and what is computed.

`plan` is a pure function of the prompt, the index and the slots. It compares two ways to begin, by measured cost:

* *keep*: continue in a slot whose live tokens share a prefix with the prompt;
* *restore*: copy stored entries into the slot that was unused for the longest time.

It never plans more than can be restored. At least one token is always computed, because the reply needs its logits.

Example: the prompt has 1,000 tokens. Slot 0 shares 900 tokens with it; memory has 960. Keeping computes 100 tokens. Restoring
computes 40, but copies 960. The planner takes the lower sum of seconds.

In models with state (recurrent layers, sliding windows) a slot can only continue at its very end, or go back to a checkpoint,
and a restored prefix must end at a checkpoint. In exact mode only canonical KV counts.

`next_call` divides the computation into prefill calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from headstart.interfaces.tokens import BlockId, Tokens, common_prefix
from headstart.interfaces.traits import Traits
from headstart.prefix_cache.blocks import Chain, last_block_boundary
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.index import Index, Match

RETURN = 20
"""Where turns are settled, a prompt goes back to a block boundary if what follows the difference is this many times longer."""


@dataclass(frozen=True, slots=True)
class SlotView:
    """A live sequence, as the planner sees it.

    Attributes:
        root: root id of its content.
        tokens: its tokens.
        canonical: leading tokens whose KV is canonical.
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
    """Measured seconds per token, for prefill and for restoring from memory."""

    prefill: float = 1e-3
    restore: float = 1e-6


@dataclass(frozen=True, slots=True)
class Mode:
    """Which KV may be used.

    Attributes:
        exact: only canonical KV.
        settles: whether the turn will be settled, so that derived KV becomes canonical later.
    """

    exact: bool
    traits: Traits
    settles: bool = False

    @property
    def any_cut(self) -> bool:
        """Whether prefill may start at any token, not only at a block boundary, and still give canonical KV."""
        return self.traits.decode_is_prefill


@dataclass(frozen=True, slots=True)
class Plan:
    """How to serve one prompt.

        0 ───── keep or restore ───── start ───── compute ───── length

    Attributes:
        slot: number of the slot.
        keep: tokens that stay live in the slot; 0 if entries are restored into it.
        restore: entries to import, one after the other from position 0. The last one may be used in part (`take`).
        take: how many tokens of the last entry are used.
        state: the checkpoint to import at `start`: together with KV, or into a slot whose KV stays.
        passed_over: tokens to compute that entries have: to restore them would take longer, by the measured costs.
        start: tokens that need not be computed.
        canonical: how many of them have canonical KV.
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
    passed_over: int = 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries that have to be imported."""
        return self.restore if self.state is None else (*self.restore, self.state)

    @property
    def computed(self) -> int:
        """Tokens to compute."""
        return self.length - self.start

    @property
    def restored(self) -> int:
        """Tokens to import."""
        return 0 if self.keep else self.start

    def __str__(self) -> str:
        source = f"keep {self.keep} live" if self.keep else f"restore {self.start} in {len(self.restore)} entries"
        source += " and a checkpoint" if self.state is not None else ""
        return f"slot {self.slot}: {source}, compute {self.computed} of {self.length}"


def _continues(held: int, shared: int) -> bool:
    """Whether a prompt that shares `shared` of `held` tokens continues at their end, rather than leaving them in the middle.

    A few tokens may be missing: a stop text or an incomplete character can leave tokens that the client does not send back.
    """
    return held - shared <= min(8, shared // 4)


def _returns(chain: Chain, boundary: int, shared: int, mode: Mode) -> bool:
    """Whether a prompt that could go on after `shared` tokens goes back to a canonical `boundary` less than a block before.

    What it computes from there is canonical, if it completes a block at all. Where turns are settled it becomes canonical later
    anyway, and the first token does not wait for that. But a long rest would be computed twice, and a new text, which shares
    less than a block, would be computed twice as a whole.
    """
    completes = last_block_boundary(len(chain), chain.block_size) > boundary
    return completes and not (mode.settles and boundary and RETURN * (shared - boundary) > len(chain) - shared)


@dataclass(frozen=True, slots=True)
class Kept:
    """How many leading tokens of a slot can stay, and the checkpoint to go back there if the slot holds more."""

    tokens: int = 0
    state: Entry | None = None


def keepable(slot: SlotView, chain: Chain, index: Index, mode: Mode) -> Kept:
    """How much of `slot` can stay for the prompt `chain`.

    If the prompt continues at the slot's end, it continues at that very token. If it leaves the slot earlier, the slot goes
    back: to the last checkpoint in a model with state; otherwise to the last shared token, or to the canonical block boundary
    less than a block before it (`_returns`).
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
    near = shared - canonical < block_size and not _continues(len(slot.tokens), shared)
    return Kept(canonical if near and _returns(chain, canonical, shared, mode) else shared)


def _rewound(usable: int, chain: Chain, index: Index, mode: Mode) -> Kept:
    """The last checkpoint at a block boundary within the first `usable` tokens."""
    block_size = mode.traits.block_size
    for count in range(usable // block_size if mode.traits.stateful else 0, 0, -1):
        state = index.checkpoint(chain.ids[count - 1], canonical_only=mode.exact and not mode.any_cut)
        if state is not None:
            return Kept(count * block_size, state)
    return Kept()


def restorable(index: Index, chain: Chain, mode: Mode) -> Match:
    """The longest prefix of `chain` that can be imported: full blocks, and in fast mode a part of one more entry.

    A model with state needs a checkpoint at the end, and uses the last entry completely or not at all. Otherwise, a part after
    canonical blocks is used only if a prompt in a slot would continue at that token too: see `keepable`.
    """
    limit = len(chain) - 1
    if not mode.traits.sliceable:
        return index.resume(chain, limit, canonical_only=mode.exact) if mode.traits.stateful else Match(())
    found = index.match(chain, limit, canonical_only=mode.exact, partial=not mode.exact or mode.any_cut)
    tail = found.tail
    if tail is None or mode.any_cut or found.canonical < tail.start:
        return found
    continuing = not tail.canonical and _continues(tail.stop, tail.start + found.take)
    return found if continuing or not _returns(chain, tail.start, found.tokens, mode) else Match(found.blocks)


def known(chain: Chain, index: Index, slots: Sequence[SlotView]) -> int:
    """How many leading tokens were part of an earlier prompt, whether or not a prompt could continue there."""
    found = index.match(chain, len(chain) - 1, canonical_only=False, partial=False).tokens
    return max([found, *(common_prefix(slot.tokens, chain.tokens) for slot in slots if slot.root == chain.root)])


def plan(chain: Chain, index: Index, slots: Sequence[SlotView], costs: Costs, mode: Mode, *, reuse: bool = True) -> Plan | None:
    """The cheapest way to serve `chain` with one of the free slots; None if no slot is free.

    If a slot is kept although its own conversation is longer, the later restore of that conversation is added to the cost. The
    slot to overwrite is the one that was unused for the longest time. Without `reuse` everything is computed.
    """
    free = [slot for slot in slots if slot.free]
    if not free:
        return None
    length = len(chain)
    oldest = min(free, key=lambda slot: (slot.last_used, slot.number))
    found = restorable(index, chain, mode) if reuse else Match(())
    if there := found.tokens:
        entries = found.entries
        take = found.take if found.tail is not None else entries[-1].length
        canonical = found.canonical
        if mode.any_cut and found.tail is not None and found.tail.canonical and canonical == found.tail.start:
            canonical = there
        best = Plan(oldest.number, 0, entries, take, there, canonical, length, found.state)
    else:
        best = Plan(oldest.number, 0, (), 0, 0, 0, length)
    cost = best.restored * costs.restore + best.computed * costs.prefill
    for slot in free if reuse else ():
        keep = keepable(slot, chain, index, mode)
        worth = slot.canonical if mode.exact and not mode.any_cut else len(slot.tokens)  # what its own conversation could use
        lost = worth if keep.tokens < worth else 0  # KV is always imported from position 0
        seconds = (length - keep.tokens) * costs.prefill + lost * costs.restore
        if keep.tokens and seconds <= cost:
            cost, best = seconds, _keeping(slot, keep, length)
    if reuse and not best.keep:
        # The oldest slot is overwritten. If it holds the same prefix already, nothing has to be copied.
        stay = _keeping(oldest, keepable(oldest, chain, index, mode), length)
        if stay.keep and stay.start >= best.start and stay.canonical >= best.canonical:
            best = stay
    passed_over = there - best.start
    return replace(best, passed_over=passed_over) if passed_over > 0 else best


def _keeping(slot: SlotView, keep: Kept, length: int) -> Plan:
    canonical = min(keep.tokens, slot.canonical)
    if keep.state is not None and not keep.state.canonical:
        canonical = min(canonical, keep.state.start)
    return Plan(slot.number, keep.tokens, (), 0, keep.tokens, canonical, length, keep.state)


def next_call(
    position: int,
    length: int,
    canonical: int,
    limit: int,
    traits: Traits,
    stops: Iterable[int] = (),
    fills: Callable[[int, int], bool] = lambda start, count: False,
) -> int:
    """How many tokens the next prefill call computes, of those from `position` to `length`.

    After canonical KV: full blocks up to the last block boundary, then the remaining tokens in a separate call, or in the same
    one where that gives the same bits. So a warm run computes what a cold one does. After derived KV the size of calls does not
    matter.

    Args:
        limit: tokens that the stall target allows; a call has at least one block all the same.
        stops: block boundaries at which a call must end, because a checkpoint is taken there.
        fills: `Engine.fills_block`.
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
    if end + block_size <= position + limit and fills(end, length - end):
        return length - position
    return min(limit, end - position)


def canonical_part(position: int, size: int, length: int, canonical: int, traits: Traits) -> int:
    """How many of the first tokens of a call of `next_call` are canonical then: those of its full blocks after canonical KV."""
    if position != canonical or position % traits.block_size:
        return 0
    end = min(position + size, last_block_boundary(length, traits.block_size))
    return max(0, end - position) // traits.block_size * traits.block_size
