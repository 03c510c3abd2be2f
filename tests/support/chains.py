"""Runs of any shape for the receiver: breaks, merged deltas, anchors, branches, objects that are gone."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from tests.support.modules import SHAPES, ModulePort, ShardedModel
from tests.support.samples import RunWriter, flip, nudge
from tests.support.world import expect_equal
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.manifest import Manifest, version_key
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.torch_views import tensor_from_bits
from vllm_delta_sync.trust import Keyring

TABLE = TensorTable(TensorSpec(name, "BF16", shape) for name, shape in SHAPES.items())


def tensors_of(bits: list[Bits], table: TensorTable = TABLE) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, tensor_from_bits(bits[tensor].copy(), spec)) for tensor, spec in enumerate(table)]


def models_of(bits: list[Bits], ranks: int = 1) -> list[ShardedModel]:
    """Models loaded with those weights by their own loaders."""
    models = [ShardedModel(rank, ranks) for rank in range(ranks)]
    for model in models:
        model.load_weights(tensors_of(bits))
    return models


class Chain(RunWriter):
    """A run in ``root/name`` whose version 0 is an anchor, or a reference to a checkpoint in ``root/base``."""

    of: ClassVar[TensorTable] = TABLE

    def __init__(
        self, root: Path, name: str = "run", seed: int = 0, base: bool = False, keyring: Keyring | None = None
    ) -> None:
        self.root, self.url, self.folder = root, str(root / name), root / name
        self.random = np.random.default_rng(seed)
        super().__init__(open_bucket(self.url), self.of, run=f"{seed + 10:032x}", keyring=keyring)
        if base:
            self.reference(self.fresh(), str(self.checkpoint(self.fresh())))
        elif name == "run":
            self.inside(self.fresh())

    def fresh(self) -> list[Bits]:
        generator = np.random.default_rng(0)
        floats = [0.02 * generator.standard_normal(spec.numel).astype(np.float32) for spec in self.table]
        return [(value.view(np.uint32) >> 16).astype(np.uint16) for value in floats]

    def checkpoint(self, bits: list[Bits]) -> Path:
        from safetensors.torch import save_file

        folder = self.root / "base"
        folder.mkdir(exist_ok=True)
        save_file(dict(tensors_of(bits, self.table)), folder / "model.safetensors")
        return folder

    def models(self, bits: list[Bits], ranks: int) -> list[Any]:
        """Models that a server of this run has, loaded with those weights by their own loaders."""
        return models_of(bits, ranks)

    def inside(self, bits: list[Bits]) -> Manifest:
        return self.anchor(bits)

    def grow(self, count: int = 1, base: int | None = None, share: float = 0.03, **options: Any) -> None:
        """Commit deltas; the first one builds on version ``base``."""
        for _ in range(count):
            self.delta(nudge(self.bits[-1 if base is None else base], self.random, share), base=base, **options)
            base = None

    def branch(self, name: str, version: int, seed: int) -> "Chain":
        branch = Chain(self.root, name, seed, keyring=self.keyring if self.keyring.has_signing_key else None)
        branch.branch_of(self, version, self.url)
        return branch

    def beside_it(self, version: int) -> Anchor:
        return self.beside(version, self.root)

    # What is lost

    def lose(self, *versions: int) -> None:
        """Remove versions' own objects."""
        for version in versions:
            self.remove(self.manifests[version])

    def remove(self, document: Manifest | MergedDelta | Anchor) -> None:
        for ref in document.objects:
            (self.folder / ref.key).unlink()

    def damage(self, document: Manifest | MergedDelta | Anchor) -> None:
        for ref in document.objects:
            flip(self.folder / ref.key)

    def spoil_manifest(self, version: int) -> None:
        (self.folder / version_key(version)).write_bytes(b"{}")


class Server:
    """A receiver on models that hold given weights."""

    def __init__(
        self, chain: Chain, bits: list[Bits], ranks: int = 1, port: type[ModulePort] = ModulePort, **settings: Any
    ) -> None:
        self.models = chain.models(bits, ranks)
        self.port: Any = port(*self.models)
        self.follow(chain, **settings)

    def follow(self, chain: Chain, **settings: Any) -> None:
        """Start over with another receiver on the same ranks."""
        self.chain = chain
        self.receiver = Receiver(self.port, Settings(bucket=chain.url, **settings))

    @property
    def commits(self) -> int:
        return self.port.log.count("pause")

    def reaches(self, version: int, commits: int) -> None:
        """Following ends at a version, bit for bit, in so many commits more at most."""
        before = self.commits
        self.receiver.advance()
        self.serves(version)
        assert self.commits - before <= commits

    def serves(self, version: int) -> None:
        status = self.receiver.status()
        assert status["served"]["version"] == version, status
        self.holds(self.chain.bits[version])
        assert self.receiver.verify()["verdict"]

    def holds(self, bits: list[Bits]) -> None:
        for model, right in zip(self.models, self.chain.models(bits, len(self.models)), strict=True):
            expect_equal(model, right)
