"""Codec ``context`` at a receiver: decoded against the weights held, by each rank as far as it holds them."""

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.chains import Chain, Server
from tests.support.modules import ModulePort
from tests.support.samples import RunWriter, changes_between, random_bits
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.chain.plan import Step
from vllm_delta_sync.config import Settings
from vllm_delta_sync.engine import reading
from vllm_delta_sync.engine.compiling import trace_routes
from vllm_delta_sync.engine.old import HeldBits
from vllm_delta_sync.engine.reading import Clock, read_steps
from vllm_delta_sync.engine.receiver import Receiver
from vllm_delta_sync.errors import DeltaSyncError, DigestError, FingerprintError, FormatError, UnsupportedError
from vllm_delta_sync.torch_bits import tensor_from_bits
from vllm_delta_sync.wire import tiles
from vllm_delta_sync.wire.bits import Bits, Positions
from vllm_delta_sync.wire.changes import Changes
from vllm_delta_sync.wire.delta import Codec, DeltaContext, encode
from vllm_delta_sync.wire.fingerprint import fingerprint_tensor
from vllm_delta_sync.wire.old import OldTensor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable


def trained(bits: list[Bits], random: np.random.Generator) -> list[Bits]:
    """A copy in which small weights moved far more often than large ones, as in training: there are classes to code."""
    moved = []
    for old in bits:
        magnitude = old & ~old.dtype.type(1 << (8 * old.itemsize - 1))
        chosen = random.random(old.size) < np.where(magnitude < np.median(magnitude), 0.3, 0.01)
        new = old.copy()
        new[chosen] += random.integers(1, 4, int(chosen.sum())).astype(old.dtype)
        moved.append(new)
    return moved


class Trained(Chain):
    def learn(self, count: int = 1, base: int | None = None, **options: Any) -> None:
        """Commit deltas of codec context; the first one builds on version ``base``."""
        for _ in range(count):
            old = self.bits[-1 if base is None else base]
            self.delta(trained(old, self.random), "context", base=base, **options)
            base = None


@pytest.fixture
def chain(tmp_path: Path) -> Trained:
    return Trained(tmp_path)


def test_follows_every_version_and_goes_back(chain: Trained) -> None:
    chain.learn(4)
    server = Server(chain, chain.bits[0])
    for version in range(1, 5):
        server.receiver.advance(version)
        server.serves(version)
    recent = server.receiver.status()["recent"]
    assert [each["versions"] for each in recent] == [1, 1, 1, 1]
    assert all(each["timings_ms"]["decode"] > 0 for each in recent)
    for version in (3, 1, 0):
        server.receiver.rollback(version)
        server.serves(version)
    server.receiver.release()
    server.reaches(4, commits=1)


def test_versions_of_all_codecs_are_one_commit(chain: Trained) -> None:
    """Each is decoded against what those before it make of the weights, tensors in full included."""
    chain.learn(1)
    chain.grow(1)
    chain.learn(2, full=[0, 3])
    chain.grow(1, codec="raw")
    chain.learn(2)
    Server(chain, chain.bits[0]).reaches(7, commits=1)


def test_ranges_and_context_are_one_way(chain: Trained) -> None:
    chain.learn(8)
    chain.fold(0, 4)
    chain.lose(1, 2, 3)
    Server(chain, chain.bits[0]).reaches(8, commits=1)


def test_break_is_followed_from_behind_it(chain: Trained) -> None:
    """Back over a version of another codec, and forward against what is there then."""
    chain.learn(1)
    chain.grow(1)
    chain.learn(2, base=1)
    server = Server(chain, chain.bits[0])
    server.receiver.advance(2)
    server.reaches(4, commits=1)


def test_version_that_cannot_be_taken_back_is_gone_around(tmp_path: Path) -> None:
    chain = Trained(tmp_path, base=True)
    chain.learn(2)
    server = Server(chain, chain.bits[0])
    server.reaches(2, commits=1)
    chain.learn(2, base=1)
    server.reaches(4, commits=2)


# Errors


def forge(chain: Trained, old: list[Bits]) -> None:
    """A version that is right in all that it declares, and coded against other weights."""
    new = trained(chain.bits[-1], chain.random)
    changes = changes_between(chain.table, chain.bits[-1], new)
    version = len(chain.manifests)
    data = encode(
        changes, chain.table, "context", "zstd", DeltaContext(chain.run, version, version - 1),
        lambda tensor: OldTensor(old[tensor]),
    )  # fmt: skip
    fields = {"requires": ["context", "zstd"], "base_version": version - 1, "codec": "context", "compression": "zstd"}
    chain._commit(new, [data], "delta", changes.changed, **fields)


def fails(server: Server, kind: type[DeltaSyncError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        server.receiver.advance()
    assert server.receiver.status()["last_error"] == {"kind": kind.kind, "message": caught.value.message}


def test_stream_made_against_other_weights_is_refused_and_gone_around(chain: Trained) -> None:
    chain.learn(1)
    server = Server(chain, chain.bits[0])
    server.reaches(1, commits=1)
    # Large for small: the classes are there, with other members.
    forge(chain, [old ^ old.dtype.type(0x7FFF) for old in chain.bits[1]])
    fails(server, FormatError, "version 2.*made against other weights")
    server.serves(1)
    assert server.commits == 1
    chain.beside_it(2)
    server.reaches(2, commits=1)
    assert server.receiver.status()["last_error"] is None


def test_damaged_object_is_refused_and_read_again(chain: Trained) -> None:
    chain.learn(2)
    server = Server(chain, chain.bits[0])
    server.receiver.advance(1)
    chain.damage(chain.manifests[2])
    fails(server, DigestError, "SHA-256")
    server.serves(1)
    chain.damage(chain.manifests[2])
    server.reaches(2, commits=1)


def test_weights_changed_from_outside_are_told_from_a_bad_stream(chain: Trained) -> None:
    """Found while staging: what does not decode makes all weights be looked at."""
    chain.learn(2)
    server = Server(chain, chain.bits[0], rescan_bytes=0)
    server.receiver.advance(1)
    server.models[0].qkv.data.mul_(2.0**30)
    fails(server, FingerprintError, "weights held were changed from outside")
    assert server.commits == 1
    assert server.receiver.status()["served"] is None
    server.reaches(2, commits=2)


def test_what_was_staged_before_the_weights_moved_is_not_committed(
    chain: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that was given up may come to its end after somebody has gone back."""
    chain.grow(2)
    server = Server(chain, chain.bits[0])
    server.receiver.advance(1)
    (rank,) = server.port.ranks
    asked, go_on = threading.Event(), threading.Event()
    leg = server.receiver.ways.next(server.receiver._served_place(), 2, 2**30)

    def slow(run: Any) -> Any:
        asked.set()
        assert go_on.wait(60)
        return original(run)

    original = reading.reader
    monkeypatch.setattr(reading, "reader", slow)
    rank.start("stage", {"leg": leg.to_plain(), "held": 1, "rescan": []})
    assert asked.wait(60)
    rank.revert(0)
    go_on.set()
    while rank.poll()["running"]:
        pass
    assert rank.outcome()["staged"] == 2
    with pytest.raises(DeltaSyncError, match="stage it first"):
        rank.commit(2)
    server.holds(chain.bits[0])


# Several ranks

SLICED = TensorTable(
    [
        TensorSpec("columns.weight", "BF16", (64, 256)),
        TensorSpec("experts.weight", "BF16", (4, 64, 128)),
        TensorSpec("norm.weight", "F32", (256,)),
        TensorSpec("rows.weight", "BF16", (64, 256)),
    ]
)
ODD = 21
"""Where no writer cuts 64 rows."""


class Sliced(nn.Module):
    """One of two ranks: rows, the first of which has so many, transposed columns, experts, and a copy of a norm."""

    def __init__(self, rank: int, rows: int) -> None:
        super().__init__()
        self.rank = rank

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)

        self.mine = slice(0, rows) if rank == 0 else slice(rows, 64)
        self.columns, self.rows = parameter(128, 64), parameter(self.mine.stop - self.mine.start, 256)
        self.experts, self.norm = parameter(2, 64, 128), parameter(256, dtype=torch.float32)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "columns.weight":
                self.columns.data.copy_(tensor[:, 128 * self.rank : 128 * self.rank + 128].t())
            elif name == "rows.weight":
                self.rows.data.copy_(tensor[self.mine])
            elif name == "experts.weight":
                self.experts.data.copy_(tensor[2 * self.rank : 2 * self.rank + 2])
            else:
                self.norm.data.copy_(tensor)


class Pair(RunWriter):
    """A run of SLICED that begins at a checkpoint, and a receiver on two ranks that hold it."""

    def __init__(self, root: Path, rows: int = 32) -> None:
        from safetensors.torch import save_file

        self.url, self.root, self.rows = str(root / "run"), root, rows
        self.random = np.random.default_rng(3)
        super().__init__(open_bucket(self.url), SLICED)
        bits = random_bits(SLICED, self.random)
        (root / "base").mkdir()
        save_file(dict(tensors_of(bits)), root / "base/model.safetensors")
        self.reference(bits, str(root / "base"))
        self.models = self.fresh(0)
        self.port = ModulePort(*self.models)
        self.receiver = Receiver(self.port, Settings(bucket=self.url))

    def learn(self, count: int = 1, codec: Codec = "context") -> None:
        for _ in range(count):
            self.delta(trained(self.bits[-1], self.random), codec)

    def fresh(self, version: int) -> list[Sliced]:
        models = [Sliced(rank, self.rows) for rank in range(2)]
        for model in models:
            model.load_weights(tensors_of(self.bits[version]))
        return models

    def reaches(self, version: int) -> None:
        """In one commit, bit for bit."""
        before = self.port.log.count("pause")
        self.receiver.advance()
        assert self.port.log.count("pause") == before + 1
        self.serves(version)
        assert self.receiver.status()["last_error"] is None

    def serves(self, version: int) -> None:
        assert self.receiver.served_version == version
        for model, other in zip(self.models, self.fresh(version), strict=True):
            for (name, mine), right in zip(model.named_parameters(), other.parameters(), strict=True):
                width = torch.int16 if mine.dtype == torch.bfloat16 else torch.int32
                assert torch.equal(mine.view(width), right.view(width)), name
        assert self.receiver.verify()["verdict"]


def tensors_of(bits: list[Bits]) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, tensor_from_bits(bits[tensor].copy(), spec)) for tensor, spec in enumerate(SLICED)]


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer cuts tensors in two that it would leave whole, since nobody serves such small ones by two ranks."""
    monkeypatch.setitem(tiles.CUT_ELEMENTS, 2, 0)


@pytest.mark.usefixtures("small_cuts")
def test_two_ranks_decode_what_they_hold_and_together_all(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.learn()
    expected = changes_between(SLICED, pair.bits[0], pair.bits[1])
    steps = [Step(open_run(pair.url), pair.manifests[1])]
    declared = [fingerprint_tensor(spec.name, pair.bits[0][tensor]) for tensor, spec in enumerate(SLICED)]
    parts = []
    for model in pair.models:
        routes = trace_routes(model, SLICED)
        parts.append(read_steps(steps, declared, routes, Clock(), HeldBits(routes, lambda: 0)))
    for tensor, spec in enumerate(SLICED):
        every, *mine = (positions_of(changes, tensor) for changes in (expected, *parts))
        if spec.name == "norm.weight":
            assert all(np.array_equal(each, every) for each in mine)
        else:
            assert all(0 < each.size < every.size for each in mine)
            assert np.array_equal(np.sort(np.concatenate(mine)), every)


def positions_of(changes: Changes, tensor: int) -> Positions:
    found = [positions for group in changes.sparse for number, positions, _ in group.tensors() if number == tensor]
    return np.concatenate(found)


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("versions", [1, 3])
def test_two_ranks_follow_by_their_own_tiles(tmp_path: Path, versions: int, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(tmp_path)
    pair.learn(versions)
    with caplog.at_level(logging.INFO, "vllm.delta_sync"):
        pair.reaches(versions)
    assert "rebuilt" not in caplog.text
    pair.receiver.rollback(0)
    pair.serves(0)


def test_tiles_held_in_part_make_the_version_be_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(tmp_path, ODD)
    with caplog.at_level(logging.WARNING, "vllm.delta_sync"):
        pair.learn(1, "packed")
        pair.learn(3)
        pair.reaches(4)
        pair.learn()
        pair.reaches(5)
        pair.learn(1, "packed")
        pair.reaches(6)
    assert caplog.text.count("rebuilt from the bucket") == 1
    assert "holds some in part only" in caplog.text
    for version in (5, 4, 0):
        pair.receiver.rollback(version)
        pair.serves(version)


def test_what_can_neither_be_decoded_nor_rebuilt_is_said_and_served_stays(tmp_path: Path) -> None:
    pair = Pair(tmp_path, ODD)
    pair.learn(1, "packed")
    pair.reaches(1)
    pair.learn()
    (tmp_path / "base").rename(tmp_path / "gone")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"holds some in part only.*codec='packed'"):
            pair.receiver.advance()
        assert pair.receiver.status()["last_error"]["kind"] == "unsupported"
        pair.serves(1)
    pair.beside(2, tmp_path)
    pair.reaches(2)
