"""Codec ``tiled`` at a receiver: decoded against the weights held, by each rank as far as it holds them."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.chains import Chain, Server, tensors_of
from tests.support.held_calls import HeldCalls
from tests.support.hooks import HookedPort
from tests.support.samples import changes_between, random_bits
from vllm_delta_sync.client import open_run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.tiles import grid
from vllm_delta_sync.engine.model import route_map
from vllm_delta_sync.engine.model.route_compiler import trace_routes
from vllm_delta_sync.engine.model.route_map import LiveBaseReader
from vllm_delta_sync.engine.protocol import Commit, Outcome, Poll, Progress, Revert, Staged
from vllm_delta_sync.engine.staging.stage import PhaseTimer, open_steps
from vllm_delta_sync.errors import DeltaSyncError, EngineError, FingerprintError, FormatError, UnsupportedError
from vllm_delta_sync.format.fingerprint import fingerprint_tensor
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.run import objects as reading
from vllm_delta_sync.run.read_plan import Step
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes, Positions


def trained(bits: list[Bits], random: np.random.Generator) -> list[Bits]:
    """A copy in which small weights moved far more often than large ones, as in training: there are classes to code."""
    with_changes = []
    for old in bits:
        magnitude = old & ~old.dtype.type(1 << (8 * old.itemsize - 1))
        chosen = random.random(old.size) < np.where(magnitude < np.median(magnitude), 0.3, 0.01)
        new = old.copy()
        new[chosen] += random.integers(1, 4, int(chosen.sum())).astype(old.dtype)
        with_changes.append(new)
    return with_changes


class Trained(Chain):
    def learn(self, count: int = 1, base: int | None = None, **options: Any) -> None:
        """Commit deltas of codec tiled; the first one builds on version ``base``."""
        for _ in range(count):
            old = self.bits[-1 if base is None else base]
            self.delta(trained(old, self.random), "tiled", base=base, **options)
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


def test_versions_of_all_codecs_and_ranges_are_one_commit(chain: Trained) -> None:
    """Each is decoded against what those before it make of the weights, tensors in full included."""
    chain.learn(4)
    chain.merge(0, 4)
    chain.lose(1, 2, 3)
    chain.grow(1)
    chain.learn(2, full=[0, 3])
    chain.grow(1, codec="raw")
    chain.learn(2)
    Server(chain, chain.bits[0]).reaches(10, commits=1)


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
        changes, chain.table, "tiled", "zstd", DeltaContext(chain.run, version, version - 1),
        lambda tensor: BaseTensor(old[tensor]),
    )  # fmt: skip
    fields = {"requires": ["tiled", "zstd"], "base_version": version - 1, "codec": "tiled", "compression": "zstd"}
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
    server = Server(chain, chain.bits[0], port=HookedPort)
    server.receiver.advance(1)
    (rank,) = server.port.ranks
    staging = {}

    def note(method: str, arguments: dict[str, Any]) -> None:
        if method == "start" and arguments["operation"] == "stage":
            staging.update(arguments)
            raise EngineError("given up")

    server.port.before = note
    with pytest.raises(EngineError):
        server.receiver.advance(2)
    reads = HeldCalls(monkeypatch, reading, "read_object")
    rank.answer(staging["request"])
    assert reads.reached.wait(60)
    rank.revert(Revert(0))
    reads.open.set()
    while rank.answer(Poll()) == Progress(True):
        pass
    staged = rank.answer(Outcome("stage"))
    assert isinstance(staged, Staged)
    assert staged.version == 2
    with pytest.raises(DeltaSyncError, match="stage it first"):
        rank.commit(Commit(2))
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


class SlicedChain(Trained):
    """A run of SLICED that begins at a checkpoint, and is served by two ranks, the first of which has so many rows."""

    of = SLICED
    rows = 32

    def fresh(self) -> list[Bits]:
        return random_bits(SLICED, np.random.default_rng(3))

    def models(self, bits: list[Bits], ranks: int) -> list[Any]:
        models = [Sliced(rank, self.rows) for rank in range(2)]
        for model in models:
            model.load_weights(tensors_of(bits, SLICED))
        return models


@pytest.fixture
def sliced(tmp_path: Path) -> SlicedChain:
    return SlicedChain(tmp_path, base=True)


@pytest.fixture
def odd(sliced: SlicedChain) -> SlicedChain:
    """Cut where no writer cuts 64 rows."""
    sliced.rows = 21
    return sliced


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors are cut that are left whole otherwise, since such small ones are not served by several ranks."""
    monkeypatch.setattr(grid, "LEAST_ELEMENTS", 512)
    grid.grid_of.cache_clear()
    yield
    grid.grid_of.cache_clear()


@pytest.mark.usefixtures("small_cuts")
def test_two_ranks_decode_what_they_hold_and_together_all(sliced: SlicedChain) -> None:
    sliced.learn()
    expected = changes_between(SLICED, sliced.bits[0], sliced.bits[1])
    steps = [Step(open_run(sliced.url), sliced.manifests[1])]
    declared = [fingerprint_tensor(spec.name, sliced.bits[0][tensor]) for tensor, spec in enumerate(SLICED)]
    parts = []
    for model in sliced.models(sliced.bits[0], 2):
        routes = trace_routes(model, SLICED)
        [[reader]] = open_steps(steps, declared, PhaseTimer(), LiveBaseReader(routes, lambda: 0))
        parts.append(reader.rest())
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
def test_two_ranks_follow_by_their_own_tiles(
    sliced: SlicedChain, versions: int, caplog: pytest.LogCaptureFixture
) -> None:
    sliced.learn(versions)
    server = Server(sliced, sliced.bits[0], 2)
    with caplog.at_level(logging.INFO, "vllm.delta_sync"):
        server.reaches(versions, commits=1)
    assert "rebuilt" not in caplog.text
    server.receiver.rollback(0)
    server.serves(0)


@pytest.mark.usefixtures("small_cuts")
@pytest.mark.parametrize("rows", [32, 21])
def test_a_start_says_whether_a_share_ends_inside_a_tile(
    sliced: SlicedChain, rows: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_map, "SMALL_ELEMENTS", 1)
    sliced.rows = rows
    with caplog.at_level(logging.WARNING, "vllm.delta_sync"):
        sliced.grow()
        Server(sliced, sliced.bits[0], 2).reaches(1, commits=1)
    said = [record.getMessage() for record in caplog.records if "ends inside a tile" in record.getMessage()]
    assert len(said) == (0 if rows == 32 else 2)
    assert all("of 1 tensors (the first is 'rows.weight')" in line and "codec='plain'" in line for line in said)


def test_tiles_held_in_part_make_the_version_be_rebuilt(odd: SlicedChain, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(odd, odd.bits[0], 2)
    with caplog.at_level(logging.WARNING, "vllm.delta_sync"):
        odd.grow()
        odd.learn(3)
        server.reaches(4, commits=1)
        odd.learn()
        server.reaches(5, commits=1)
        odd.grow()
        server.reaches(6, commits=1)
    assert caplog.text.count("rebuilt from the bucket") == 1
    assert "has only a part of tile" in caplog.text
    for version in (5, 4, 0):
        server.receiver.rollback(version)
        server.serves(version)


def test_what_can_neither_be_decoded_nor_rebuilt_is_said_and_served_stays(odd: SlicedChain) -> None:
    server = Server(odd, odd.bits[0], 2)
    odd.grow()
    server.reaches(1, commits=1)
    odd.learn()
    (odd.root / "base").rename(odd.root / "gone")
    for _ in range(2):
        fails(server, UnsupportedError, r"has only a part of tile.*codec='plain'")
        server.serves(1)
    odd.beside_it(2)
    server.reaches(2, commits=1)


# What a rank's model holds of each checkpoint tensor, copied out in checkpoint order


class Parts(nn.Module):
    """The second of two ranks: rows, columns, columns transposed; two matrices in one parameter; every second row.

    Of ``wrapped`` it has the end of each row, and the beginning of the next.
    """

    def __init__(self) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)

        self.rows, self.columns, self.transposed = parameter(40, 256), parameter(64, 128), parameter(128, 64)
        self.fused, self.narrow, self.wrapped = parameter(112, 256), parameter(9, 5), parameter(63, 128)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "rows":
                    self.rows.data.copy_(tensor[24:])
                case "columns":
                    self.columns.data.copy_(tensor[:, 128:])
                case "transposed":
                    self.transposed.data.copy_(tensor[:, 128:].t())
                case "gate":
                    self.fused.data[:64].copy_(tensor)
                case "up":
                    self.fused.data[64:].copy_(tensor[16:])
                case "scattered":
                    self.narrow.data.copy_(tensor[::2])
                case "wrapped":
                    self.wrapped.data.copy_(tensor.flatten()[192:].unfold(0, 128, 256))


PARTS = TensorTable(
    TensorSpec(name, "BF16", (17, 5) if name == "scattered" else (64, 256))
    for name in ("rows", "columns", "transposed", "gate", "up", "scattered", "wrapped")
)


def test_what_is_read_in_place_is_what_would_be_copied() -> None:
    model, bits = Parts(), random_bits(PARTS, np.random.default_rng(2))
    model.load_weights(tensors_of(bits, PARTS))
    ask, in_place = LiveBaseReader(trace_routes(model, PARTS), lambda: 0), []
    assert ask(PARTS.index("wrapped")).rectangles == ((0, 63, 192, 256), (1, 64, 0, 64))
    for tensor, spec in enumerate(PARTS):
        found = ask(tensor)
        assert found.rectangles is None or found.rectangles
        if found.in_place is None:
            continue
        in_place.append(spec.name)
        expected = bits[tensor].reshape(spec.shape)
        matrix = found.in_place.matrix
        with found.in_place.reading():
            for top, bottom, left, right in found.rectangles or ((0, *spec.shape[:1], 0, spec.shape[1]),):
                where = np.add.outer(matrix.origin + matrix.stride * np.arange(top, bottom), np.arange(left, right))
                assert np.array_equal(matrix.flat[where], expected[top:bottom, left:right]), spec.name
                copied = found.bits.reshape(spec.shape)[top:bottom, left:right]
                assert np.array_equal(copied, expected[top:bottom, left:right]), spec.name
    assert in_place == ["columns", "gate", "rows", "up"]


def test_weights_that_move_while_they_are_read_in_place_hide_what_that_caused() -> None:
    model = Parts()
    moves = 0
    in_place = LiveBaseReader(trace_routes(model, PARTS), lambda: moves)(0).in_place
    assert in_place is not None

    def decode_damaged() -> None:
        nonlocal moves
        with in_place.reading():
            moves = 1
            raise FormatError("a stream that does not fit these bits")

    for _ in range(2):
        with pytest.raises(EngineError, match="staged again"):
            decode_damaged()
