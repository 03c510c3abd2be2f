"""The kernels of ``DeviceComparer`` in torch operations, for devices without Triton: the same in several passes."""

from collections.abc import Sequence

import torch

from trainer_side.diff.device_memory import BLOCK, BatchMemory, Found, Ordered, PieceBatch, Stretch
from vllm_delta_sync.format.fingerprint import tensor_seed
from vllm_delta_sync.tensors import torch_hash
from vllm_delta_sync.tensors.changes import CHUNK_ELEMENTS
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

TORCH_ELEMENTS = 2048 * BLOCK
"""Elements compared at once, of which each changed one takes some 30 bytes for a moment."""


def compare(
    batch: PieceBatch, lives: Sequence[torch.Tensor], bases: Sequence[torch.Tensor], memory: BatchMemory, found: Found
) -> None:
    """Do ``Kernels.compare``."""
    counters, slot = memory.counters, memory.slot
    for number, (piece, live, base) in enumerate(zip(batch.pieces, lives, bases, strict=True)):
        for start in range(0, piece.size, TORCH_ELEMENTS):
            stretch = slice(start, start + TORCH_ELEMENTS)
            # A copy: the comparison reads more than once, and the trainer may write meanwhile.
            fresh = torch.empty_like(live[stretch], dtype=TORCH_DTYPES[piece.spec.dtype])
            bits = fresh.copy_(live[stretch]).view(base.dtype)
            changed = torch.nonzero(bits != base[stretch]).view(-1)
            used = int(counters[slot])
            counters[slot] += changed.numel()
            counters[memory.first + number] += changed.numel()
            if used + changed.numel() > found.room:
                continue
            room = slice(used, used + changed.numel())
            found.where[room] = changed + start
            found.old[room], found.new[room] = base[stretch][changed], bits[changed]
            blocks = -(-bits.numel() // BLOCK)
            at = piece.first_block + start // BLOCK
            ends = torch.searchsorted(changed, BLOCK * torch.arange(blocks + 1, device=changed.device))
            memory.firsts[at : at + blocks] = used + ends[:-1]
            memory.counts[at : at + blocks] = ends.diff()


def order(stretch: Stretch, found: Found, ordered: Ordered) -> None:
    """Do ``Kernels.order``."""
    device, total = found.where.device, int(stretch.starts[-1])
    starts = torch.from_numpy(stretch.starts).to(device)
    blocks = torch.repeat_interleave(starts.diff())
    firsts = stretch.memory.firsts[stretch.first : stretch.last].long()
    source = firsts[blocks] + torch.arange(total, device=device) - starts[blocks]
    where, old, new = found.where[source], found.old[source], found.new[source]
    ordered.where[:total], ordered.old[:total], ordered.new[:total] = where, old, new
    ordered.relative[:total] = (where % CHUNK_ELEMENTS).to(torch.int16)
    keys = [_key(side) if stretch.batch.kind.is_float else side for side in (old, new)]
    ordered.distances[:total] = keys[1] - keys[0]
    for number, start, stop in stretch.ranges():
        here, piece = slice(start, stop), stretch.batch.pieces[number]
        lanes = torch.empty((5, stop - start), dtype=torch.int64, device=device)
        premixed = torch_hash.premix(tensor_seed(piece.spec.name), where[here].long() + piece.start)
        for side, row in ((old, 0), (new, 2)):
            torch_hash.write_lanes(premixed, side[here], lanes[row], lanes[row + 1], lanes[4])
        ordered.sums[number] = torch.sum(lanes[2:4] - lanes[:2], 1)


def put(stretch: Stretch, ordered: Ordered, bits: torch.Tensor) -> None:
    """Do ``Kernels.put``."""
    for number, start, stop in stretch.ranges():
        stretch.batch.pieces[number].base[ordered.where[start:stop].long()] = bits[start:stop]


def _key(bits: torch.Tensor) -> torch.Tensor:
    """Return the place of floats' patterns in the monotone order, but for a constant."""
    sign, largest = 8 * bits.element_size() - 1, torch.iinfo(bits.dtype).max
    return bits ^ ((bits >> sign) & largest)
