"""A run that a test writes version by version, and what its folded ranges are held against."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tests.support.samples import RunWriter, nudge, random_bits, state_of
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import Run, open_run
from vllm_delta_sync.wire.anchor import write_anchor
from vllm_delta_sync.wire.delta import Codec
from vllm_delta_sync.wire.manifest import Manifest
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

TABLE = TensorTable(
    [
        TensorSpec("a.weight", "BF16", (200, 100)),
        TensorSpec("b.weight", "BF16", (7000,)),
        TensorSpec("c.scale", "F32", (900,)),
        TensorSpec("d.experts", "F8_E4M3", (5000,)),
    ]
)


class Written:
    """A run with an anchor and ``deltas`` versions, and what reads it."""

    def __init__(self, folder: Path, deltas: int, seed: int = 1, table: TensorTable = TABLE) -> None:
        self.folder = folder
        self.bucket = open_bucket(folder)
        self.writer = RunWriter(self.bucket, table)
        self.random = np.random.default_rng(seed)
        first = random_bits(table, self.random)
        with tempfile.TemporaryDirectory() as scratch:
            whole = Path(scratch) / "anchor"
            write_anchor(whole, table, zip((spec.name for spec in table), first, strict=True))
            self.writer.anchor(first, whole.read_bytes())
        for _ in range(deltas):
            self.publish()

    def publish(
        self, share: float = 0.01, codec: Codec = "packed", full: Iterable[int] = (), base: int | None = None
    ) -> Manifest:
        before = self.writer.bits[-1 if base is None else base]
        return self.writer.delta(nudge(before, self.random, share), codec, full=full, base=base)

    @property
    def run(self) -> Run:
        return open_run(str(self.folder))

    def lose(self, key: str) -> None:
        (self.folder / key).unlink()

    def check(self, first: int, last: int) -> None:
        """The folded range does exactly what its versions do."""
        run = self.run
        folded = run.folded(first, last)
        state = state_of(self.writer.table, self.writer.bits[first])
        changes = run.changes(folded, state.old)
        state.apply(changes)
        for found, expected in zip(state.bits, self.writer.bits[last], strict=True):
            assert found.tobytes() == expected.tobytes()
        assert state.fingerprint == self.writer.manifests[last].model_fingerprint
        assert folded.changed == changes.changed
        assert folded.reversible == (changes.reversible and "context" not in folded.requires)
