"""Runs with everything in them that a run can have, and ways to damage them."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.collecting import MemoryBucket
from tests.support.samples import CREATED, RUN, RunWriter, nudge, random_bits
from vllm_delta_sync.chain import Run
from vllm_delta_sync.chain.plan import FOLD_WIDTH
from vllm_delta_sync.chain.read import restore
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.anchor import write_anchor
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.delta import Codec
from vllm_delta_sync.wire.documents import Claim, Retention, Tag
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

TABLE = TensorTable([TensorSpec("a", "BF16", (40, 3)), TensorSpec("b", "F32", (7,)), TensorSpec("c", "I8", ())])


class Whole:
    """A run in memory.

    Attributes:
        bucket, writer: what it is written with; ``writer.bits`` are the weights of each version.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.bucket = MemoryBucket()
        self.writer = RunWriter(self.bucket, TABLE)
        self.anchor(random_bits(TABLE, self.random))

    @property
    def run(self) -> Run:
        return Run(self.bucket)

    def anchor(self, bits: list[Bits]) -> None:
        """An anchor in the chain."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "anchor"
            write_anchor(path, TABLE, [(spec.name, bits[tensor]) for tensor, spec in enumerate(TABLE)])
            self.writer.anchor(bits, path.read_bytes())

    def delta(self, kind: str = "packed", base: int | None = None) -> None:
        """Another version: packed, context, raw, full (a tensor of it) or same."""
        bits = self.writer.bits[-1 if base is None else base]
        bits = bits if kind == "same" else nudge(bits, self.random, 0.2)
        full = (0,) if kind == "full" else ()
        codec: Codec = "raw" if kind == "raw" else "context" if kind == "context" else "packed"
        self.writer.delta(bits, codec, full=full, base=base)

    def deltas(self, *kinds: str) -> None:
        for kind in kinds:
            self.delta(kind)

    def folds(self) -> None:
        """Every folded range that a run of this length may have."""
        head, size = len(self.writer.manifests) - 1, FOLD_WIDTH
        breaks = {item.version for item in self.writer.breaks}
        while size <= head:
            for first in range(0, head - size + 1, size):
                if not breaks & set(range(first + 1, first + size + 1)):
                    self.writer.fold(first, first + size)
            size *= FOLD_WIDTH

    def beside(self, version: int, shards: int = 2) -> None:
        """An anchor beside the chain."""
        with tempfile.TemporaryDirectory() as folder:
            self.writer.beside(version, Path(folder), shards)

    def tag(self, name: str, version: int) -> None:
        digest = self.writer.manifests[version].digest
        tag = Tag(run=RUN, name=name, version=version, manifest=digest, created_at=CREATED)
        self.bucket.put(side.tag_key(name), tag.to_bytes())

    def claim(self) -> None:
        """Another writer takes over."""
        self.writer.epoch += 1
        newest = self.writer.manifests[-1]
        claim = Claim(
            run=RUN,
            epoch=self.writer.epoch,
            version=newest.version,
            manifest=newest.digest,
            writer="ab" * 16,
            created_at=CREATED,
        )
        self.bucket.put(side.claim_key(claim.epoch), claim.to_bytes())

    def retire(self, *ranges: tuple[int, int]) -> None:
        """Remove the versions' own objects, as retention does."""
        gone = [[first, last] for first, last in ranges]
        document = Retention(run=RUN, gone=gone, created_at=CREATED)
        self.bucket.put(side.RETENTION_KEY, document.to_bytes())
        for first, last in ranges:
            for version in range(first, last + 1):
                for ref in self.writer.manifests[version].objects:
                    self.bucket.delete(ref.key)

    def object_of(self, version: int) -> str:
        return self.writer.manifests[version].objects[0].key

    def flip(self, key: str, place: int = -1) -> None:
        """Damage one bit of one byte."""
        data = bytearray(self.bucket.get(key))
        data[place % len(data)] ^= 1
        self.bucket.put(key, bytes(data))

    def is_readable(self, version: int) -> bool:
        """Whether a version can be rebuilt; if so it has the right bits."""
        run = self.run
        try:
            manifest = run.manifest(version)
            if manifest.digest != self.writer.manifests[version].digest:
                return False
            state = restore(run, manifest).state
        except DeltaSyncError:
            return False
        for held, right in zip(state.bits, self.writer.bits[version], strict=True):
            if not np.array_equal(held, right):
                pytest.fail(f"version {version} was rebuilt with other bits")
        return True

    def readable(self) -> list[int]:
        return [version for version in range(len(self.writer.manifests)) if self.is_readable(version)]


def random_run(seed: int) -> Whole:
    """Some versions of every kind, with documents of every kind beside them."""
    random = np.random.default_rng(seed)
    whole = Whole(seed)
    for version in range(1, int(random.integers(6, 22))):
        what = random.random()
        if what < 0.06 and version > 2:
            whole.delta(base=int(random.integers(0, version - 1)))
        elif what < 0.1:
            whole.anchor(nudge(whole.writer.bits[-1], whole.random, 0.3))
        else:
            whole.delta(str(random.choice(["packed", "packed", "context", "raw", "full", "same"])))
        if random.random() < 0.1:
            whole.claim()
    if random.random() < 0.7:
        whole.folds()
    head = len(whole.writer.manifests) - 1
    for version in random.choice(head + 1, int(random.integers(0, 3)), replace=False).tolist():
        whole.beside(version, int(random.integers(1, 3)))
    whole.tag("best", int(random.integers(0, head + 1)))
    return whole


@dataclass(frozen=True)
class Damage:
    """One thing done to one object of a run, chosen by numbers: which, what, and where in it."""

    which: int
    what: int
    place: int

    def do(self, whole: Whole) -> str:
        """Its key."""
        names = sorted(key for key in whole.bucket.held if key not in (keys.RUN_KEY, keys.TABLE_KEY))
        key = names[self.which % len(names)]
        data = whole.bucket.get(key)
        match self.what % 4:
            case 0:
                whole.bucket.delete(key)
            case 1 if data:
                whole.flip(key, self.place)
            case 2:
                whole.bucket.put(key, data[: self.place % max(1, len(data))])
            case _:
                other = names[self.place % len(names)]
                whole.bucket.put(key, whole.bucket.get(other))
        return key
