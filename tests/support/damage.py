"""Runs in memory with everything in them that a run can have, and ways to damage them."""

from dataclasses import dataclass

import numpy as np

from tests.support.collecting import MemoryBucket
from tests.support.samples import nudge
from tests.support.written import Written
from vllm_delta_sync.client import Run
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.table import TensorSpec, TensorTable

TABLE = TensorTable([TensorSpec("a", "BF16", (40, 3)), TensorSpec("b", "F32", (7,)), TensorSpec("c", "I8", ())])


class Whole(Written):
    """A run in memory."""

    bucket: MemoryBucket

    def __init__(self, seed: int = 0) -> None:
        super().__init__(MemoryBucket(), 0, seed, TABLE)

    @property
    def run(self) -> Run:
        return Run(self.bucket)


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
            whole.delta(str(random.choice(["plain", "plain", "tiled", "raw", "full", "same"])))
        if random.random() < 0.1:
            whole.claim()
    if random.random() < 0.7:
        whole.merged_deltas()
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
