"""Turn: a finished choice, as the engine thread gives it to the caller.

The caller has already parsed the reply while it was generated. It passes the message that its client will send back to
`Runtime.remember`. This work runs on the caller's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.explain.record import Record
from headstart.interfaces.conversation import Message
from headstart.interfaces.tokens import BlockId
from headstart.prefix_cache.blocks import Chain
from headstart.prefix_cache.reuse_model import RequestTraits
from headstart.prompt.builder import Prompt
from headstart.prompt.continuation import Continuation
from headstart.prompt.reply_tokens import ReplyTokensRecord


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A finished choice.

    Attributes:
        chain: the blocks of the prompt.
        ids: ids of the blocks of prompt and reply, as they were computed.
        reply: the reply's text.
        tokens: the tokens whose bytes are all in that text.
        written: when its text was first stored, in seconds since 1970.
        deletion_count: `Expiry.deletion_count` when it finished.
        new, siblings, completion: figures of the request, for `RequestTraits`.
        record: the record of the request for explanations.
        settles: whether it can be settled.
    """

    prompt: Prompt
    chain: Chain
    ids: tuple[BlockId, ...]
    reply: str
    tokens: tuple[int, ...]
    written: float
    deletion_count: int
    new: int
    siblings: int
    completion: int
    record: Record
    settles: bool

    def request_traits(self, called: bool | None = None) -> RequestTraits:
        """The traits of the request. `called`: whether the reply calls a tool; None if unknown."""
        return RequestTraits.of(len(self.ids), new=self.new, siblings=self.siblings, reply=self.completion, called=called)


@dataclass(frozen=True, slots=True, eq=False)
class ReturnedTurn:
    """A turn with the message that the client will send back.

    Attributes:
        message: that message.
        continuation: the conversation with it; None if the prompt was no conversation, or the template refuses the message.
        learned: the reply tokens.
    """

    turn: Turn
    message: Message
    continuation: Continuation | None
    learned: tuple[ReplyTokensRecord, ...]
