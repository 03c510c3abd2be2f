"""What is fuzzed: a small table, its old bits, objects changed at random, and everything that reads them."""

import json
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import zstandard

from tests.support.forge import arrays_of
from tests.support.samples import changes_between
from vllm_delta_sync.codec import delta_reader
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.tiles import coder
from vllm_delta_sync.codec.tiles.grid import extent
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.safetensors_file import Container, write_container
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor, Changes

TABLE = TensorTable(
    [
        TensorSpec("bias", "BF16", (96,)),
        TensorSpec("experts", "BF16", (2, 128, 128)),
        TensorSpec("eight", "F8_E4M3", (32, 48)),
        TensorSpec("master", "F32", (16, 40)),
        TensorSpec("norm", "F16", (64,)),
        TensorSpec("weight", "BF16", (384, 384)),
    ]
)
LARGE_ELEMENTS = 10_000
KEYS = np.array([58, 117, 118, 120], np.uint8)
"""Where the classes of tiles end; for each dtype, some elements are in a class and some in none."""
SECONDS = 20
"""An input that takes longer hangs."""
WARM_UP_SECONDS = 900
"""The first inputs wait for compilers."""


def _bits(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    found = []
    for spec in TABLE:
        wide = generator.normal(0, 0.02, spec.numel).astype(np.float32).view(np.uint32)
        found.append((wide >> np.uint32(32 - 8 * spec.element.itemsize)).astype(spec.element.uint))
    return found


OLD = _bits(0)


def old(tensor: int) -> BaseTensor:
    return BaseTensor(OLD[tensor])


def part(tensor: int) -> BaseTensor:
    """Whole tiles of matrices, the first half of single rows, and all of the norm."""
    spec = TABLE[tensor]
    if spec.name == "norm":
        return BaseTensor(OLD[tensor])
    rows, columns = extent(spec.shape)
    return BaseTensor(OLD[tensor], ((0, 128, 0, columns) if rows > 1 else (0, 1, 0, columns // 2),))


def context(changed: int | None = None) -> DeltaContext:
    return DeltaContext("5" * 32, 1, 0, changed)


def seeds() -> dict[str, bytes]:
    """Good objects by name: each codec, few and many changes, with a tensor in full."""
    found = {}
    for name, share in (("few", 0.02), ("some", 0.2), ("most", 0.9)):
        generator = np.random.default_rng(len(name))
        new = [bits.copy() for bits in OLD]
        for bits in new:
            chosen = generator.random(bits.size) < (share / 20 if bits.size > LARGE_ELEMENTS else share)
            bits[chosen] += generator.integers(1, 9, int(chosen.sum())).astype(bits.dtype)
        for codec in ("plain", "tiled", "raw"):
            for compression in ("none", "zstd") if codec != "raw" else ("none",):
                changes = changes_between(TABLE, OLD, new, "raw" if codec == "raw" else "plain", [4])
                # All tensors have classes, and the same ones wherever they are written.
                with (
                    patch.object(coder, "SMALL_ELEMENTS", 1),
                    patch.object(coder, "choose_thresholds", lambda *_: KEYS),
                ):
                    data = encode(changes, TABLE, codec, compression, context(), old)  # type: ignore[arg-type]
                found[f"{codec}-{compression}-{name}"] = data
    return found


def read_all(data: bytes, seconds: int = WARM_UP_SECONDS) -> set[str]:
    """Read ``data`` in every way there is → kinds and messages of the refusals, without their numbers."""
    ways: list[Callable[[], Iterable[Changes]]] = [
        lambda: [decode(data, TABLE, context(20_000), old)],
        lambda: [decode(data, TABLE, context(20_000), part)],
        lambda: [decode(data, TABLE, context(20_000))],
        lambda: delta_reader.pieces_of([delta_reader.DeltaReader(data, TABLE, context(20_000), old)]),
    ]
    refused = set()
    found: list[int | None] = []
    for way in ways:
        try:
            with _no_longer_than(seconds):
                pieces = list(way())
                for changes in pieces:
                    _check(changes)
        except DeltaSyncError as error:
            refused.add(f"{error.kind}: {''.join(c for c in str(error) if not c.isdigit())[:160]}")
            found.append(None)
        else:
            found.append(sum(changes.changed for changes in pieces))
    if found[0] != found[-1]:
        raise RuntimeError(f"read at once, {found[0]} elements change, and piece by piece {found[-1]}")
    return refused


def _check(changes: Changes) -> None:
    """What was read fits the tensors: positions ascend inside them, and all arrays have one length."""
    for group in changes.sparse:
        if not (group.positions.size == group.data.size == int(group.counts.sum())):
            raise RuntimeError("arrays of a group differ in length")
        for tensor, positions, _ in group.tensors():
            inside = positions.size == 0 or (positions[0] >= 0 and positions[-1] < TABLE[tensor].numel)
            if not inside or np.any(positions[1:] <= positions[:-1]):
                raise RuntimeError(f"positions of {TABLE[tensor].name} leave it, or do not ascend")
    for full in changes.full:
        if full.bits.size != TABLE[full.id].numel:
            raise RuntimeError(f"{TABLE[full.id].name} in full has {full.bits.size} elements")


@contextmanager
def _no_longer_than(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise RuntimeError(f"an input takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


NUMBERS = (0, 1, 2, 3, 7, 8, 15, 16, 63, 64, 127, 128, 254, 255)


def mutated(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """A changed copy of ``data``; ``other`` gives pieces."""
    if chance.random() < 0.25:
        return _bytes(data, other, chance)
    try:
        container = Container(data)
        entries, gifts = arrays_of(container), arrays_of(Container(other))
    except DeltaSyncError:
        return _bytes(data, other, chance)
    metadata = dict(container.metadata)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        name = chance.choice(sorted(entries))
        act = chance.random()
        if act < 0.80:
            entries[name] = _entry(*entries[name], chance)
        elif act < 0.88 and gifts:
            gift = chance.choice(sorted(gifts))
            entries[chance.choice((name, gift))] = gifts[gift]
        elif act < 0.92 and len(entries) > 1:
            del entries[name]
        else:
            metadata = _metadata(metadata, chance)
    return write_container(entries, metadata)


def _entry(dtype: str, array: np.ndarray, chance: random.Random) -> tuple[str, np.ndarray]:
    plane = np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()
    if dtype != "U8":
        return dtype, np.frombuffer(_bytes(plane, plane, chance, keep=True), np.uint8).view(array.dtype).reshape(
            array.shape
        )
    try:
        # A frame that declares a size gets as much memory, whatever is asked for.
        frame = plane if zstandard.frame_content_size(plane) <= 1 << 24 else b""
        inside = zstandard.ZstdDecompressor().decompress(frame, max_output_size=1 << 24)
    except zstandard.ZstdError:
        return dtype, np.frombuffer(_bytes(plane, plane, chance, keep=chance.random() < 0.7), np.uint8)
    inside = _bytes(inside, inside, chance, keep=chance.random() < 0.8)
    return dtype, np.frombuffer(zstandard.ZstdCompressor(level=1).compress(inside), np.uint8)


def _bytes(data: bytes, other: bytes, chance: random.Random, keep: bool = False) -> bytes:
    """Bits flipped, bytes set, pieces moved; of the same length if ``keep``."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        if not found:
            break
        place = chance.randrange(len(found))
        act = chance.randrange(4 if keep else 7)
        if act == 0:
            found[place] ^= 1 << chance.randrange(8)
        elif act == 1:
            found[place] = chance.choice(NUMBERS)
        elif act == 2:
            size = min(chance.choice((1, 2, 4, 8, 16)), len(found) - place)
            found[place : place + size] = chance.randbytes(size)
        elif act == 3:
            size = min(chance.choice((2, 8, 64)), len(found) - place)
            source = chance.randrange(len(found) - size + 1)
            found[place : place + size] = found[source : source + size]
        elif act == 4:
            del found[place : place + chance.choice((1, 2, 8, 64))]
        elif act == 5:
            found[place:place] = chance.randbytes(chance.choice((1, 2, 8)))
        elif other:
            start = chance.randrange(len(other))
            found[place:] = other[start:]
    return bytes(found)


def _metadata(metadata: dict[str, str], chance: random.Random) -> dict[str, str]:
    try:
        value = json.loads(metadata["delta_sync"])
        rows = value["blocks"]
        row = chance.choice(rows)
        row[chance.choice(("dtype", "kind"))] = chance.choice(
            ("BF16", "F16", "F32", "F64", "F8_E4M3", "U8", "tiles", "full", "later", "", 3)
        )
        if chance.random() < 0.3:
            rows.append(dict(row))
        if chance.random() < 0.3:
            value[chance.choice(("codec", "compression"))] = chance.choice(("plain", "tiled", "raw", "zstd", "none"))
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (KeyError, IndexError, TypeError, ValueError):
        text = "{}"
    return {"delta_sync": text}
