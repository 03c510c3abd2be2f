"""A signed run that a receiver with trusted keys follows, and somebody who can write to its bucket."""

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.chains import Chain, Server, models_of
from tests.support.world import expect_equal
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import generate


def keyring_at(path: Path) -> Keyring:
    """A new key pair's."""
    generate(path)
    return Keyring.load(None, path)


class Trusted:
    """Versions 0 … 3 of a run, signed and served; what a stranger makes of it lies in copies of its folder.

    Attributes:
        trainer, stranger: keyrings that sign with a key of their own. chain: the true run. server: the receiver.
    """

    def __init__(self, root: Path, ranks: int = 1, **settings: Any) -> None:
        self.root, self.ranks = root, ranks
        self.trainer, self.stranger = keyring_at(root / "trainer.key"), keyring_at(root / "stranger.key")
        self.settings = {"trusted_keys": str(root / "trainer.key.pub"), "state_dir": root / "state", **settings}
        self.chain = Chain(root, keyring=self.trainer)
        self.chain.grow(3)
        self.start()

    def start(self) -> None:
        """Start the server anew, from the base."""
        self.server = Server(self.chain, self.chain.bits[0], self.ranks, **self.settings)

    @property
    def receiver(self) -> Any:
        return self.server.receiver

    @property
    def folder(self) -> Path:
        return self.chain.folder

    def serves(self, version: int) -> None:
        """Following ends there, and nothing is wrong."""
        self.receiver.advance()
        self.server.serves(version)
        assert self.receiver.status()["last_error"] is None

    def copied(self, keyring: Keyring | None = None, until: int | None = None, seed: int = 99) -> Chain:
        """A copy of the run as it is now, or was at a version, in a folder of its own, where it continues otherwise."""
        other = copy.copy(self.chain)
        other.folder = self.root / f"copy-{len(list(self.root.glob('copy-*')))}"
        shutil.copytree(self.folder, other.folder)
        other.bucket, other.url = open_bucket(str(other.folder)), str(other.folder)
        other.random = np.random.default_rng(seed)
        other.manifests, other.bits, other.breaks = [*other.manifests], [*other.bits], [*other.breaks]
        while until is not None and len(other.manifests) > until + 1:
            (other.folder / keys.version_key(len(other.manifests) - 1)).unlink()
            other.manifests.pop()
            other.bits.pop()
            other.head(until)
        other.keyring = self.trainer if keyring is None else keyring
        return other

    def tag(self, name: str, version: int, keyring: Keyring, digest: str | None = None) -> None:
        """Let a tag name a version, the true one or another, signed with that keyring."""
        chain = copy.copy(self.chain)
        chain.keyring = keyring
        chain.tag(name, version, digest=digest)

    def put(self, folder: Path) -> None:
        """Make the bucket what lies in a folder."""
        shutil.rmtree(self.folder)
        shutil.copytree(folder, self.folder)

    def refused(self, *kinds: str) -> DeltaSyncError:
        """Following fails, status says why, and weights, version and fingerprint are what they were."""
        before, served = self.bits(), self.receiver.status()["served"]
        with pytest.raises(DeltaSyncError) as caught:
            self.receiver.advance()
        assert caught.value.kind in kinds, caught.value
        status = self.receiver.status()
        assert status["last_error"] == {"kind": caught.value.kind, "message": caught.value.message}
        if served is not None:
            assert status["served"] == served
            self.server.holds(before)
            assert self.receiver.verify()["verdict"]
        elif status["served"] is None:
            self.server.holds(before)
        else:
            # A server that has just started comes as far as the run is good.
            self.server.holds(self.chain.bits[status["served"]["version"]])
        return caught.value

    def bits(self) -> Any:
        """What is served; the base before."""
        served = self.receiver.served_version
        held = self.chain.bits[0 if served is None else served]
        for model, right in zip(self.server.models, models_of(held, self.ranks), strict=True):
            expect_equal(model, right)
        return held
