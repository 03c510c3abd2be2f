"""``EarlyReads`` reads what an audit needs next from a distant store, while earlier versions are checked."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.documents import MergedDelta
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.run.run_reader import RunReader, read_ahead

MAX_BYTES = 256 * 1024**2
"""Most memory for objects that are read early; the audit reads the others when it checks them."""


@dataclass
class _Read:
    """What was read of a version: its manifest, merged deltas that begin with it, and the objects of both by key."""

    manifest: Manifest | None = None
    merged: dict[tuple[int, int], MergedDelta] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    reserved: int = 0


class EarlyReads:
    """Reads the objects of the next versions, for one thread that audits a run.

    What fails here is read again by the audit, which reports it.

    Args:
        manifest: returns the manifest of a version; None if it is not good.
        merged_from: version → last versions of the merged deltas that begin with it.
        is_gone: whether retention has removed a version's objects.
    """

    def __init__(
        self,
        run: RunReader,
        manifest: Callable[[int], Manifest | None],
        merged_from: Mapping[int, Sequence[int]],
        is_gone: Callable[[int], bool],
    ) -> None:
        self._run, self._manifest, self._merged_from, self._is_gone = run, manifest, merged_from, is_gone
        self._current = _Read()
        self._lock = threading.Lock()
        self._reserved = 0

    def versions(self, top: int) -> Iterator[tuple[int, Manifest | None]]:
        """Yield each version from 0 to ``top`` and its manifest, once what ``fetch`` returns of it has been read."""
        for version, read in enumerate(read_ahead(self._read, range(top + 1))):
            with self._lock:
                self._reserved -= self._current.reserved
            self._current = read
            yield version, read.manifest

    def fetch(self, ref: ObjectRef) -> bytes:
        """As ``RunReader.fetch``."""
        data = self._current.objects.get(ref.key)
        return self._run.fetch(ref) if data is None else data

    def merged_delta(self, first: int, last: int) -> MergedDelta:
        """As ``RunReader.merged_delta``."""
        document = self._current.merged.get((first, last))
        return self._run.merged_delta(first, last) if document is None else document

    def _read(self, version: int) -> _Read:
        read = _Read(self._manifest(version))
        if not self._run.is_remote:
            return read
        listed = [] if read.manifest is None or self._is_gone(version) else list(read.manifest.objects)
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
