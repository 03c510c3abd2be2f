"""Every text architecture that vLLM knows, made small, patched, and compared with a fresh load of the same weights.

Run as ``python -m tests.tools.models``; no engine is started, but the model, its loader and the worker are vLLM's own.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []


def _declare_image_operators() -> None:
    """Let torchvision be imported where its operators were compiled for a torch with CUDA, and cannot be loaded here:
    transformers and models with images import it, and nothing that is tried here calls them."""
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(Path(found.origin).parent / "_C.so")
    except OSError:
        _declared.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


# Before anything imports transformers.
_declare_image_operators()
