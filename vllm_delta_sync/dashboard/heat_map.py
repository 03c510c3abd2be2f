"""``HeatMap`` says which layers and kinds of tensors the newest deltas change, from the headers of their objects."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from vllm_delta_sync.codec.delta_object import DeltaContext, open_blocks, parse_blocks
from vllm_delta_sync.codec.delta_reader import read_metadata
from vllm_delta_sync.codec.raw import VALUES
from vllm_delta_sync.errors import DataError, FormatError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.limits import check_limit
from vllm_delta_sync.format.manifest import ObjectRef
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.run.checks import delta_context, object_limit
from vllm_delta_sync.run.run_reader import RunReader, read_ahead

HEAT_VERSIONS = 16
"""Most versions in the heat map."""
HEAT_OBJECTS = 64
"""Most objects whose headers are read for it; a version has one for each rank of the publisher that changed any."""
FIRST_READ = 64 * 1024
"""Bytes to read first; in most objects the header and the directories lie within them."""
MAX_LAYERS, MAX_KINDS = 256, 64
OUTSIDE = ""
"""The layer of tensors outside of layers, such as the embedding."""


def place_of(name: str) -> tuple[str, str]:
    """Return the layer of a tensor and its kind: its name within the layer, without numbers.

    ``model.layers.3.mlp.experts.7.up.weight`` is in ``model.layers.3``, of the kind ``mlp.experts.*.up.weight``.
    """
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    if number is None:
        return OUTSIDE, _kind_of(parts)
    return ".".join(parts[: number + 1]), _kind_of(parts[number + 1 :])


def _kind_of(parts: list[str]) -> str:
    return ".".join("*" if part.isdecimal() else part for part in parts)


class HeatMap:
    """Elements that the newest deltas of a run carry, by layer and kind of tensor.

    Each delta is read once, also if it cannot be read: hostile objects must not take their time again and again.
    """

    def __init__(self, run: RunReader) -> None:
        self._run = run
        self._elements: Counter[tuple[str, str]] = Counter()
        for spec in run.table:
            self._elements[place_of(spec.name)] += spec.numel
        self._carried: dict[str, Counter[tuple[str, str]] | None] = {}

    def read(self, deltas: Mapping[int, str]) -> dict[str, Any]:
        """Return the map as JSON; reads the headers of deltas that were not read before.

        Args:
            deltas: version → digest of its manifest, newest first.

        Returns:
            ``layers``, ``kinds`` and ``cells[kind][layer]``: the share of the cell's elements that a version changes,
            on average; null where the model has no such tensor. ``hidden``: kinds and layers beyond the limits.
            ``versions``: numbers of the versions that count. ``lost``: objects that garbage collection removed, or that
            cannot be read. An empty ``versions`` means that there is no delta within the limits.

        Raises:
            StoreError: the store failed.
        """
        known, self._carried = self._carried, {}
        for version, digest in deltas.items():
            self._carried[digest] = known[digest] if digest in known else self._read(version, digest)
        counted = [version for version, digest in deltas.items() if self._carried[digest] is not None]
        return {**self._cells(len(counted)), "versions": counted, "lost": len(deltas) - len(counted)}

    def _read(self, version: int, digest: str) -> Counter[tuple[str, str]] | None:
        found: Counter[tuple[str, str]] = Counter()
        try:
            manifest = self._run.manifest(version)
        except DataError:
            return None
        context = delta_context(manifest)
        if context is None or manifest.digest != digest:
            return None
        parsing, lost = threading.Lock(), threading.Event()
        for elements in read_ahead(partial(self._count, context, parsing, lost), manifest.objects):
            for tensor, carried in elements.items():
                found[place_of(self._run.table[tensor].name)] += carried
        return None if lost.is_set() else +found

    def _count(
        self, context: DeltaContext, parsing: threading.Lock, lost: threading.Event, ref: ObjectRef
    ) -> Counter[int]:
        what, read = f"object {ref.key}", partial(self._run.bucket.get_range, ref.key)
        try:
            if not lost.is_set():
                check_limit(f"{what}: bytes", ref.bytes, object_limit(self._run.table), "object_limit")
                return count_elements(read, ref.bytes, self._run.table, context, what, parsing)
        except DataError:
            # Removed, or the timeline shows the version; `delta-sync verify` says what is wrong with it. The error is
            # not passed on: its frames hold what was read.
            lost.set()
        return Counter()

    def _cells(self, versions: int) -> dict[str, Any]:
        total: Counter[tuple[str, str]] = Counter()
        for found in self._carried.values():
            total.update(found or {})
        # In the order of the table, which is that of names; layers by number.
        layers = sorted({layer for layer, _ in self._elements}, key=_by_number)
        kinds = list(dict.fromkeys(kind for _, kind in self._elements))
        hidden = max(0, len(layers) - MAX_LAYERS) + max(0, len(kinds) - MAX_KINDS)
        layers, kinds = layers[:MAX_LAYERS], kinds[:MAX_KINDS]
        cells = [
            [
                None
                if not versions or not self._elements[layer, kind]
                else total[layer, kind] / versions / self._elements[layer, kind]
                for layer in layers
            ]
            for kind in kinds
        ]
        return {"layers": layers, "kinds": kinds, "cells": cells, "hidden": hidden}


def _by_number(layer: str) -> tuple[str, int]:
    prefix, _, number = layer.rpartition(".")
    return prefix, int(number) if number.isdecimal() else -1


def count_elements(
    read: Callable[[int, int], bytes],
    size: int,
    table: TensorTable,
    context: DeltaContext,
    what: str,
    parsing: AbstractContextManager[object],
) -> Counter[int]:
    """Return tensor id → elements that a delta object carries. Its digest is not checked.

    Args:
        read: returns bytes of the object, from (offset, length). size: of the object, checked against a limit before.
        parsing: entered to parse the header: a hostile one takes many times its bytes of memory, and seconds.

    Raises:
        DeltaSyncError: it is damaged, or does not belong to the document; as ``delta_reader.decode``.
    """
    # Bytes that are not read stay zeros, which take no memory.
    data = np.zeros(size, np.uint8)

    def fill(start: int, end: int) -> None:
        found = read(start, end - start)
        if len(found) != end - start:
            raise FormatError(f"{what} has fewer than the {size} bytes that its document lists")
        data[start:end] = np.frombuffer(found, np.uint8)

    first = min(size, FIRST_READ)
    fill(0, first)
    header = 8 + int.from_bytes(data[:8].tobytes(), "little")
    check_limit(f"{what}: header size", header - 8, limits.MAX_HEADER_BYTES, "MAX_HEADER_BYTES")
    with parsing:
        if first < header <= size:
            fill(first, header)
        container = Container(data, what)
        blocks = parse_blocks(read_metadata(container, context, what)["blocks"], what)
    if len(blocks) > len(table):
        raise FormatError(f"{what} has {len(blocks)} blocks, more than the model has tensors")
    for name in (f"{block.name}.{part}" for block in blocks for part in ("ids", "counts")):
        entry = container.entries.get(name)
        if entry is not None and header + entry.end > max(first, header):
            fill(header + entry.start, header + entry.end)
    elements: Counter[int] = Counter()
    for name, entry in container.entries.items():
        # A tensor in full has its own name; codec ``raw`` adds to it.
        tensor = name if name in table else name.removesuffix(VALUES)
        if tensor in table:
            elements[table.index(tensor)] += math.prod(entry.shape)
    for item in open_blocks(container, table, blocks, context.changed, what):
        for tensor_id, count in zip(item.directory.ids.tolist(), item.directory.counts.tolist(), strict=True):
            elements[tensor_id] += count
    return elements
