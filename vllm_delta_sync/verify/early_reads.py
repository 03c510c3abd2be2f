"""``EarlyReads`` reads what an audit needs next from a distant store, while earlier versions are checked."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from vllm_delta_sync.bucket.threads import start_call
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.documents import MergedDelta
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.run.documents import RunDocuments

AHEAD = 16
"""Versions that are read at the same time."""
MAX_BYTES = 256 * 1024**2
"""Most memory for objects that are read early; the audit reads the others when it checks them."""


@dataclass
class _Read:
    """What was read of a version: merged deltas that begin with it, and the objects of all its documents by key."""

    merged: dict[tuple[int, int], MergedDelta] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    reserved: int = 0


class EarlyReads:
    """Reads the documents' objects of the next ``AHEAD`` versions, for one thread that audits a run.

    What fails here is read again by the audit, which reports it.

    Args:
        merged_from: version → last versions of the merged deltas that begin with it.
        is_gone: whether retention has removed a version's objects.
    """

    def __init__(
        self, run: RunDocuments, merged_from: Mapping[int, Sequence[int]], is_gone: Callable[[int], bool]
    ) -> None:
        self._run, self._merged_from, self._is_gone = run, merged_from, is_gone
        self._current = _Read()
        self._lock = threading.Lock()
        self._reserved = 0

    def versions(self, manifests: Iterable[Manifest | None]) -> Iterator[tuple[int, Manifest | None]]:
        """Yield each version and its manifest, from version 0 on, once what ``fetch`` returns of it has been read."""
        waiting: deque[tuple[int, Manifest | None, Future[_Read]]] = deque()
        for version, manifest in enumerate(manifests):
            waiting.append((version, manifest, self._begin(version, manifest)))
            if len(waiting) > AHEAD:
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def fetch(self, ref: ObjectRef) -> bytes:
        """As ``RunDocuments.fetch``."""
        data = self._current.objects.get(ref.key)
        return self._run.fetch(ref) if data is None else data

    def merged_delta(self, first: int, last: int) -> MergedDelta:
        """As ``RunDocuments.merged_delta``."""
        document = self._current.merged.get((first, last))
        return self._run.merged_delta(first, last) if document is None else document

    def _begin(self, version: int, manifest: Manifest | None) -> "Future[_Read]":
        if self._run.is_remote:
            try:
                return start_call(self._read, version, manifest)
            except RuntimeError:
                pass  # there are too many threads
        nothing: Future[_Read] = Future()
        nothing.set_result(_Read())
        return nothing

    def _next(self, waiting: deque[tuple[int, Manifest | None, "Future[_Read]"]]) -> tuple[int, Manifest | None]:
        version, manifest, read = waiting.popleft()
        with self._lock:
            self._reserved -= self._current.reserved
        self._current = read.result()
        return version, manifest

    def _read(self, version: int, manifest: Manifest | None) -> _Read:
        read = _Read()
        listed = [] if manifest is None or self._is_gone(version) else list(manifest.objects)
        for last in self._merged_from.get(version, ()):
            try:
                merged = self._run.merged_delta(version, last)
            except DeltaSyncError:
                continue
            read.merged[version, last] = merged
            listed += merged.objects
        for ref in listed:
            with self._lock:
                fits = self._reserved + ref.bytes <= MAX_BYTES
                self._reserved += ref.bytes if fits else 0
            if fits:
                read.reserved += ref.bytes
                try:
                    read.objects[ref.key] = self._run.fetch(ref)
                except DeltaSyncError:
                    pass
        return read
