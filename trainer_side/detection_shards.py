"""Local shards of global tensors: what changed in one, in coordinates of the whole.

Pure functions. A rank that holds a shard compares it with its own baseline; what the ranks find, put together, is what
comparing the whole tensor finds, fingerprint changes included.
"""

import math
from dataclasses import dataclass

import numpy as np

from vllm_delta_sync.errors import TensorMismatchError
from vllm_delta_sync.wire.bits import Bits, Positions
from vllm_delta_sync.wire.fingerprint import Fingerprint, fingerprint_change


@dataclass(frozen=True)
class Shard:
    """A box of a global tensor, such as one rank holds.

    Attributes:
        offsets: where it begins in each dimension. shape: of the box. whole: shape of the global tensor.

    Raises:
        TensorMismatchError: the box is not inside the tensor.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    def __post_init__(self) -> None:
        ranks = {len(self.offsets), len(self.shape), len(self.whole)}
        inside = len(ranks) == 1 and all(
            offset >= 0 and size >= 0 and offset + size <= all_of_it
            for offset, size, all_of_it in zip(self.offsets, self.shape, self.whole, strict=True)
        )
        if not inside:
            raise TensorMismatchError(
                f"shard {list(self.shape)} at {list(self.offsets)} is not inside a tensor {list(self.whole)}; give "
                "offset, local and global size of each dimension"
            )

    def positions(self, local: Positions) -> Positions:
        """Flat positions in the global tensor of (n,) flat positions in the shard; ascending stays ascending.

        Raises:
            TensorMismatchError: a position is outside the shard.
        """
        numel = math.prod(self.shape)
        if local.size and not 0 <= int(local.min()) <= int(local.max()) < numel:
            raise TensorMismatchError(f"positions {local.min()} to {local.max()} are not inside {numel} elements")
        found = np.zeros(local.size, np.int64)
        rest, stride = np.array(local, np.int64), 1
        for offset, size, all_of_it in reversed(list(zip(self.offsets, self.shape, self.whole, strict=True))):
            rest, index = np.divmod(rest, max(1, size))
            found += (index + offset) * stride
            stride *= all_of_it
        return found

    def fingerprint_change(self, name: str, local: Positions, old: Bits, new: Bits) -> Fingerprint:
        """Fingerprint of the global tensor after minus before, as far as this shard changed.

        Args:
            name: of the global tensor. local: (n,) flat positions in the shard; old, new: (n,) their bits.
        """
        return fingerprint_change(name, self.positions(local), old, new)
