"""Change detection written a second time, plainly, and what its tests share."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from trainer_side.diff.buffers import BaselineBuffer, HostBuffer
from trainer_side.diff.change_log import ChangeLog
from trainer_side.diff.device import DeviceComparer
from trainer_side.diff.device_memory import Kernels
from trainer_side.diff.device_queue import open_queue
from trainer_side.diff.engine import Detector
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Bits, Positions
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, bits_of

NAME = "layer.weight"


@dataclass
class Difference:
    """What one comparison found."""

    positions: list[int]
    distances: list[int]
    fingerprint: Fingerprint

    @classmethod
    def of(cls, found: ChangeLog, fingerprint: Fingerprint) -> "Difference":
        pieces = list(found.pieces())
        positions = [position for piece in pieces for position in piece[0].tolist()]
        return cls(positions, [distance for piece in pieces for distance in piece[1].tolist()], fingerprint)


def expected(dtype: str, old: Bits, new: Bits) -> Difference:
    """The same with plain numpy operations over whole arrays."""
    positions: Positions = np.flatnonzero(old != new)
    ranks = [rank(dtype, bits[positions]) for bits in (old, new)]
    distances = (ranks[1] - ranks[0]).astype(old.dtype)
    change = fingerprint_tensor(NAME, new) - fingerprint_tensor(NAME, old)
    return Difference(positions.tolist(), distances.tolist(), change)


def rank(dtype: str, bits: Bits) -> Bits:
    """Place of each pattern in the order of docs/FORMAT.md."""
    if not DTYPES[dtype].is_float:
        return bits
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & top, ~bits, bits | top)


def served(live: torch.Tensor, dtype: str) -> Bits:
    """Bits of a live tensor as torch rounds it, by whole tensors."""
    return bits_of(live.detach().contiguous().to(TORCH_DTYPES[dtype]).contiguous().cpu()).copy()


def tensor_of(dtype: str, bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(TORCH_DTYPES[dtype])


def disturbed(bits: Bits, share: float) -> Bits:
    """A copy in which about a share of the elements has other bits."""
    random = np.random.default_rng(0)
    other = bits + random.integers(1, 256, bits.size, np.uint8).astype(bits.dtype)
    return np.where(random.random(bits.size) < share, other, bits)


def compared(
    dtype: str, held: BaselineBuffer, live: torch.Tensor, detector: Detector, on_device: bool = False
) -> tuple[ChangeLog, Difference]:
    """``on_device``: as of a live tensor on a device, wherever the baseline is."""
    spec = TensorSpec(NAME, dtype, tuple(live.shape))
    found = ChangeLog(spec.element)
    if isinstance(held, HostBuffer) and not on_device:
        return found, Difference.of(found, detector.collect(spec, held, live, found))
    return found, Difference.of(found, collect_on_device(spec, held, live, found))


def collect_on_device(
    spec: TensorSpec, held: BaselineBuffer, live: torch.Tensor, log: ChangeLog, kernels: Kernels | None = None
) -> Fingerprint:
    """What a publish does with one tensor on a device; by default host memory stands for it."""
    comparer = DeviceComparer(open_queue(live.device), TensorTable([spec]), kernels)
    comparer.add(spec, held, live, log)
    counted = comparer.finish()
    assert counted == {log: log.size}
    changes = comparer.collect()
    assert log.size == sum(counted.values())
    return changes.get(log, Fingerprint())


def check(
    dtype: str,
    old: Bits,
    live: torch.Tensor,
    detector: Detector | None = None,
    hold: Callable[[Bits], BaselineBuffer] = HostBuffer,
    on_device: bool = False,
) -> None:
    """Compare: what is found, the baseline after, and after it was put back."""
    held, new = hold(old.copy()), served(live, dtype)
    found, difference = compared(dtype, held, live, detector or Detector(), on_device)
    assert difference == expected(dtype, old, new)
    assert np.array_equal(held.read(), new)
    found.revert(held)
    assert np.array_equal(held.read(), old)
