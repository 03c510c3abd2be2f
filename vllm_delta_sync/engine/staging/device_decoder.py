"""``decode_on_device`` decodes a version's tiles on the device where the weights are.

Compressed streams go there, about a byte per changed element; positions and distances come back, since the undo log
keeps them in host memory. Tensors go through one arena, a window of tiles at a time: the host fills the window's
inputs, three kernels decode it against live weights (``engine/model/decode_triton.py``), and the host waits twice, for
the number of changes and for the changes. A processor decodes what a device does not: elements of 64 bits, tensors
whose old bits do not lie there or only in part, versions that are merged or lead back, and all of it without Triton or
without memory for the arena.

Imported only where Triton is.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta_sync.codec.delta_reader import DeltaReader
from vllm_delta_sync.codec.tiles.alphabets import CLASSES, LONGEST, TABLES
from vllm_delta_sync.codec.tiles.coder import CodedTensor
from vllm_delta_sync.codec.tiles.grid import MOST_RECTANGLES, CutTileError, extent, grid_of
from vllm_delta_sync.engine.model.accelerator import (
    ALIGNMENT,
    LEAST_WORKSPACE_BYTES,
    Workspace,
    bytes_of,
    carve,
)
from vllm_delta_sync.engine.model.decode_triton import (
    BITS,
    BLOCK,
    COLUMNS,
    HEIGHT,
    INPUTS,
    OFFSET,
    PADDING,
    PART,
    ROOM,
    START,
    WIDTH,
    WORDS,
    DecodeArrays,
    Fields,
    OldBits,
    Parts,
    TileBatch,
    array_shapes,
    decode_tiles,
    joined_tiles,
    tile_fields,
)
from vllm_delta_sync.engine.model.route import Destination, Route, RoutePatch
from vllm_delta_sync.engine.model.route_map import LiveBaseReader, RouteMap
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.format.fingerprint import tensor_seed
from vllm_delta_sync.format.table import DType, TensorSpec
from vllm_delta_sync.tensors.torch_views import SIGNED

WORD_BYTES = 8 * CLASSES
"""Bytes of scratch memory per word of 32 elements: the masks of all classes, and what comes before each."""
TILE_BYTES = 128
"""Bytes per tile, at most: its fields and those of its part, members, counts."""
MOST_BITS = 8 * LEAST_WORKSPACE_BYTES // 2
"""Of a tile's stream that a device decodes, so that the smallest workspace has room for it. All elements of the largest
tile take fewer: a processor says what is wrong with more."""


@dataclass(frozen=True)
class TilesOfRoute:
    """The tiles of a tensor that routes from one source region lead to the device.

    Attributes:
        routes: with that source, and their groups of ranks.
        numbers: (n,) of the tiles in the tensor's grid, ascending. fields: (7, n), and parts: (parts, 6), see
            ``tile_fields``.
    """

    coded: CodedTensor
    routes: list[tuple[Route, int]]
    numbers: npt.NDArray[np.int64]
    fields: Fields
    parts: Parts


def decode_on_device(
    readers: Sequence[DeltaReader], routes: RouteMap, workspace: Workspace, base: LiveBaseReader
) -> Iterator[RoutePatch]:
    """Yield the changes of those tensors that a device can decode; ``base.elsewhere`` names them for other decoders.

    Args:
        readers: the objects of one version, forwards, against the live weights.

    Raises:
        FormatError, LimitError: a table or stream is damaged, or was made against other bits. EngineError: weights were
        written meanwhile. BusyError: the engine fell asleep.
    """
    arena = workspace.decode_arena()
    if arena is None:
        return

    def there(tensor: int) -> bool:
        found = routes.routes[tensor]
        return bool(found) and all(map(routes.is_on_device, found))

    found: dict[tuple[str, np.dtype[Any]], list[TilesOfRoute]] = {}
    for reader in readers:
        for coded in reader.coded(there):
            tiles = _tiles_of(coded, routes)
            if tiles is not None:
                base.elsewhere.add(coded.tensor)
                for each in tiles:
                    found.setdefault((coded.spec.dtype, each.routes[0][0].index), []).append(each)
    decoded: Counter[int] = Counter()
    for (_, index), jobs in found.items():
        for job, positions, distances in _decode(jobs, index, workspace, arena, routes.memory, base):
            decoded[job.coded.tensor] += positions.size
            seed, element = tensor_seed(job.coded.spec.name), job.coded.spec.element
            for route, holders in job.routes:
                yield RoutePatch(route, seed, holders, element, True, positions, distances)
    for coded in {job.coded.tensor: job.coded for jobs in found.values() for job in jobs}.values():
        held = sum(source.numel for source in {route.source for route in routes.routes[coded.tensor]})
        count = decoded[coded.tensor]
        if count > coded.count or (held == coded.spec.numel and count != coded.count):
            coded.refuse(count, 0)


def _decode(
    jobs: list[TilesOfRoute], index: "np.dtype[Any]", workspace: Workspace, arena: torch.Tensor, memory: WeightMemory,
    base: LiveBaseReader,
) -> Iterator[tuple[TilesOfRoute, npt.NDArray[Any], npt.NDArray[Any]]]:  # fmt: skip
    """Yield (job, positions, distances) window by window, of the jobs that have changes there."""
    element = jobs[0].coded.spec.element
    owners = np.repeat(np.arange(len(jobs)), [job.numbers.size for job in jobs])
    tiles = fields, parts = joined_tiles([(job.fields, job.parts) for job in jobs])
    # Jobs of one block share its tables.
    blocks = {id(job.coded.tables): job.coded for job in jobs}
    places = {key: number for number, key in enumerate(blocks)}
    parts[:, BLOCK.value] = np.repeat([places[id(job.coded.tables)] for job in jobs], [len(job.parts) for job in jobs])
    every = TileBatch.of(
        element, tiles, [coded.tables for coded in blocks.values()], [coded.thresholds for coded in blocks.values()]
    )
    streams = (fields[BITS.value] + 7) // 8 + 1
    tables_bytes = every.tables[0].nbytes + every.limits[0].nbytes + 2 * ALIGNMENT
    numbers, plain = np.divmod(fields[PART.value], 2)
    first_of_block = np.diff(parts[numbers, BLOCK.value], prepend=-1) != 0
    given = streams + TILE_BYTES + first_of_block * tables_bytes
    rooms = np.diff(np.append(every.fields[ROOM.value], every.room))
    words = np.diff(np.append(every.fields[WORDS.value], every.words))
    taken = given + WORD_BYTES * words + rooms * (4 + 2 * element.itemsize + index.itemsize)
    # A window that begins within a block needs the block's tables too.
    slack = tables_bytes + 16 * ALIGNMENT + PADDING
    start = 0
    while start < owners.size:
        stop = min(_fits(given, start, workspace.nbytes - slack), _fits(taken, start, arena.nbytes - slack))
        mine = slice(start, max(stop, start + 1))
        # Plain tiles are the same whatever the weights are by now.
        reading = base.reading() if np.any(plain[mine] == 0) else memory.reading()
        with reading, workspace.lock:
            found, positions, distances = _decode_window(
                element, index, fields[:, mine], parts, [jobs[each].coded for each in owners[mine]], workspace, arena
            )
            wrong = np.flatnonzero(found < 0)
            if wrong.size:
                job = jobs[owners[start + wrong[0]]]
                tile = start + int(wrong[0]) - int(np.searchsorted(owners, owners[start + wrong[0]]))
                job.coded.refuse(int(found[wrong[0]]), int(job.numbers[tile]))
        counts = np.bincount(owners[mine], found, len(jobs)).astype(np.int64)
        ends = np.cumsum(counts)
        for owner in np.flatnonzero(counts).tolist():
            changes = slice(int(ends[owner] - counts[owner]), int(ends[owner]))
            yield jobs[owner], positions[changes], distances[changes]
        start = mine.stop


def _fits(sizes: npt.NDArray[np.int64], start: int, room: int) -> int:
    """Return where to end so that sizes[start:end] have at most ``room`` bytes together."""
    return start + int(np.searchsorted(np.cumsum(sizes[start:]), room, "right"))


def _decode_window(
    element: DType, index: "np.dtype[Any]", fields: Fields, parts: Parts, owners: list[CodedTensor],
    workspace: Workspace, arena: torch.Tensor,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any], npt.NDArray[Any]]:  # fmt: skip
    """Decode some tiles → (tiles,) changes or an error of each, and all positions and distances.

    Args:
        fields, parts: as in ``tile_fields``; streams begin where they do in their block. owners: (tiles,) tensors.
    """
    fields = fields.copy()
    used, number = np.unique(fields[PART.value] // 2, return_inverse=True)
    fields[PART.value] = 2 * number + fields[PART.value] % 2
    parts = parts[used]
    used, parts[:, BLOCK.value] = np.unique(parts[:, BLOCK.value], return_inverse=True)
    block = parts[number, BLOCK.value]
    first = {int(number): int(np.argmax(block == place)) for place, number in enumerate(used.tolist())}
    known = [owners[at] for at in first.values()]
    begin = fields[START.value] >> 3
    end = (fields[START.value] + fields[BITS.value] + 7) >> 3
    # Streams that follow each other in their block are copied at once.
    cuts = np.flatnonzero((np.diff(block) != 0) | (begin[1:] > end[:-1])) + 1
    runs = list(itertools.pairwise([0, *cuts.tolist(), begin.size]))
    pieces: list[npt.NDArray[np.uint8]] = []
    at = 0
    for one, other in runs:
        pieces.append(owners[one].streams[begin[one] : end[other - 1]])
        fields[START.value, one:other] += 8 * (at - int(begin[one]))
        at += pieces[-1].size
    batch = TileBatch.of(
        element, (fields, parts), [coded.tables for coded in known], [coded.thresholds for coded in known]
    )
    shapes = array_shapes(batch, at + PADDING, SIGNED[index.itemsize])
    arrays = DecodeArrays(*carve(arena, shapes))
    inputs = shapes[:INPUTS]
    on_host = [array.numpy() for array in carve(workspace.on_host, inputs)]
    fields_on_host, parts_on_host, limits, tables, streams = on_host
    fields_on_host[...] = batch.fields
    parts_on_host[...] = batch.parts
    limits[...] = batch.limits.view(np.int32)
    tables[...] = batch.tables.view(np.int16)
    np.concatenate(pieces, out=streams.view(np.uint8)[:at])
    workspace.upload(bytes_of(inputs), arena)
    decode_tiles(batch, arrays)
    found: npt.NDArray[np.int64] = workspace.download(arrays.found).astype(np.int64)
    total = int(np.maximum(found, 0).sum())
    positions, distances = (workspace.download(array[:total]) for array in (arrays.positions, arrays.distances))
    return found, positions, distances.view(element.uint)


def _tiles_of(coded: CodedTensor, routes: RouteMap) -> list[TilesOfRoute] | None:
    """Return the tiles of a tensor that a device has; None if a processor has to decode the tensor."""
    if coded.spec.element.itemsize == 8 or max(extent(coded.spec.shape)) > np.iinfo(np.int32).max:
        return None
    if coded.sizes.max() > MOST_BITS:
        return None
    grid, found = grid_of(coded.spec.shape), list[TilesOfRoute]()
    each = list(zip(routes.routes[coded.tensor], routes.groups[coded.tensor], strict=True))
    for source in dict.fromkeys(route.source for route, _ in each):
        mine = [(route, holders) for route, holders in each if route.source == source]
        parts = _old_bits(mine[0][0], coded.spec, routes.destinations[mine[0][0].destination])
        if parts is None:
            return None
        _, cut = grid.held([part.rectangle for part in parts])
        if np.any(cut & (coded.sizes > 0)):
            return None
        try:
            numbers, fields, described = tile_fields(
                grid, coded.spec.element, 0, coded.plain, coded.starts, coded.sizes, parts
            )
        except CutTileError:
            return None
        described[:, OFFSET.value] = source.offset
        found.append(TilesOfRoute(coded, mine, numbers, fields, described))
    return found


def _old_bits(route: Route, spec: TensorSpec, destination: Destination) -> list[OldBits] | None:
    """Return where the old bits of a route's source lie, as rectangles of its tensor; None if they are none."""
    _, columns = extent(spec.shape)
    steps = [tuple(int(each) for each in row) for row in zip(*route.dimensions, strict=True)]
    width, _, column_step = steps.pop() if steps and steps[-1][1] == 1 else (1, 1, 0)
    height, row_step = 1, 0
    if width > columns:
        # Whole rows, one after the other.
        if width % columns or route.source.offset % columns:
            return None
        height, width, row_step = width // columns, columns, columns * column_step
    elif steps and steps[-1][1] == columns:
        height, _, row_step = steps.pop()
    if int(np.prod([size for size, _, _ in steps], dtype=np.int64)) > MOST_RECTANGLES:
        return None
    found = []
    for place in itertools.product(*(range(size) for size, _, _ in steps)):
        moved = list(zip(place, steps, strict=True))
        row, column = divmod(route.source.offset + sum(at * stride for at, (_, stride, _) in moved), columns)
        if column + width > columns:
            return None
        index = route.target.offset + sum(at * step for at, (_, _, step) in moved)
        address = destination.address + spec.element.itemsize * index
        found.append(OldBits((row, row + height, column, column + width), address, row_step, column_step))
    return found


def compile_decoder(elements: set[DType], routes: RouteMap, workspace: Workspace) -> None:
    """Compile and load the kernels now, so that no staging does while it holds off writers."""
    arena = workspace.decode_arena()
    if arena is None:
        return
    fields, parts = np.zeros((7, 1), np.int64), np.zeros((1, 6), np.int64)
    fields[[PART.value, HEIGHT.value, WIDTH.value]] = parts[0, COLUMNS.value] = 1
    tables, limits = np.zeros((TABLES, 2, 1 << LONGEST), np.uint16), np.zeros(CLASSES, np.uint8)
    indices = {route.index for each in routes.routes for route in each}
    for element, index in itertools.product(elements, indices):
        if element.itemsize < 8:
            batch = TileBatch.of(element, (fields, parts), [tables], [limits])
            shapes = array_shapes(batch, PADDING, SIGNED[index.itemsize])
            arena[: bytes_of(shapes)].zero_()
            arrays = DecodeArrays(*carve(arena, shapes))
            arrays.fields.copy_(torch.from_numpy(batch.fields))
            arrays.parts.copy_(torch.from_numpy(batch.parts))
            decode_tiles(batch, arrays)
    workspace.accelerator.synchronize_stream()
