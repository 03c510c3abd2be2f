"""Write the golden run again: ``python -m tests.golden.regenerate``. Do it only when the format changes on purpose.

``run`` has one tensor of each width and kind, and one version of each kind of object. Everything is a function of
constants, except the bytes of zstd frames, which may differ between releases of that library. ``tree`` has what lies
beside a chain: a merged delta, an anchor, a tag, a claim, a heartbeat, what is gone; and a version that builds on an
older one. ``signed`` is signed, by two keys: a publisher with the second one has taken over. ``tiles`` is in codec
tiled, with tiles of each kind.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support.samples import CREATED, RunWriter, changes_between
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.codec.delta_object import DeltaContext, required_features
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.tiles import coder
from vllm_delta_sync.codec.tiles.grid import TensorView, covered_rectangles
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format.base_document import Document
from vllm_delta_sync.format.documents import Claim, Heartbeat, Retention, Tag
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor, Bits
from vllm_delta_sync.trust import Keyring

DIRECTORY = Path(__file__).parent / "run"
TREE = Path(__file__).parent / "tree"
SIGNED = Path(__file__).parent / "signed"
TILES = Path(__file__).parent / "tiles"
RUN = "901de20000000000000000000000c0de"
KINDS = ("anchor", "plain zstd", "plain none", "raw", "empty", "full")
"""What version 0, 1, 2, … of the golden run are."""


def table() -> TensorTable:
    """Six tensors, 4,870 elements."""
    return TensorTable(
        [
            TensorSpec("model.embed.weight", "BF16", (64, 48)),
            TensorSpec("model.layers.0.expert.weight", "F8_E4M3", (32, 32)),
            TensorSpec("model.layers.0.norm.weight", "F32", (48,)),
            TensorSpec("model.layers.0.proj.weight", "F16", (15, 48)),
            TensorSpec("model.position", "I64", (5,)),
            TensorSpec("model.scale", "F32", ()),
        ]
    )


def versions() -> list[list[Bits]]:
    """Per version, per tensor id: flat bits."""
    # The raw stream of a bit generator is fixed for good; numpy's distributions over it may change.
    source = np.random.PCG64(20260102)
    result = [[source.random_raw(spec.numel).astype(spec.element.uint) for spec in table()]]
    for _ in range(3):
        result.append([_nudged(bits, source) for bits in result[-1]])
    # Signed zeros, infinities and NaNs with payloads take part; a far gap has raw bits.
    result[1][0][:6] = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF]
    result[2][0][:6] = [0x8000, 0x0000, 0xFF80, 0x7FC1, 0xFFFF, 0x7F80]
    for version in (1, 2, 3):
        result[version][0][1000:1600] = result[0][0][1000:1600]
    early = [bits.copy() for bits in result[-1]]
    early[0][:] = source.random_raw(early[0].size).astype(np.uint16)
    early[1] -= np.uint8(2)
    early[2][:40] += np.uint32(70_000)
    early[3][700] ^= np.uint16(0x8000)
    early[5] += np.uint32(1)
    return [*result, [bits.copy() for bits in result[-1]], early]


def _nudged(bits: Bits, source: np.random.PCG64) -> Bits:
    chosen = source.random_raw(bits.size) % np.uint64(80) == 0
    steps = (source.random_raw(bits.size) % np.uint64(3)).astype(bits.dtype) + bits.dtype.type(1)
    return np.where(chosen, bits + steps, bits)


def write(directory: Path) -> RunWriter:
    """Write the run into an empty or missing directory."""
    writer = RunWriter(open_bucket(str(directory)), table(), RUN)
    bits = versions()
    writer.anchor(bits[0])
    writer.delta(bits[1], "plain", "zstd")
    writer.delta(bits[2], "plain", "none")
    writer.delta(bits[3], "raw", "none")
    writer.delta(bits[4], "plain", "zstd")
    writer.delta(bits[5], "plain", "zstd", full=[0, 5])
    return writer


def write_tree(directory: Path) -> RunWriter:
    """Write the run with everything that lies beside a chain: of 8 versions 6 builds on 2, the object of 3 is gone."""
    writer = RunWriter(open_bucket(str(directory)), table(), RUN)
    bits = versions()
    writer.anchor(bits[0])
    with tempfile.TemporaryDirectory() as scratch:
        for version in (1, 2, 3, 4, 5):
            writer.delta(bits[version])
        writer.epoch = 1
        writer.delta(bits[3], base=2)
        writer.delta(bits[1])
        writer.merge(0, 4)
        writer.beside(5, Path(scratch))
    named = {"run": RUN, "version": 5, "manifest": writer.manifests[5].digest, "created_at": CREATED}
    heartbeat = {"run": RUN, "receiver": "rollout-1", "served": 5, "target": 7, "pins": [4], "seconds": 60}
    reported = {
        "step": 5,
        "head": 7,
        "lag": 2,
        "state": "staging",
        "following": "head",
        "started_at": CREATED,
        "error": {"kind": "store", "message": "no answer"},
        "pause_ms": 12.5,
    }
    documents: dict[str, Document] = {
        side.tag_key("best"): Tag.model_validate({**named, "name": "best", "milestone": True}),
        side.claim_key(1): Claim.model_validate({**named, "epoch": 1, "writer": RUN}),
        side.heartbeat_key("rollout-1"): Heartbeat.model_validate({**heartbeat, **reported, "created_at": CREATED}),
        side.RETENTION_KEY: Retention.model_validate({"run": RUN, "gone": [[3, 3]], "created_at": CREATED}),
    }
    for key, document in documents.items():
        writer.bucket.put(key, document.to_bytes())
    writer.bucket.delete(writer.manifests[3].objects[0].key)
    return writer


def key_pair(number: int) -> Ed25519PrivateKey:
    """A key that is no secret."""
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


def write_signed(directory: Path) -> RunWriter:
    """Write a signed run: key 1 signs versions 0 and 1, key 2 signs version 2 and what lies beside the history."""
    first, second = (Keyring([], key_pair(number)) for number in (1, 2))
    writer = RunWriter(open_bucket(str(directory)), table(), RUN, first)
    bits = versions()
    writer.anchor(bits[0])
    with tempfile.TemporaryDirectory() as scratch:
        writer.delta(bits[1])
        writer.keyring = second
        writer.delta(bits[2])
        writer.merge(0, 2)
        writer.beside(2, Path(scratch), 1)
    tag = Tag(run=RUN, name="best", version=2, manifest=writer.manifests[2].digest, created_at=CREATED)
    writer.bucket.put(side.tag_key("best"), second.signed(tag).to_bytes())
    return writer


def tiles_table() -> TensorTable:
    """A vocabulary of two tiles, experts of one each, one row of 16, one tile, three by three, and no floats."""
    return TensorTable(
        [
            TensorSpec("model.embed.weight", "F8_E5M2", (640, 64)),
            TensorSpec("model.layers.0.experts.weight", "F8_E4M3", (2, 128, 128)),
            TensorSpec("model.layers.0.gate.weight", "F32", (4, 20, 32)),
            TensorSpec("model.layers.0.proj.weight", "F16", (45, 96)),
            TensorSpec("model.layers.0.up.weight", "BF16", (384, 384)),
            TensorSpec("model.position", "I64", (5,)),
        ]
    )


def tiles_versions() -> list[list[Bits]]:
    """Per version, per tensor id: flat bits. The larger an exponent, the less often and the less far bits move."""
    source = np.random.PCG64(20261122)
    first = []
    for spec in tiles_table():
        bits = 8 * spec.element.itemsize
        drawn = source.random_raw(spec.numel)
        # How many zeros a word ends with falls off by halves, as exponents of weights do, about.
        small = np.minimum(np.bitwise_count((drawn & -drawn) - np.uint64(1)), np.uint8(9)).astype(np.uint64)
        exponent = np.uint64(20) - small
        high = (drawn >> np.uint64(63) << np.uint64(bits - 1)) | exponent << np.uint64(bits - 7)
        low = drawn >> np.uint64(64 - bits) & np.uint64((1 << (bits - 7)) - 1)
        first.append((high | low).astype(spec.element.uint))
    result = [first]
    for _ in range(3):
        step = []
        for bits in result[-1]:
            drawn = source.random_raw(bits.size)
            top = (bits >> bits.dtype.type(8 * bits.itemsize - 7)).astype(np.uint64) & np.uint64(31)
            chosen = drawn & ((np.uint64(1) << (np.maximum(top, np.uint64(13)) - np.uint64(13))) - np.uint64(1)) == 0
            by = np.where(drawn >> np.uint64(62), np.uint64(1), (drawn >> np.uint64(60)) + np.uint64(1)).astype(
                bits.dtype
            )
            moved = np.where(drawn >> np.uint64(59) & np.uint64(1), bits + by, bits - by)
            step.append(np.where(chosen, moved, bits).astype(bits.dtype))
        result.append(step)
    # Signed zeros, infinities, NaNs with payloads.
    result[1][4][:6] = [0x8000, 0x0000, 0xFF80, 0x7FC1, 0xFFFF, 0x7F80]
    result[2][4][:6] = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF]
    for version in (1, 2, 3):
        result[version][5] = result[version - 1][5] + np.array([1, 2**40, 0, 2**63, version], np.uint64)
    # Tiles that do not change.
    for version in (1, 2, 3):
        result[version][0][: 320 * 64] = result[0][0][: 320 * 64]
        result[version][2][:30] = result[0][2][:30]
    return result


def write_tiles(directory: Path) -> RunWriter:
    """Write a run of three deltas in codec tiled: with zstd and without, and by two ranks that cut tiles."""
    writer, table = RunWriter(open_bucket(str(directory)), tiles_table(), RUN), tiles_table()
    bits = tiles_versions()
    writer.anchor(bits[0])
    # Of these tensors only the last one is small.
    with patch.object(coder, "SMALL_ELEMENTS", 1000):
        writer.delta(bits[1], "tiled", "zstd")
        writer.delta(bits[2], "tiled", "none")
        objects, changed = [], 0
        for rank in range(2):
            data, count = _of_rank(rank, table, bits[2], bits[3])
            objects.append(data)
            changed += count
    how = {"codec": "tiled", "compression": "none", "requires": required_features("tiled", "none"), "reversible": False}
    writer._commit(bits[3], objects, "delta", changed, base_version=2, **how)
    return writer


def _of_rank(rank: int, table: TensorTable, old: list[Bits], new: list[Bits]) -> tuple[bytes, int]:
    """The object of a rank that holds the first 60 % of each tensor's elements, or the others; and what it carries."""
    bases, own = [], []
    for spec, before, after in zip(table, old, new, strict=True):
        cut = spec.numel * 3 // 5
        part = slice(cut) if rank == 0 else slice(cut, None)
        held, mine = np.zeros_like(before), before.copy()
        held[part], mine[part] = before[part], after[part]
        view = TensorView(0 if rank == 0 else cut, (held[part].size,), (1,))
        bases.append(BaseTensor(held, covered_rectangles(spec, [view])))
        own.append(mine)
    changes = changes_between(table, old, own)
    context = DeltaContext(RUN, 3, 2)
    return encode(changes, table, "tiled", "none", context, bases.__getitem__), changes.changed


def main() -> int:
    runs = ((DIRECTORY, write), (TREE, write_tree), (SIGNED, write_signed), (TILES, write_tiles))
    for directory, make in runs:
        shutil.rmtree(directory, ignore_errors=True)
        count = len(make(directory).manifests)
        shutil.rmtree(directory / "~staging", ignore_errors=True)
        size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        print(f"{directory.name}: {count} versions, {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
