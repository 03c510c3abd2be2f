"""Change a delta object at random: its bytes, or what lies inside its planes, with the wrapping made good again."""

import json
import random

import numpy as np
import zstandard

from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.wire.container import Container, write_container

NUMBERS = (0, 1, 2, 3, 7, 8, 15, 16, 63, 64, 127, 128, 254, 255)


def mutated(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """A changed copy of ``data``; ``other`` gives pieces."""
    if chance.random() < 0.25:
        return _bytes(data, other, chance)
    try:
        container = Container(data)
        entries, gifts = _entries(container), _entries(Container(other))
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


def _entries(container: Container) -> dict[str, tuple[str, np.ndarray]]:
    entries = container.entries.items()
    return {name: (entry.dtype.name, container.bits(name).reshape(entry.shape)) for name, entry in entries}


def _entry(dtype: str, array: np.ndarray, chance: random.Random) -> tuple[str, np.ndarray]:
    plane = np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()
    if dtype != "U8":
        return dtype, np.frombuffer(_bytes(plane, plane, chance, keep=True), np.uint8).view(array.dtype).reshape(
            array.shape
        )
    try:
        inside = zstandard.ZstdDecompressor().decompress(plane, max_output_size=1 << 24)
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
            ("BF16", "F16", "F32", "F64", "F8_E4M3", "U8", "sparse", "dense", "tiles", "full", "", 3)
        )
        if chance.random() < 0.3:
            rows.append(dict(row))
        if chance.random() < 0.3:
            value[chance.choice(("codec", "compression"))] = chance.choice(("packed", "context", "raw", "zstd", "none"))
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (KeyError, IndexError, TypeError, ValueError):
        text = "{}"
    return {"delta_sync": text}
