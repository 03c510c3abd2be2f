"""Codec ``packed`` written a second time, in plain numpy from docs/FORMAT.md: the planes of a block and what they say.

Nothing here imports the modules under test. ``sparse`` and ``dense`` blocks hold, per tensor, (positions, distances,
numel); ``width`` is that of the dtype in bits.
"""

import numpy as np

Tensor = tuple[np.ndarray, np.ndarray, int]
Planes = dict[str, np.ndarray]


def shift_of(count: int, numel: int) -> int:
    """How many low bits of the gaps stand apart."""
    return max(0, (numel // count).bit_length() - 6)


def zigzag(distances: np.ndarray, width: int) -> np.ndarray:
    """(n,) unsigned distances → (n,) uint64 zigzag."""
    signed = distances.astype(f"<u{width // 8}").view(f"<i{width // 8}").astype(np.int64)
    numbers = np.where(signed < 0, ~(signed.view(np.uint64) << np.uint64(1)), signed.view(np.uint64) << np.uint64(1))
    return numbers & np.uint64((1 << width) - 1)


def unzigzag(numbers: np.ndarray, width: int) -> np.ndarray:
    """Inverse of ``zigzag``, as (n,) unsigned of ``width`` bits."""
    halves = numbers >> np.uint64(1)
    return np.where(numbers & np.uint64(1), ~halves, halves).astype(f"<u{width // 8}")


def bytes_of_bits(rows: np.ndarray) -> np.ndarray:
    """(n, k) bits of n numbers, lowest first → bytes, lowest bit first, padded with zeros."""
    return np.packbits(rows.reshape(-1), bitorder="little")


def byte_planes(numbers: np.ndarray, width: int) -> list[np.ndarray]:
    """Byte i of each number, for each i, lowest first."""
    return [(numbers >> np.uint64(8 * byte)).astype(np.uint8) for byte in range(width // 8)]


def encode(tensors: list[Tensor], width: int, dense: bool) -> Planes:
    """The planes of a block, before compression."""
    parts: dict[str, list[np.ndarray]] = {"mask": [], "gaps": [], "low": [], "escapes": [], "codes": []}
    small, wide = [], []
    for positions, distances, numel in tensors:
        if dense:
            parts["mask"].append(bytes_of_bits(np.isin(np.arange(numel), positions)))
        else:
            shift = shift_of(positions.size, numel)
            gaps = np.diff(positions, prepend=-1) - 1
            top = gaps >> shift
            parts["gaps"].append(np.minimum(top, 255).astype(np.uint8))
            parts["low"].append(bytes_of_bits(gaps[:, None] >> np.arange(shift) & 1))
            parts["escapes"].append(top[top >= 255] - 255)
        numbers = zigzag(distances, width)
        code = np.select([numbers == 0, numbers <= 2, numbers <= 258], [3, numbers.astype(np.int64) - 1, 2], 3)
        parts["codes"].append(bytes_of_bits(code[:, None] >> np.arange(2) & 1))
        small.append((numbers[code == 2] - np.uint64(3)).astype(np.uint8))
        wide.append(numbers[code == 3])
    chosen = ("mask", "codes") if dense else ("gaps", "low", "codes")
    planes = {part: np.concatenate(parts[part]).astype(np.uint8) for part in chosen}
    if not dense:
        planes["escapes"] = np.concatenate(byte_planes(np.concatenate(parts["escapes"]).astype(np.uint64), 64))
    planes["small"] = np.concatenate(small)
    return planes | {f"wide.{i}": plane for i, plane in enumerate(byte_planes(np.concatenate(wide), width))}


def decode(planes: Planes, counts: list[int], numels: list[int], width: int, dense: bool) -> list[Tensor]:
    """Inverse of ``encode``."""
    taken = dict.fromkeys(planes, 0)
    wide = np.zeros(planes["wide.0"].size, np.uint64)
    for i in range(width // 8):
        wide |= planes[f"wide.{i}"].astype(np.uint64) << np.uint64(8 * i)
    escapes = np.zeros(0, np.int64)
    if not dense:
        escapes = planes["escapes"].reshape(8, -1).T.astype(np.int64) @ (np.int64(1) << np.arange(0, 64, 8))
    taken |= {"wide": 0, "escapes": 0}

    def take(part: str, count: int, source: np.ndarray | None = None) -> np.ndarray:
        start, taken[part] = taken[part], taken[part] + count
        return (planes[part] if source is None else source)[start : start + count]

    def take_bits(part: str, count: int, bits: int) -> np.ndarray:
        rows = np.unpackbits(take(part, (count * bits + 7) // 8), bitorder="little")[: count * bits].reshape(
            count, bits
        )
        return rows.astype(np.int64) @ (np.int64(1) << np.arange(bits))

    found = []
    for count, numel in zip(counts, numels, strict=True):
        if dense:
            positions = np.flatnonzero(take_bits("mask", numel, 1))
        else:
            shift = shift_of(count, numel)
            top = take("gaps", count).astype(np.int64)
            top[top == 255] += take("escapes", int((top == 255).sum()), escapes)
            positions = np.cumsum((top << shift | take_bits("low", count, shift)) + 1) - 1
        code = take_bits("codes", count, 2)
        numbers = code.astype(np.uint64) + np.uint64(1)
        numbers[code == 2] = take("small", int((code == 2).sum())).astype(np.uint64) + np.uint64(3)
        numbers[code == 3] = take("wide", int((code == 3).sum()), wide)
        found.append((positions, unzigzag(numbers, width), numel))
    return found
