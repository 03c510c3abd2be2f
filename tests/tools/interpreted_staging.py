"""Staging on a device under Triton's interpreter: run with TRITON_INTERPRET=1.

Tests of codec ``tiled`` at a receiver run with a device of which nothing is simulated but its streams: kernels
decode the tiles, in an arena that takes several windows, and kernels commit them. Then what was uploaded is counted,
and where old bits lie is compared with indexing by hand.
"""

import contextlib
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.codec.tiling import encoded, trained
from tests.support.device import SimulatedDevice
from tests.support.routing import all_indices, densely
from tests.support.samples import CONTEXT
from tests.support.world import World
from vllm_delta_sync.codec.delta_reader import DeltaReader
from vllm_delta_sync.codec.tiles.alphabets import LONGEST, TABLES
from vllm_delta_sync.codec.tiles.grid import TILE_ELEMENTS, extent, grid_of
from vllm_delta_sync.engine.model import accelerator, decode_triton, fingerprint_triton
from vllm_delta_sync.engine.model.accelerator import Workspace, bytes_of
from vllm_delta_sync.engine.model.decode_triton import OldBits, TileBatch, array_shapes, tile_fields
from vllm_delta_sync.engine.model.route import Destination, Region, Route, RoutePatch
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.staging import device_decoder
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor

TABLES_BYTES = (TABLES * 4 << LONGEST) + 512
SUITE = [
    f"tests/receiver/test_tiled_codec.py::{test}"
    for test in (
        "test_follows_every_version_and_goes_back",
        "test_stream_made_against_other_weights_is_refused_and_gone_around",
        "test_weights_changed_from_outside_are_told_from_a_bad_stream",
        "test_what_was_staged_before_the_weights_moved_is_not_committed",
        "test_two_ranks_follow_by_their_own_tiles",
        "test_tiles_held_in_part_make_the_version_be_rebuilt",
    )
]
"""All of the file passes this way too, but takes more than ten minutes on a busy machine."""
counted: Counter[str] = Counter()


def one_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """The interpreter replaces functions of Triton's while a kernel runs, so threads of two ranks take turns."""
    from triton.runtime.interpreter import GridExecutor  # type: ignore[import-untyped, import-not-found, unused-ignore]

    run, lock = GridExecutor.__call__, threading.Lock()

    def locked(*arguments: Any, **options: Any) -> Any:
        with lock:
            return run(*arguments, **options)

    patch.setattr(GridExecutor, "__call__", locked)


def watch(patch: pytest.MonkeyPatch) -> None:
    """Count what a device decodes, in how many windows, and the bytes that go there for it."""
    decode, window = device_decoder.decode_on_device, device_decoder._decode_window

    def decoded(*arguments: Any) -> Iterator[RoutePatch]:
        for found in decode(*arguments):
            counted["changes"] += found.positions.size
            yield found
        counted["versions"] += 1

    def decoded_window(element: Any, index: Any, fields: Any, *rest: Any) -> Any:
        counted["windows"] += 1
        counted["tiles"] += fields.shape[1]
        counted["stream bytes"] += int(-(-fields[decode_triton.BITS.value].sum() // 8))
        return window(element, index, fields, *rest)

    upload, download = Workspace.upload, Workspace.download

    def uploaded(workspace: Workspace, nbytes: int, target: torch.Tensor) -> None:
        counted["up"] += nbytes
        upload(workspace, nbytes, target)

    def downloaded(workspace: Workspace, source: torch.Tensor) -> np.ndarray:
        counted["down"] += source.nbytes
        return download(workspace, source)

    patch.setattr(Workspace, "upload", uploaded)
    patch.setattr(Workspace, "download", downloaded)
    patch.setattr(device_decoder, "decode_on_device", decoded)
    patch.setattr(device_decoder, "_decode_window", decoded_window)


def check_followed(folder: Path) -> None:
    """Each change is decoded once, also by two ranks, one of which cannot hold all; and versions are merged as ever."""
    for ranks in (1, 2):
        world = World(folder / str(ranks), ranks=ranks)
        world.receiver.advance()
        counted.clear()
        world.train_and_follow(1)
        assert counted["versions"] == ranks
        assert counted["changes"] > 100 * ranks
        # Down come a number per tile, and position and distance of each change. Up go streams, what is known of each
        # tile, and the tables of a block per window; then the patch.
        assert counted["down"] == 4 * counted["tiles"] + 6 * counted["changes"]
        known = device_decoder.TILE_BYTES * counted["tiles"] + TABLES_BYTES * counted["windows"]
        patch = 6 * counted["changes"] + 512 * ranks * len(world.tensors)
        assert counted["up"] <= counted["stream bytes"] + known + patch
        world.train_and_follow(2)
        assert counted["versions"] == 2 * ranks
        world.train_and_follow(3, 4)
        assert counted["versions"] == 2 * ranks, "merged versions are decoded by a processor"
        world.receiver.rollback(2)
        world.close()


def random_source(random: np.random.Generator, shape: tuple[int, ...]) -> Region:
    """A part of a tensor, as views give it: a slice of each dimension, or every second index of one."""
    strides = [int(np.prod(shape[dim + 1 :], dtype=np.int64)) for dim in range(len(shape))]
    offset, sizes = 0, []
    for dim, size in enumerate(shape):
        first = int(random.integers(0, size)) if random.random() < 0.5 else 0
        count = int(random.integers(1, size - first + 1)) if random.random() < 0.5 else size - first
        offset += first * strides[dim]
        sizes.append(count)
        if random.random() < 0.1:
            sizes[-1], strides[dim] = -(-count // 2), 2 * strides[dim]
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    return Region(offset, tuple(size for size, _ in kept), tuple(stride for _, stride in kept))


def check_old_bits() -> None:
    """Each element of a part lies at its address, and parts are all that a route leads from, or there are none."""
    random, known = np.random.default_rng(0), 0
    for number in range(300):
        shape = tuple(int(each) for each in random.choice([1, 3, 5, 64, 70], random.integers(1, 4)))
        source = random_source(random, shape)
        target = densely(
            source, int(random.integers(0, 9)), [int(dim) for dim in random.permutation(len(source.sizes))]
        )
        flat = torch.zeros(target.last + 1, dtype=torch.int16)
        place = Destination("weight", torch.bfloat16, flat)
        parts = device_decoder._old_bits(Route(0, source, target), TensorSpec("w", "BF16", shape), place)
        if parts is None:
            continue
        known += 1
        columns = extent(shape)[1]
        found = {
            row * columns + column: part.address + 2 * ((row - part.rectangle[0]) * part.row_step
            + (column - part.rectangle[2]) * part.column_step)
            for part in parts
            for row in range(*part.rectangle[:2])
            for column in range(*part.rectangle[2:])
        }  # fmt: skip
        addresses = [flat.data_ptr() + 2 * index for index in all_indices(target)]
        assert found == dict(zip(all_indices(source), addresses, strict=True)), (number, shape, source, target)
    assert known > 150


def check_bytes_up() -> None:
    """Of an object that changes 1 % of a large tensor, at most 1.2 times its bytes go to the device."""
    table = TensorTable([TensorSpec("w", "BF16", (8192, 8192))])
    old, new = trained(table[0].shape, 0, share=0.0034)
    assert 0.009 < np.mean(old != new) < 0.011
    data = encoded(table, [old], [new])
    [coded] = DeltaReader(data, table, CONTEXT, lambda tensor: BaseTensor(old)).coded(lambda tensor: True)
    held = [OldBits((0, 8192, 0, 8192), 0, 8192, 1)]
    described = grid_of(coded.spec.shape), coded.spec.element, 0, coded.plain, coded.starts, coded.sizes, held
    _, *tiles = tile_fields(*described)
    batch = TileBatch.of(coded.spec.element, (tiles[0], tiles[1]), [coded.tables], [coded.thresholds])
    shapes = array_shapes(batch, coded.streams.size + decode_triton.PADDING, torch.int32)[: decode_triton.INPUTS]
    up = bytes_of(shapes)
    print({"object": len(data), "up": up, "tiles": batch.tiles})
    assert up <= 1.2 * len(data)


def check_long_streams() -> None:
    """A stream that no workspace has room for is left to a processor, which refuses it."""
    spec = TensorSpec("w", "BF16", (512, 512))
    old, new = trained(spec.shape, 0, share=0.0034)
    table = TensorTable([spec])
    [coded] = DeltaReader(encoded(table, [old], [new]), table, CONTEXT).coded(lambda tensor: True)
    source = Region(0, (spec.numel,), (1,))
    place = Destination("w", torch.bfloat16, torch.from_numpy(old.view(np.int16)))
    routes: Any = SimpleNamespace(
        routes=[[Route(0, source, densely(source, 0, [0]))]], groups=[[0]], destinations=[place]
    )
    for bits, there in ((device_decoder.MOST_BITS, True), (device_decoder.MOST_BITS + 1, False)):
        sizes = np.append(bits, coded.sizes[1:])
        longer = replace(coded, sizes=sizes, starts=np.cumsum(sizes) - sizes)
        assert (device_decoder._tiles_of(longer, routes) is not None) == there
    # All elements of the largest tile: each with the longest codes, and the most raw bits of a value.
    assert 3 * TILE_ELEMENTS // 2 * (2 * LONGEST + 29) < device_decoder.MOST_BITS


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr), pytest.MonkeyPatch.context() as patch:
        # Larger vectors are interpreted faster.
        for name, size in (("LANES", 256), ("MASK_WORDS", 512), ("CHANGES", 512)):
            patch.setattr(decode_triton, name, size)
        # Weights are hashed on the host: ``interpreted_fingerprint`` is for the kernel that hashes.
        patch.setattr(fingerprint_triton.DeviceSums, "MAX_DIMS", -1)
        for name, size in (("ARENA_BYTES", 1 << 19), ("LEAST_ARENA_BYTES", 1 << 19), ("WORKSPACE_BYTES", 1 << 18)):
            patch.setattr(accelerator, name, size)
        patch.setattr(WeightMemory, "for_model", lambda model: WeightMemory(SimulatedDevice(has_triton=True)))
        one_at_a_time(patch)
        watch(patch)
        check_old_bits()
        check_bytes_up()
        check_long_streams()
        with tempfile.TemporaryDirectory() as folder:
            check_followed(Path(folder))
        counted.clear()
        status = pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", "--durations=9", *SUITE])
        assert status == 0, status
        print(dict(counted))
        assert counted["changes"] > 1000
        assert counted["windows"] > counted["versions"]
    print("equal")


if __name__ == "__main__":
    main()
