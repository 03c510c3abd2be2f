"""``VersionGraph`` holds which documents lead from version to version, and finds the cheapest ways between them.

It is pure: it knows keys, ends and costs, and reads nothing. Readers, servers, retention, verification and repair fill
it with the documents that they know of, and take out what is absent: *a document or object that a digest, a signature
or a fingerprint contradicts counts as absent; a version exists if the graph of what is present reaches it.*
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from vllm_delta_sync.errors import ChainError, DataError, FingerprintError
from vllm_delta_sync.format.documents import Standalone, named_versions

ROOT = -1
"""The node where anchors and references start: they need no other version."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A document that leads from one version to another.

    Attributes:
        key: of the document. low: the version that it builds on, ``ROOT`` if none. high: the version that it leads to.
        cost: bytes to read; None while the document is unread.
        reversible: whether it also leads back.
        last_resort: whether a way uses it only where there is no other.
    """

    key: str
    low: int
    high: int
    cost: int | None = 0
    reversible: bool = False
    last_resort: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """An edge, forwards or backwards."""

    edge: Edge
    backwards: bool = False

    @property
    def end(self) -> int:
        return self.edge.low if self.backwards else self.edge.high


class VersionGraph:
    """Versions as nodes, documents as edges. Iterating yields the edges.

    Attributes:
        guess: cost of the edges whose cost is not known. Guess high, and ways keep to documents that were read.
    """

    def __init__(self, edges: Iterable[Edge] = ()) -> None:
        self.guess = 1
        self._edges: dict[str, Edge] = {}
        self._from: dict[int, dict[str, Edge]] = {}
        self._to: dict[int, dict[str, Edge]] = {}
        for edge in edges:
            self.put(edge)

    def __iter__(self) -> Iterator[Edge]:
        return iter(self._edges.values())

    def __contains__(self, key: str) -> bool:
        return key in self._edges

    def get(self, key: str) -> Edge | None:
        return self._edges.get(key)

    def put(self, edge: Edge) -> None:
        """Add an edge, in place of an earlier one of the same document."""
        self.drop(edge.key)
        self._edges[edge.key] = edge
        self._from.setdefault(edge.low, {})[edge.key] = edge
        self._to.setdefault(edge.high, {})[edge.key] = edge

    def drop(self, key: str) -> None:
        """Take out a document that counts as absent, if it is in the graph."""
        edge = self._edges.pop(key, None)
        if edge is not None:
            del self._from[edge.low][key], self._to[edge.high][key]

    def way(self, start: int, goal: int) -> list[Move] | None:
        """Return the cheapest moves from one node to another, none if they are equal; None if there is no way."""
        return self._cheapest(self._moves, start, goal).to(goal)

    def ways(self, start: int = ROOT) -> "Ways":
        """Return the cheapest ways from a node to all nodes that it reaches."""
        return self._cheapest(self._moves, start, None)

    def ways_to(self, goal: int, revert: bool = True) -> "Ways":
        """Return the cheapest ways to a version from all versions that reach it, ``ROOT`` not among them.

        Args:
            revert: whether the ways may revert documents.
        """

        def moves_into(node: int) -> Iterator[tuple[int, Move]]:
            for edge in self._to.get(node, {}).values():
                if edge.low != ROOT:
                    yield edge.low, Move(edge)
            for edge in self._from.get(node, {}).values() if revert else ():
                if edge.reversible:
                    yield edge.high, Move(edge, backwards=True)

        return self._cheapest(moves_into, goal, None)

    def _moves(self, node: int) -> Iterator[tuple[int, Move]]:
        for edge in self._from.get(node, {}).values():
            yield edge.high, Move(edge)
        for edge in self._to.get(node, {}).values():
            if edge.reversible and edge.low != ROOT:
                yield edge.low, Move(edge, backwards=True)

    def _cheapest(self, moves: Callable[[int], Iterable[tuple[int, Move]]], begin: int, goal: int | None) -> "Ways":
        """Run Dijkstra's algorithm: as few last resorts as possible, then reverts, then cost; keys break ties.

        The way to a node depends on the edges of that way only: two collections find the same ways, even while one
        removes edges that are on no kept way.
        """
        last: dict[int, tuple[int, Move]] = {}
        done: set[int] = set()
        # The count of moves makes each of them cost something, so that all candidates for a node are known when it is
        # popped.
        pending: list[tuple[int, int, int, int, int, str, int, Move | None]] = [(0, 0, 0, 0, begin, "", begin, None)]
        while pending:
            resorts, reverts, cost, count, node, _, origin, taken = heapq.heappop(pending)
            if node in done:
                continue
            done.add(node)
            if taken is not None:
                last[node] = (origin, taken)
            if node == goal:
                break
            for other, move in moves(node):
                if other not in done:
                    edge = move.edge
                    size = cost + (self.guess if edge.cost is None else edge.cost)
                    so_far = (resorts + edge.last_resort, reverts + move.backwards, size, count + 1)
                    heapq.heappush(pending, (*so_far, other, edge.key, node, move))
        return Ways(begin, last)


@dataclass(frozen=True)
class Ways:
    """Cheapest ways between one node and all others.

    Attributes:
        begin: the node. last: connected node → the node next to it on its way to or from ``begin``, and the move
            between the two.
    """

    begin: int
    last: dict[int, tuple[int, Move]]

    def __contains__(self, node: int) -> bool:
        return node == self.begin or node in self.last

    def to(self, node: int) -> list[Move] | None:
        """Return the moves from ``begin`` to a node, or of ``ways_to`` from it in reverse; None if there are none."""
        if node not in self:
            return None
        found = []
        while node != self.begin:
            node, move = self.last[node]
            found.append(move)
        return found[::-1]

    def moves_to(self, nodes: Iterable[int]) -> Iterator[Move]:
        """Yield each move on the ways to some of the connected nodes once, so that shared parts are walked once."""
        done = {self.begin}
        for node in nodes:
            while node not in done:
                done.add(node)
                node, move = self.last[node]
                yield move


class Linked(Protocol):
    """What a manifest, or a note of one, says about itself and the one before it."""

    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def epoch(self) -> int: ...


class Described(Linked, Protocol):
    """As ``Linked``, with the fingerprint of the model."""

    @property
    def fingerprint(self) -> str: ...


def broken_link(before: Linked, manifest: Linked, digest: str | None = None) -> str | None:
    """Return why a manifest does not follow the one before it, as what is said of it; None if it does.

    A manifest names the digest of the one before it. One that is of an earlier epoch was written by a publisher that
    had lost the run.

    Args:
        digest: of the damaged manifest between the two, if there is one.
    """
    digest = digest or before.digest
    if manifest.parent != digest:
        return f"names parent {manifest.parent}, the version before is {digest}: the history was rewritten"
    if manifest.epoch < before.epoch:
        return (
            f"was written in epoch {manifest.epoch}, version {before.version} before it in epoch {before.epoch}: "
            "another publisher had already taken over the run"
        )
    return None


def check_follows(before: Linked, manifest: Linked, digest: str | None = None) -> None:
    """Raise ChainError if the link from a manifest to the one before it is broken; see ``broken_link``."""
    if why := broken_link(before, manifest, digest):
        raise ChainError(f"version {manifest.version} {why}")


def contradicted(manifests: Iterable[Linked], trusted: Mapping[int, str]) -> tuple[dict[int, str], dict[int, str]]:
    """Return which manifests others contradict.

    The newest speaks first, because the one after it confirms each.

    Args:
        manifests: at most one for each version. trusted: version → digest that is right in any case.

    Returns:
        version → digest of its manifest, as far as it is known; version of each contradicted manifest → what is wrong.
    """
    known, wrong = dict(trusted), dict[int, str]()
    by_version = {manifest.version: manifest for manifest in manifests}
    for version in sorted(by_version, reverse=True):
        manifest, before = by_version[version], by_version.get(version - 1)
        parent = manifest.parent
        if before is not None and parent == before.digest and (why := broken_link(before, manifest)):
            wrong[version] = why
        elif known.setdefault(version, manifest.digest) != manifest.digest:
            wrong[version] = f"has digest {manifest.digest}, and {known[version]} is named: the history was rewritten"
        elif parent is not None and known.setdefault(version - 1, parent) != parent:
            wrong[version] = f"names parent {parent}, which is {known[version - 1]}: the history was rewritten"
    return known, wrong


def contradiction(
    document: Standalone, manifests: Mapping[int, Described], known: Mapping[int, str] | None = None
) -> DataError | None:
    """Return what contradicts a document beside the chain; None if nothing does.

    Args:
        manifests: version → its manifest. known: version → digest of its manifest, as ``contradicted`` returns it, also
            of manifests that are not here; None for the digests of ``manifests``.
    """
    digests = {version: manifest.digest for version, manifest in manifests.items()} if known is None else known
    for version, digest, fingerprint in named_versions(document):
        if (right := digests.get(version, digest)) != digest:
            return ChainError(f"it names manifest {digest} as version {version}, which has digest {right}")
        manifest = manifests.get(version)
        if manifest is not None and fingerprint not in (None, manifest.fingerprint):
            return FingerprintError(
                f"it gives version {version} fingerprint {fingerprint}, its manifest says {manifest.fingerprint}"
            )
    return None
