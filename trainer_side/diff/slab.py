"""``HostSlab``: the host memory of a baseline in one piece, which CUDA can pin as it is.

torch rounds its own pinned memory up to a power of two per tensor: 29.0 GB for the 15.2 GB of Qwen2.5-7B. A slab takes
the tensors' bytes, and up to 63 between two of them.
"""

import weakref
from collections.abc import Iterable

import numpy as np
import torch

from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.restore import scratch_file
from vllm_delta_sync.tensors.bits import Bits
from vllm_delta_sync.tensors.state import slab_layout

logger = guarded_logger(__name__)

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices, since a model may be on several."""


class HostSlab:
    """Uninitialized memory for some tensors: of the host, or of an unnamed temporary file that is mapped into memory.

    Attributes:
        nbytes: size of the one allocation, which ``slab_layout`` plans.
        places: tensor name → (numel,) bits.
        pinned: whether CUDA devices copy from it directly.

    Raises:
        StoreError: there is no room for the file.
    """

    def __init__(self, specs: Iterable[TensorSpec], on_disk: bool = False) -> None:
        specs = list(specs)
        starts, self.nbytes = slab_layout(specs)
        self._memory = scratch_file(self.nbytes) if on_disk else np.empty(self.nbytes, np.uint8)
        self._tried = on_disk
        self._unregister: weakref.finalize[..., np.ndarray] | None = None
        self.places: dict[str, Bits] = {
            # Plain arrays, whose kernels are found without inspecting their class.
            spec.name: np.asarray(self._memory[start : start + spec.nbytes]).view(spec.element.uint)
            for spec, start in zip(specs, starts, strict=True)
        }

    @property
    def pinned(self) -> bool:
        return self._unregister is not None and self._unregister.alive

    @property
    def pinnable(self) -> bool:
        """Whether ``pin`` may still succeed."""
        return not self._tried

    def pin(self, device: torch.device) -> None:
        """Pin the memory for CUDA devices, at the first call; if that fails, it stays pageable, and the log says so."""
        if self._tried:
            return
        self._tried = True
        error = _register(self._memory, device)
        if error is None:
            # Also without a call of ``close``: memory that is freed must not stay registered.
            self._unregister = weakref.finalize(self._memory, _unregister, self._memory.ctypes.data)
            # The end of the process does it too. A forked child must not: it cannot use CUDA.
            self._unregister.atexit = False
        else:
            logger.warning(
                "%s bytes of the baseline could not be pinned (%s): publish works all the same, but copies to %s are "
                "slower; check the limits of this process and its container for locked memory",
                f"{self.nbytes:,}", error, device,
            )  # fmt: skip

    def close(self) -> None:
        """Unpin the memory; it can still be read. May be called twice."""
        if self._unregister is not None:
            self._unregister()


def _register(memory: np.ndarray, device: torch.device) -> str | None:
    """Pin memory for CUDA devices; return the error if that fails."""
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))
        if code == 0:
            return None
        try:
            # CUDA reports the error once more, at the next kernel, which would be one of the trainer's.
            torch.zeros(1, device=device)
        except RuntimeError:
            pass
    return f"cudaHostRegister returned {code}"


def _unregister(address: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
