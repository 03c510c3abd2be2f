"""Small checkpoints on disk in the names that transformers writes, and their later versions."""

import shutil
from pathlib import Path
from typing import cast

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tools.models.shrinking import EXCEPTIONS, small

Tensors = dict[str, torch.Tensor]
SMALL_ELEMENTS = 2048
"""Up to so many a tensor of one dimension is changed wholly in the last version."""
VERSIONS = 3


class NotBuildableError(Exception):
    """Something outside of this project keeps an architecture from being tried here; the message says what."""


def transformers_class(architecture: str) -> type[transformers.PreTrainedModel] | None:
    """The class whose checkpoints an architecture reads, of its name or of another that vLLM loads by the same class;
    None if transformers has none."""
    from vllm.model_executor.models import registry

    known = {**registry._MULTIMODAL_MODELS, **registry._TEXT_GENERATION_MODELS}
    same = [name for name, where in known.items() if where == known.get(architecture)]
    for name in (architecture, *same):
        found = getattr(transformers, name, None)
        if hasattr(found, "config_class"):
            return cast("type[transformers.PreTrainedModel]", found)
    return None


def write_base(architecture: str, folder: Path) -> Tensors:
    """Write a checkpoint of random weights in the dtypes that transformers serves; what the files hold, by name."""
    cls = transformers_class(architecture)
    if cls is None:
        raise NotBuildableError("transformers has no such class")
    torch.manual_seed(0)
    try:
        config = small(cls.config_class, **EXCEPTIONS.get(architecture, {}))
        model = cls._from_config(config, dtype=torch.bfloat16)
        _keep_wide(model)
    except Exception as error:  # foreign code, which may raise anything of sizes it does not like
        raise NotBuildableError(f"transformers: {said(error)}") from error
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms are made of ones, biases of zeros: of those nothing would be seen that goes to a wrong place.
            parameter.add_(0.05 * torch.randn(parameter.shape).to(parameter.dtype))
    model.config.architectures = [architecture]
    try:
        model.save_pretrained(folder)
    except Exception as error:  # as above
        raise NotBuildableError(f"transformers cannot save it: {said(error)}") from error
    return load_file(folder / "model.safetensors")


def _keep_wide(model: transformers.PreTrainedModel) -> None:
    """As ``from_pretrained``, which ``_from_config`` is not: what the class names stays in float32
    where bfloat16 is served."""
    wide = set(model._keep_in_fp32_modules_strict or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if wide & set(name.split(".")) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def write_version(base: Path, tensors: Tensors, folder: Path) -> None:
    """Write a checkpoint like the base with other weights."""
    folder.mkdir()
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def next_version(tensors: Tensors, version: int) -> Tensors:
    """What training could have made of weights: versions 1 and 2 change about a hundredth of the elements of every
    tensor by small steps, version 3 changes every small one of one dimension wholly. The others share memory."""
    generator = torch.Generator().manual_seed(version)
    return {name: _changed(tensor, version, generator) for name, tensor in tensors.items()}


def _changed(tensor: torch.Tensor, version: int, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    if version == VERSIONS:
        whole = tensor.dim() <= 1 and tensor.numel() <= SMALL_ELEMENTS
        return tensor + 0.1 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype) if whole else tensor
    chosen = torch.rand(tensor.shape, generator=generator) < 0.01
    chosen.view(-1)[int(torch.randint(tensor.numel(), (1,), generator=generator))] = True
    # A step of one unit in the last place of bfloat16, or two: what becomes of numbers near zero is no matter.
    steps = 1 + torch.randint(1, 3, tensor.shape, generator=generator) / 128
    return torch.where(chosen, (tensor.float() * steps + 1e-6).to(tensor.dtype), tensor)
