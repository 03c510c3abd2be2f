"""``GivenParts``: parts of checkpoint tensors that each rank yields itself, whatever framework sharded the model.

A rank yields every ``Part`` that it holds. Ranks may hold different tensors (pipeline stages, experts), boxes of them
(tensor parallelism), and the same ones (replicas): of equal boxes one is published. No tensor is gathered.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import index
from typing import NamedTuple

import torch

from trainer_side.model.live_tensors import CheckpointTensor, NamedTensors, Selection, changed, check_readable
from trainer_side.ranks.group import Json, ProcessGroup
from trainer_side.ranks.shard_parts import RankParts, ShardPart, part_name
from vllm_delta_sync.errors import ModelError, TensorMismatchError, UsageError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, bits_of, dtype_name


class Part(NamedTuple):
    """A box of a checkpoint tensor, as this process holds it.

    Attributes:
        name: of the tensor in a Hugging Face checkpoint.
        shape: of the whole tensor.
        offsets: index of the box's first element in the whole tensor, one number per dimension.
        tensor: the box's values, in a dtype that is the same on all ranks; any strided view, such as a slice of a fused
            weight or a transposed one. It has as many dimensions as ``shape``.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor


PartSource = Callable[[], Iterable[Part]]


class GivenParts(RankParts):
    """The parts that this rank publishes, of those that it yields. The attributes are empty before ``agree``.

    Args:
        source: yields this rank's parts, each time with their current values.
    """

    remedy = "yield each element of every tensor on one rank at least, and no box that overlaps another one"

    def __init__(self, source: PartSource) -> None:
        super().__init__()
        self._source = source
        self._dtypes: dict[str, torch.dtype] = {}

    def agree(self, group: ProcessGroup, selection: Selection) -> None:
        """Agree with the other ranks on the tensors, and on which of them publishes each part.

        Raises:
            UsageError: a selection is given. ModelError: a part cannot be read or is no box of its tensor, a rank
                yields it with several values, or ranks yield tensors of one name with other shapes or dtypes.
        """
        devices: dict[str, torch.device] = {}
        boxes: list[ShardPart] = []

        def work() -> Json:
            if not selection.is_everything:
                raise UsageError("include, exclude or rename is given with parts=: yield the parts to publish")
            rows = []
            again: set[str] = set()
            for part, tensor in self._yielded():
                name = part_name(part)
                if name in self._dtypes:
                    again.add(name)
                else:
                    self._dtypes[name], devices[name] = tensor.dtype, tensor.device
                    boxes.append(part)
                    box = part.box
                    rows.append(
                        [part.name, dtype_name(tensor.dtype, name), *map(list, (box.whole, box.offsets, box.shape))]
                    )
            self._check_copies(again)
            return rows

        agreed = group.reduce_on_rank0("parts", work, _shared_out)
        for name, dtype, shape in agreed["tensors"]:
            self.whole[name] = CheckpointTensor(name, tuple(shape), TORCH_DTYPES[dtype])
        for number in agreed["own"][group.rank]:
            part = boxes[number]
            name = part_name(part)
            self.parts[name] = part
            self.tensors[name] = CheckpointTensor(name, part.box.shape, self._dtypes[name], device=devices[name])

    def convert(self, weights: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        raise UsageError("weights= is given, and this publisher was made with parts=: it reads the parts itself")

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[str] = set()
        for part, tensor in self._yielded():
            name = part_name(part)
            if name in seen:
                continue
            seen.add(name)
            known = self._dtypes.get(name)
            if known is None:
                raise TensorMismatchError(
                    f"part {name!r} of shape {list(part.box.whole)} was not yielded when the publisher was made; yield "
                    "the same boxes each time, or make a new Publisher for the model in its present state"
                )
            if tensor.dtype != known:
                raise changed(name, (part.box.shape, tensor.dtype), (part.box.shape, known))
            if name in self.parts:
                yield name, tensor
        missing = [name for name in self._dtypes if name not in seen]
        if missing:
            raise TensorMismatchError(
                f"part {missing[0]!r} is no longer yielded, {len(missing)} are missing in all; yield the same boxes "
                "each time, or make a new Publisher for the model in its present state"
            )

    def _check_copies(self, names: Collection[str]) -> None:
        """Raise ModelError if a part that this rank yields more than once has several values: only one is published."""
        sums: dict[str, Fingerprint] = {}
        for part, tensor in self._yielded() if names else ():
            name = part_name(part)
            if name in names:
                found = fingerprint_tensor(name, bits_of(tensor.detach().cpu().contiguous()))
                if sums.setdefault(name, found) != found:
                    raise ModelError(
                        f"part {name!r} is yielded more than once, with different values; give each tensor a name of "
                        "its own, such as a layer's number in the whole model where a virtual pipeline counts per chunk"
                    )

    def _yielded(self) -> Iterator[tuple[ShardPart, torch.Tensor]]:
        """Yield this rank's parts, each with its values."""
        found = self._source() if callable(self._source) else None
        if not isinstance(found, Iterable):
            raise UsageError("parts= gives no parts; give a function that yields trainer_side.Part each time")
        for item in found:
            if not isinstance(item, tuple) or len(item) != len(Part._fields) or not isinstance(item[0], str):
                raise UsageError(
                    f"parts= yields {str(type(item))[:80]}; yield trainer_side.Part(name, shape, offsets, tensor)"
                )
            name, tensor = item[0], check_readable(item[0], item[3])
            try:
                # Integers of any kind, such as numpy's, which other ranks could not be sent.
                whole, offsets = (tuple(map(index, numbers)) for numbers in item[1:3])
                box = Box(offsets, tuple(tensor.shape), whole)
            except TypeError as error:
                raise UsageError(
                    f"a part of tensor {name!r} has shape {item[1]!r} and offsets {item[2]!r}; give integers"
                ) from error
            except TensorMismatchError as error:
                raise ModelError(f"a part of tensor {name!r} cannot be published: {error.message}") from error
            yield ShardPart(name, box), tensor


def _shared_out(reports: list[Json]) -> Json:
    """Return the tensors of all ranks, and the numbers of the rows that each rank publishes.

    Of several ranks with an equal box, the one with the fewest bytes so far publishes it.

    Args:
        reports: of each rank, rows of (name, dtype, shape, offsets, shape of the box).
    """
    tensors: dict[str, tuple[int, str, list[int]]] = {}
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, rows in enumerate(reports):
        for number, (name, dtype, shape, offsets, extent) in enumerate(rows):
            first, known, whole = tensors.setdefault(name, (rank, dtype, shape))
            if (known, whole) != (dtype, shape):
                raise ModelError(
                    f"tensor {name!r} is {dtype} {shape} on rank {rank}, and {known} {whole} on rank {first}; yield "
                    "the whole tensor's shape, and one dtype, on every rank"
                )
            if 0 not in extent:
                holders.setdefault((name, tuple(offsets), tuple(extent)), []).append((rank, number))
    own: list[list[int]] = [[] for _ in reports]
    taken = [0] * len(reports)
    for (name, _, extent), places in holders.items():
        rank, number = min(places, key=lambda place: (taken[place[0]], place[0]))
        own[rank].append(number)
        taken[rank] += math.prod(extent) * TORCH_DTYPES[tensors[name][1]].itemsize
    return {"tensors": [[name, dtype, shape] for name, (_, dtype, shape) in tensors.items()], "own": own}
