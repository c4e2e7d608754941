"""Cache: all that is outside of the slots, as the scheduler uses it.

`kv_store` knows what there is, `kv_save` and `state_checkpoints` bring it out of the slots, `kv_restore` brings it back. KV
goes from a slot to memory, and whole blocks from there on to disk, behind the engine's back.

Used from the engine thread only. A fault in here is a miss with a reason, never a failed request.
"""

from __future__ import annotations

from collections.abc import Sequence

from headstart.explain.fingerprint import ConversationFingerprint
from headstart.interfaces.engine import Engine
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain, block_id, checkpoint_id, root_id
from headstart.prefix_cache.planner import Mode, Plan
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.prompt.reply_tokens import ReplyTokensRecord
from headstart.serving.kv_restore import KvRestore
from headstart.serving.kv_save import KvSave
from headstart.serving.kv_store import KvStore
from headstart.serving.prefetch import Prefetch
from headstart.serving.slots import Slot
from headstart.serving.state_checkpoints import StateCheckpoints
from headstart.tiers.disk import Note


class Cache:
    """What is outside of the slots.

    Attributes:
        store: what there is, and where.
        saves: from slots to memory; `checkpoints`: the same of states.
        restorer: from memory and disk to slots.
        index, memory, disk: the store's.
    """

    def __init__(self, engine: Engine, mode: Mode, store: KvStore) -> None:
        self.store = store
        self.index, self.memory, self.disk = store.index, store.memory, store.disk
        self.checkpoints = StateCheckpoints(engine, mode, store)
        self.saves = KvSave(engine, mode, store, self.checkpoints)
        budget, size = store.memory_budget, engine.shape.kv_bytes_per_token
        self.fetch = Prefetch(self.disk, budget, store.label, size, lambda: store.clock())
        self.restorer = KvRestore(engine, mode, budget, self.fetch, self.disk.name)
        self._stateful = mode.traits.stateful
        self._block_size = engine.traits.block_size

    def hit(self, chain: Chain, plan: Plan) -> None:
        """Counts a use of all that the request stands on, wherever it was found."""
        now = self.store.clock()
        pieces = [*chain.ids[: plan.start // self._block_size], *([] if plan.state is None else [plan.state.id])]
        for piece in pieces:
            entry = self.index.get(piece)
            if entry is not None and self.memory.name in entry.copies and piece not in self.fetch.fetched:
                self.store.retention.use(entry, now)
        if plan.restore and len(plan.restore[-1].tokens) != self._block_size:
            self.store.retention.use(plan.restore[-1], now)
        if self.disk.on:
            self.disk.keep(())
            self.disk.use(pieces)
            self.store.offload.revive(pieces)
        self.fetch.fetched.clear()

    def elsewhere(self, chain: Chain, salt: str) -> int:
        """Leading tokens that are on disk as computed by another model, engine or setting; for the same salt only."""
        most = 0
        for other, keys in self.disk.foreign().items():
            blocks, piece = 0, root_id(other, salt)
            while blocks < len(chain.ids) and (piece := block_id(piece, chain.block(blocks))) in keys:
                blocks += 1
            most = max(most, blocks)
        return most * self._block_size

    def seen(self, chain: Chain, plan: Plan) -> tuple[int, int]:
        """Leading tokens of a prompt that were ever used here, and how many prompts went on behind them; -1 if none were."""
        blocks, siblings = self.store.retention.seen(chain.ids)
        return (
            (blocks * self._block_size, siblings) if blocks * self._block_size >= plan.start else (plan.start, 0)
        )  # not saved yet

    def replied(self, slot: Slot, request_traits: RequestTraits) -> None:
        """Tells of the request that has used all that `slot` stands on, now that its reply is over."""
        slot.request_traits = request_traits
        pieces = [*slot.ids, *(map(checkpoint_id, slot.ids) if self._stateful else ())]
        for tier in (self.store.retention, self.disk):
            tier.replied(pieces, request_traits)

    def keep_reply_tokens(self, chain: Chain, record: ReplyTokensRecord) -> None:
        """Keeps how the reply to a prompt was spelled: without that, the rows of what follows could not be found again."""
        if chain.ids:
            self.disk.note(Note(record.key, chain.ids[-1], record.pack()))

    def opened(self, chain: Chain, conversation_fingerprint: ConversationFingerprint) -> None:
        """Keeps how a conversation begins beside its first block, for `otherwise`."""
        if self.disk.on and chain.ids and self.store.conversation_fingerprints.learn(conversation_fingerprint):
            self.disk.note(Note(conversation_fingerprint.key, chain.ids[0], conversation_fingerprint.pack()))

    def otherwise(self, conversation_fingerprint: ConversationFingerprint | None) -> int:
        """Tokens of an earlier prompt that began with the same messages, rendered by another template; 0 if none did."""
        return (
            self.store.conversation_fingerprints.otherwise(conversation_fingerprint)
            if conversation_fingerprint is not None
            else 0
        )

    def give_way(self, ids: Sequence[BlockId], shared_prefix: Chain, forgotten: Sequence[bytes]) -> None:
        """`shared_prefix` has taken the place of `ids`: their derived KV and reply tokens leave the disk."""
        stays, dead = set(shared_prefix.ids), set[BlockId]()
        for piece in reversed(ids):
            after = [entry.id for entry in self.index.children(piece) if len(entry.tokens) == self._block_size]
            entry = self.index.get(piece)
            if piece in stays or (entry is not None and entry.canonical) or not dead.issuperset(after):
                break
            dead.add(piece)
        self.store.offload.bury([key for piece in dead for key in (checkpoint_id(piece), piece)])
        if shared_prefix.ids:
            for key in forgotten:
                self.disk.note(Note(key, shared_prefix.ids[-1], b""))
