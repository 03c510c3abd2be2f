"""The builder of runs: written version by version, with everything beside them, and damaged."""

import copy
import shutil
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.support.samples import CREATED, RUN, RunWriter, changes_between, nudge, random_bits, state_of, whole_object
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.codec.delta_object import DeltaContext, required_features
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.documents import Claim, Retention
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.maintenance.gc.record import ranges as spans
from vllm_delta_sync.run.read_plan import ReadPlanner, Step
from vllm_delta_sync.run.restore import restore
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.changes import BaseTensor, Bits
from vllm_delta_sync.tensors.state import ModelState

TABLE = TensorTable(
    [
        TensorSpec("a.weight", "BF16", (200, 100)),
        TensorSpec("b.weight", "BF16", (7000,)),
        TensorSpec("c.scale", "F32", (900,)),
        TensorSpec("d.experts", "F8_E4M3", (5000,)),
    ]
)
SMALL = TensorTable([TensorSpec("w", "BF16", (40, 3)), TensorSpec("b", "F32", (4,))])


def save_base(folder: Path, bits: list[Bits], table: TensorTable = SMALL) -> Path:
    """Write a checkpoint folder."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(whole_object(table, bits))
    return folder / "model.safetensors"


def find_steps(run: RunReader, start: int, target: int, avoid: Collection[str] = ()) -> list[Step]:
    """The cheapest steps from one version to another."""
    return ReadPlanner(run, avoid).path(start, target)


def reference_run(folder: Path, location: str) -> tuple[Run, list[list[Bits]]]:
    """A run of ``SMALL`` whose version 0 lies in a checkpoint folder, with two deltas; and the bits of each version."""
    random = np.random.default_rng(4)
    writer = RunWriter(open_bucket(str(folder)), SMALL)
    writer.reference(random_bits(SMALL, random), location)
    writer.delta(nudge(writer.bits[0], random, 0.2))
    writer.delta(nudge(writer.bits[1], random, 0.2), "raw", "none")
    return open_run(str(folder)), writer.bits


def assert_bits(state: ModelState, bits: list[Bits]) -> None:
    """A state has these very bits."""
    assert [found.tobytes() for found in state.bits] == [right.tobytes() for right in bits]


class Written:
    """A run with an anchor and ``deltas`` versions, in a folder or a bucket, and what reads it.

    Attributes:
        folder: where the run is, if it is in one. writer: what it is written with; ``writer.bits`` are the weights of
            each version.
    """

    def __init__(
        self,
        place: Path | Bucket,
        deltas: int = 0,
        seed: int = 1,
        table: TensorTable = TABLE,
        start: Literal["anchor", "checkpoint", "branch"] = "anchor",
        run: str = RUN,
    ) -> None:
        self.folder = place if isinstance(place, Path) else Path(place.url)
        self.bucket = open_bucket(place) if isinstance(place, Path) else place
        self.random = np.random.default_rng(seed)
        bits = random_bits(table, self.random)
        source: Written | None = None
        if start == "branch":
            source = Written(self.folder.with_name("source"), 2, seed + 1, table, run="ab" * 16)
            source.publish(full=(0,))
            bits = source.writer.bits[2]
        self.writer: RunWriter = RunWriter(self.bucket, table, run)
        if source is not None:
            self.writer.branch_of(source.writer, 2, source.bucket.url)
        elif start == "checkpoint":
            checkpoint = self.folder.with_name("checkpoint")
            save_base(checkpoint, bits, table)
            self.writer.reference(bits, str(checkpoint))
        else:
            self.anchor(bits)
        for _ in range(deltas):
            self.publish()

    def copied(self, folder: Path) -> "Written":
        """A copy of the run in another folder, for a test to continue: writing one takes many syncs of the disk."""
        shutil.copytree(self.folder, folder)
        mine = copy.copy(self)
        mine.folder, mine.bucket, mine.random = folder, open_bucket(folder), copy.deepcopy(self.random)
        mine.writer = copy.copy(self.writer)
        mine.writer.bucket = mine.bucket
        for name in ("manifests", "bits", "breaks"):
            setattr(mine.writer, name, list(getattr(self.writer, name)))
        return mine

    @property
    def run(self) -> Run:
        """Opened anew."""
        return open_run(str(self.folder))

    @property
    def head(self) -> int:
        return len(self.writer.manifests) - 1

    # Versions

    def anchor(self, bits: list[Bits]) -> None:
        """An anchor in the history."""
        self.writer.anchor(bits)

    def publish(
        self, share: float = 0.01, codec: Codec = "plain", full: Iterable[int] = (), base: int | None = None
    ) -> Manifest:
        """A delta that changes about that share of the weights of version ``base``, the last if None."""
        before = self.writer.bits[-1 if base is None else base]
        return self.writer.delta(nudge(before, self.random, share), codec, full=full, base=base)

    def delta(self, kind: str = "plain", base: int | None = None) -> None:
        """A delta of a fifth of the weights: plain, tiled, raw, full (a tensor of it) or same."""
        codec: Codec = "raw" if kind == "raw" else "tiled" if kind == "tiled" else "plain"
        self.publish(0.0 if kind == "same" else 0.2, codec, (0,) if kind == "full" else (), base)

    def deltas(self, *kinds: str) -> None:
        for kind in kinds:
            self.delta(kind)

    def publish_by_ranks(self, ranks: int, codec: Codec = "plain") -> Manifest:
        """A delta of several objects, each with elements of any tensor, as the ranks of a trainer write them."""
        old, version = self.writer.bits[-1], self.head + 1
        new = nudge(old, self.random, 0.1)
        owners = [self.random.integers(0, ranks, array.size) for array in old]
        context = DeltaContext(self.writer.run, version, version - 1)
        objects, changed, held = [], 0, old
        for rank in range(ranks):
            own = [np.where(owner == rank, n, h) for owner, n, h in zip(owners, new, held, strict=True)]
            changes = changes_between(self.writer.table, held, own, codec)
            changed, held = changed + changes.changed, own
            if changes.changed:
                before = lambda tensor: BaseTensor(old[tensor])  # noqa: E731
                objects.append(encode(changes, self.writer.table, codec, "zstd", context, before))
        fields: dict[str, Any] = {"codec": codec, "compression": "none" if codec == "raw" else "zstd"}
        fields |= {"reversible": codec == "plain", "requires": required_features(codec, "zstd")}
        return self.writer._commit(new, objects, "delta", changed, base_version=version - 1, **fields)

    # Beside the versions

    def merged_deltas(self, longest: int = 10**6) -> None:
        """Every merged delta that a run of this length may have, up to a length."""
        self.writer.merge_all(longest)

    def beside(self, version: int, shards: int = 2) -> None:
        """A standalone anchor."""
        with tempfile.TemporaryDirectory() as folder:
            self.writer.beside(version, Path(folder), shards)

    def tag(self, name: str, version: int) -> None:
        self.writer.tag(name, version)

    def claim(self) -> None:
        """Another writer takes over."""
        self.writer.epoch += 1
        newest = self.writer.manifests[-1]
        claim = Claim(
            run=self.writer.run,
            epoch=self.writer.epoch,
            version=newest.version,
            manifest=newest.digest,
            writer="ab" * 16,
            created_at=CREATED,
        )
        self.bucket.put(side.claim_key(claim.epoch), claim.to_bytes())

    # What is lost

    def retire(self, *ranges: tuple[int, int]) -> None:
        """Remove the versions' own objects, as retention does."""
        gone = [[first, last] for first, last in ranges]
        kept = spans(version for version in range(self.head + 1) if not any(a <= version <= b for a, b in ranges))
        document = Retention(run=self.writer.run, gone=gone, head=self.head, kept=kept, created_at=CREATED)
        self.bucket.put(side.RETENTION_KEY, document.to_bytes())
        for first, last in ranges:
            for version in range(first, last + 1):
                for ref in self.writer.manifests[version].objects:
                    self.bucket.delete(ref.key)

    def object_of(self, version: int) -> str:
        return self.writer.manifests[version].objects[0].key

    def lose(self, key: str) -> None:
        self.bucket.stat(key)
        self.bucket.delete(key)

    def flip(self, key: str, place: int = -1) -> None:
        """Damage one bit of one byte."""
        data = bytearray(self.bucket.get(key))
        data[place % len(data)] ^= 1
        self.bucket.put(key, bytes(data))

    def forge(self, key: str, document: Any, **fields: Any) -> None:
        """Put a document with other fields, which nothing else of the run agrees with."""
        forged = document.model_copy(update=fields)
        forged._raw = None
        self.bucket.put(key, forged.to_bytes())

    # What is read

    def check(self, first: int, last: int) -> None:
        """The merged delta does exactly what its versions do."""
        run = self.run
        merged_delta = run.merged_delta(first, last)
        state = state_of(self.writer.table, self.writer.bits[first])
        changes = run.changes(merged_delta, state.base_tensor)
        state.apply(changes)
        assert_bits(state, self.writer.bits[last])
        assert state.fingerprint == self.writer.manifests[last].model_fingerprint
        assert merged_delta.changed == changes.changed
        assert merged_delta.reversible == (changes.reversible and "tiled" not in merged_delta.requires)

    def is_readable(self, version: int) -> bool:
        """Whether a version can be rebuilt; if so it has the right bits."""
        run = self.run
        try:
            state = restore(run, run.manifest(version)).state
        except DeltaSyncError:
            return False
        for held, right in zip(state.bits, self.writer.bits[version], strict=True):
            if not np.array_equal(held, right):
                pytest.fail(f"version {version} was rebuilt with other bits")
        return True

    def readable(self) -> list[int]:
        return [version for version in range(self.head + 1) if self.is_readable(version)]
