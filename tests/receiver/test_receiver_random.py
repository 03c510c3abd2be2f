"""Runs of random shape with random losses: a receiver reaches the head wherever anything leads there, bit for bit."""

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.support.chains import Chain, Server
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.chain.plan import FOLD_WIDTH
from vllm_delta_sync.chain.read import restore
from vllm_delta_sync.engine.rebuild import newest, rebuild
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.wire.documents import Anchor, FoldedRange
from vllm_delta_sync.wire.manifest import Manifest

SEEDS = range(60)
COMMITS = 4
"""An anchor, what follows it, and twice around something that was found to be bad at the commit only."""


class Story:
    """A chain made by chance."""

    def __init__(self, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.chain = Chain(root, seed=seed, base=self.chance.random() < 0.3)
        self.folds: list[tuple[int, int]] = []
        self.anchors: list[int] = []
        for _ in range(self.chance.randint(6, 30)):
            self.publish()
        self.compact()

    @property
    def head(self) -> int:
        return len(self.chain.manifests) - 1

    def publish(self) -> None:
        kind = self.chance.choices(["plain", "raw", "full", "break", "anchor"], [20, 1, 1, 2, 1])[0]
        if kind == "break" and self.head > 1:
            self.chain.grow(1, base=self.chance.randrange(self.head))
        elif kind == "anchor":
            self.chain.inside(self.chain.bits[-1])
        elif kind == "raw":
            self.chain.grow(1, codec="raw")
        else:
            self.chain.grow(1, full=[2] if kind == "full" else [])

    def compact(self) -> None:
        breaks = {item.version for item in self.chain.breaks}
        size = FOLD_WIDTH
        while size <= self.head:
            for first in range(0, self.head + 1 - size, size):
                if not breaks.intersection(range(first + 1, first + size + 1)) and self.chance.random() < 0.6:
                    self.chain.fold(first, first + size)
                    self.folds.append((first, first + size))
            size *= FOLD_WIDTH
        for version in self.chance.sample(range(1, self.head + 1), k=self.chance.randint(0, 2)):
            self.chain.beside_it(version)
            self.anchors.append(version)

    def lose(self) -> None:
        """Objects are removed or damaged, manifests and documents are spoilt; the head's manifest stays."""
        chain, chance = self.chain, self.chance
        share = chance.choice([0.0, 0.1, 0.3, 0.8])
        run = open_run(chain.url)
        documents: list[Manifest | FoldedRange | Anchor] = [*chain.manifests[1:]]
        documents += [run.folded(*pair) for pair in self.folds]
        documents += [run.anchor(version) for version in self.anchors]
        for document in documents:
            if chance.random() < share and all((chain.folder / ref.key).exists() for ref in document.objects):
                (chain.remove if chance.random() < 0.7 else chain.damage)(document)
        for version in range(1, self.head):
            if chance.random() < share / 10:
                chain.spoil_manifest(version)

    def leads_there(self) -> bool:
        """Whether the head can be made from what the bucket and the base hold."""
        run = open_run(self.chain.url)
        try:
            restore(run, run.manifest(self.head))
        except DeltaSyncError:
            return False
        return True


@pytest.mark.parametrize("seed", SEEDS)
def test_head_is_reached_wherever_anything_leads_there(tmp_path: Path, seed: int) -> None:
    story = Story(tmp_path, seed)
    chain, chance = story.chain, story.chance
    ranks = chance.choice([1, 2])
    server = Server(chain, chain.bits[0], ranks, stage_bytes=chance.choice([10**9, 10**9, 200_000]))
    start = chance.randrange(story.head + 1)
    server.receiver.advance(start)
    server.serves(start)
    many = server.receiver.settings.stage_bytes < 10**9
    story.lose()
    commits = server.commits
    labels = len(server.port.log)
    with suppress(DeltaSyncError):
        server.receiver.advance()
    reached = server.receiver.served_version
    assert reached is not None
    assert reached == story.head or (start <= reached and not story.leads_there())
    server.serves(reached)
    assert many or server.commits - commits <= COMMITS
    # Never back, not even on the way.
    shown = [int(entry[6:]) for entry in server.port.log[labels:] if entry.startswith("label ")]
    assert shown == sorted(shown)
    assert all(version > start for version in shown)


@pytest.mark.parametrize("seed", SEEDS)
def test_cold_start_loads_what_can_be_made(tmp_path: Path, seed: int) -> None:
    """The head, or a version before it; bit for bit."""
    story = Story(tmp_path, seed)
    story.lose()
    run = open_run(story.chain.url)
    manifest, state = rebuild(run, newest(run), "/nowhere")
    assert manifest.version == story.head or not story.leads_there()
    for found, right in zip(state.bits, story.chain.bits[manifest.version], strict=True):
        assert np.array_equal(found, right)
