"""Siblings: the blocks and open tails that follow one parent, found by their tokens in logarithmic time.

They are kept in the order of their tokens' bytes. In such an order the entry that shares the most with a text is a neighbour of
the text's place, before it or after it. Canonical and derived entries are kept apart, so that a search for canonical ones never
passes over thousands of derived ones.

Example: a text "a b d" among the siblings "a", "a b c", "a b e" and "f" has its place between "a b c" and "a b e". Both share
two tokens with it, and no other shares more. Of its prefixes, "a" is found by looking again with what "a b c" shares: "a b".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeAlias, TypeVar

from sortedcontainers import SortedKeyList

WIDTH = 4
"""Bytes of a token."""


class Sibling(Protocol):
    """What is kept in order."""

    @property
    def packed(self) -> bytes:
        """Its tokens, `WIDTH` bytes each."""

    @property
    def canonical(self) -> bool:
        """Whether some copy is canonical."""


Node = TypeVar("Node", bound=Sibling)
SiblingGroup: TypeAlias = "Node | SortedKeyList[Node, bytes] | None"
"""Siblings of one kind. One alone needs no list, which would take 700 bytes."""


class Siblings(Generic[Node]):
    """The siblings after one parent. Each stays in its group: take it out before it becomes canonical, and put it in again."""

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: Node | tuple[SiblingGroup[Node], SiblingGroup[Node]] | None = None
        """One alone, or both groups."""

    @property
    def _both(self) -> tuple[SiblingGroup[Node], SiblingGroup[Node]]:
        """The canonical ones, and the derived ones."""
        nodes = self._nodes
        if nodes is None or isinstance(nodes, tuple):
            return nodes or (None, None)
        return (nodes, None) if nodes.canonical else (None, nodes)

    def _keep(self, canonical: SiblingGroup[Node], derived: SiblingGroup[Node]) -> None:
        one = derived if canonical is None else canonical
        if isinstance(one, SortedKeyList) or not (canonical is None or derived is None):
            self._nodes = canonical, derived
        else:
            self._nodes = one

    def __iter__(self) -> Iterator[Node]:
        for group in self._both:
            if isinstance(group, SortedKeyList):
                yield from group
            elif group is not None:
                yield group

    def some(self) -> Node | None:
        """Any one of them."""
        canonical, derived = self._both
        group = derived if canonical is None else canonical
        return group[0] if isinstance(group, SortedKeyList) else group

    @property
    def followed(self) -> bool:
        """Whether there is one. May be asked on any thread."""
        return self._nodes is not None

    @property
    def branches(self) -> bool:
        """Whether at least two of them are canonical."""
        return isinstance(self._both[0], SortedKeyList)

    # ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, node: Node) -> None:
        if self._nodes is None:
            self._nodes = node
            return
        canonical, derived = self._both
        group = canonical if node.canonical else derived
        if isinstance(group, SortedKeyList):
            group.add(node)
            return
        more = node if group is None else SortedKeyList([group, node], _packed)
        if node.canonical:
            self._keep(more, derived)
        else:
            self._keep(canonical, more)

    def take(self, node: Node) -> None:
        if self._nodes is node:
            self._nodes = None
            return
        canonical, derived = self._both
        group = canonical if node.canonical else derived
        if isinstance(group, SortedKeyList):
            group.remove(node)
            if len(group) > 1:
                return
            left: SiblingGroup[Node] = group[0]
        else:
            assert group is node
            left = None
        if node.canonical:
            self._keep(left, derived)
        else:
            self._keep(canonical, left)

    def move_to(self, other: Siblings[Node]) -> None:
        """Gives all of them to `other`, which has none."""
        other._nodes, self._nodes = self._nodes, None

    def check(self) -> None:
        """Raises AssertionError if one is in the wrong group or place."""
        for group, canonical in zip(self._both, (True, False), strict=True):
            if isinstance(group, SortedKeyList):
                nodes = list(group)
                assert len(nodes) > 1
                assert all(node.canonical == canonical for node in nodes)
                assert nodes == sorted(nodes, key=_packed)
            else:
                assert group is None or group.canonical == canonical

    # ── search ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def nearest(self, packed: bytes, *, canonical_only: bool) -> tuple[Node | None, int]:
        """The one that shares the most leading tokens with `packed`, and how many; None and 0 if none shares any.

        Of two that share as much, it is a canonical one.
        """
        best, most = None, 0
        for group in self._groups(canonical_only):
            for node in (_at_most(group, packed), _at_least(group, packed)):
                if node is not None and (shared := common_bytes(node.packed, packed) // WIDTH) > most:
                    best, most = node, shared
        return best, most

    def prefixes(self, packed: bytes, *, canonical_only: bool) -> Iterator[Node]:
        """Those that `packed` begins with, of each group the longest first."""
        for group in self._groups(canonical_only):
            query = packed
            while query and (node := _at_most(group, query)) is not None:
                shared = common_bytes(node.packed, query) // WIDTH * WIDTH
                if shared == len(node.packed):
                    yield node
                    shared -= WIDTH
                query = query[:shared]

    def continues(self, packed: bytes) -> bool:
        """Whether one of them begins with all of `packed`."""
        found = (_at_least(group, packed) for group in self._groups(False))
        return any(node is not None and node.packed.startswith(packed) for node in found)

    def extends(self, packed: bytes) -> bool:
        """Whether one of them begins with all of `packed`, and is longer."""
        found = (_at_least(group, packed + b"\0") for group in self._groups(False))  # what is longer sorts after this
        return any(node is not None and node.packed.startswith(packed) for node in found)

    def _groups(self, canonical_only: bool) -> tuple[SiblingGroup[Node], ...]:
        return self._both[:1] if canonical_only else self._both


def common_bytes(a: bytes, b: bytes) -> int:
    """The number of leading bytes that `a` and `b` share."""
    size = min(len(a), len(b))
    differ = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return size - (differ.bit_length() + 7) // 8


def _packed(node: Sibling) -> bytes:
    return node.packed


def _at_most(group: SiblingGroup[Node], packed: bytes) -> Node | None:
    """The last one whose bytes are `packed` or before it."""
    if isinstance(group, SortedKeyList):
        if packed < group[0].packed:
            return None
        return next(group.irange_key(None, packed, reverse=True), None)
    return group if group is not None and group.packed <= packed else None


def _at_least(group: SiblingGroup[Node], packed: bytes) -> Node | None:
    """The first one whose bytes are `packed` or after it."""
    if isinstance(group, SortedKeyList):
        return next(group.irange_key(packed, None), None)
    return group if group is not None and group.packed >= packed else None
