"""Cache: everything that is stored outside the slots, as the scheduler uses it.

`kv_store` knows the entries. `kv_save` and `state_checkpoints` copy them out of the slots, and `kv_restore` loads them back. KV
goes from a slot to memory. Full blocks then go to disk on another thread.

Used from the engine thread only. A fault in the cache counts as a miss, with a reason. It never fails a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headstart.explain.fingerprint import ConversationFingerprint
from headstart.interfaces.engine import Engine
from headstart.interfaces.tier import STATE
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain, block_id, checkpoint_id, root_id
from headstart.prefix_cache.entry import Entry
from headstart.prefix_cache.planner import Mode, Plan
from headstart.prefix_cache.quota import owner_of
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.prompt.reply_tokens import ReplyTokensRecord
from headstart.serving.kv_restore import KvRestore
from headstart.serving.kv_save import KvSave
from headstart.serving.kv_store import KvStore
from headstart.serving.prefetch import Prefetch
from headstart.serving.state_checkpoints import StateCheckpoints
from headstart.tiers.disk import Label, Note


class Cache:
    """The stored entries, and the ways out of the slots and back.

    Attributes:
        store: the entries, and where each one is.
        kv_save: copies KV from slots to memory.
        checkpoints: copies state from slots to memory.
        prefetch: reads entries from disk to memory.
        kv_restore: loads entries into slots.
        index, memory, disk, shared: those of the store.
    """

    def __init__(self, engine: Engine, mode: Mode, store: KvStore) -> None:
        self.store = store
        self.index, self.memory, self.disk, self.shared = store.index, store.memory, store.disk, store.shared
        self.checkpoints = StateCheckpoints(engine, mode, store)
        self.kv_save = KvSave(engine, mode, store, self.checkpoints)
        memory_budget, size = store.memory_budget, engine.shape.kv_bytes_per_token
        self.prefetch = Prefetch(self.disk, memory_budget, store.label, size, lambda: store.clock())
        self.kv_restore = KvRestore(engine, mode, memory_budget, self.prefetch, self.disk.name, store.usable)
        self._stateful = mode.traits.stateful
        self._replies_leave = mode.any_cut  # otherwise the KV of replies stays here, and nobody else needs their tokens
        self._block_size = engine.traits.block_size

    def hit(self, chain: Chain, plan: Plan) -> None:
        """Counts a use of every entry that the request reuses, in all tiers."""
        now = self.store.clock()
        keys = [*chain.ids[: plan.start // self._block_size], *([] if plan.state is None else [plan.state.id])]
        for key in keys:
            entry = self.index.get(key)
            if entry is not None and self.memory.name in entry.copies and key not in self.prefetch.fetched:
                self.store.retention.use(entry, now)
        if plan.restore and len(plan.restore[-1].tokens) != self._block_size:
            self.store.retention.use(plan.restore[-1], now)
        if self.disk.on:
            self.disk.keep(())
            self.disk.use(keys)
            self.store.offload.revive(keys)
        self.store.shared_offer.reused(keys)
        self.prefetch.fetched.clear()

    def elsewhere(self, chain: Chain, salt: str) -> int:
        """Leading tokens that are on disk from another model, engine or setting, with the same salt."""
        most = 0
        for other, keys in self.disk.foreign().items():
            blocks, key = 0, root_id(other, salt)
            while blocks < len(chain.ids) and (key := block_id(key, chain.block(blocks))) in keys:
                blocks += 1
            most = max(most, blocks)
        return most * self._block_size

    def seen(self, chain: Chain, plan: Plan) -> tuple[int, int]:
        """How many leading tokens of a prompt were used before, and how many prompts continued after them (-1 for none)."""
        blocks, siblings = self.store.retention.seen(chain.ids)
        seen = blocks * self._block_size
        return (seen, siblings) if seen >= plan.start else (plan.start, 0)  # what is live may not be saved yet

    def replied(self, ids: Sequence[BlockId], request_traits: RequestTraits) -> None:
        """Reports a finished request to the tiers, with the blocks that it used."""
        entries = [*ids, *(map(checkpoint_id, ids) if self._stateful else ())]
        for tier in (self.store.retention, self.disk):
            tier.replied(entries, request_traits)

    def keep_reply_tokens(self, chain: Chain, record: ReplyTokensRecord) -> None:
        """Stores the tokens of the reply to a prompt. Without them, the KV of later turns could not be found again."""
        if chain.ids:
            note = Note(record.key, chain.ids[-1], record.pack())
            self.disk.note(note)
            if self._replies_leave:
                self.shared.note(owner_of(chain.root), note)

    def shared_labels(self, entry: Entry) -> Sequence[Label]:
        """What the shared store may have of a block: it, and the checkpoint at its end, which this server may have evicted."""
        label = self.store.label(entry, True)
        if entry.state or not self._stateful:
            return (label,)
        return (label, replace(label, key=checkpoint_id(entry.id), parent=entry.id, kind=STATE))

    def opened(self, chain: Chain, conversation_fingerprint: ConversationFingerprint) -> None:
        """Stores the fingerprint of a conversation with its first block, for `otherwise`."""
        if self.disk.on and chain.ids and self.store.conversation_fingerprints.learn(conversation_fingerprint):
            self.disk.note(Note(conversation_fingerprint.key, chain.ids[0], conversation_fingerprint.pack()))

    def otherwise(self, conversation_fingerprint: ConversationFingerprint | None) -> int:
        """Tokens of an earlier prompt that began with the same messages, rendered by another template; 0 if none did."""
        if conversation_fingerprint is None:
            return 0
        return self.store.conversation_fingerprints.otherwise(conversation_fingerprint)

    def give_way(self, ids: Sequence[BlockId], shared_prefix: Chain, forgotten: Sequence[bytes]) -> None:
        """`shared_prefix` has taken the place of `ids`: their derived KV and reply tokens leave the disk."""
        stays, unneeded = set(shared_prefix.ids), set[BlockId]()
        for key in reversed(ids):
            entry = self.index.get(key)
            after = (child for child in self.index.children(key) if child.length == self._block_size)
            if key in stays or (entry is not None and entry.canonical) or any(child.id not in unneeded for child in after):
                break
            unneeded.add(key)
        self.store.offload.drop_derived([entry for key in unneeded for entry in (checkpoint_id(key), key)])
        if shared_prefix.ids:
            for key in forgotten:
                note = Note(key, shared_prefix.ids[-1], b"")
                self.disk.note(note)
                if self._replies_leave:
                    self.shared.note(owner_of(shared_prefix.root), note)
