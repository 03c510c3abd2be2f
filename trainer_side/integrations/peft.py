"""``adapter_publisher``: publish a PEFT model's LoRA adapter as a run of its own, beside the base that it belongs to.

The tensors are those of the adapter under PEFT's names, and the run keeps the adapter's ``adapter_config.json``.
Servers with ``--enable-lora`` take the run over under the name in the setting ``lora_name`` or ``lora_adapters``. To
publish the base with the adapter merged instead, give the PEFT model itself to ``Publisher``.
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import torch

from trainer_side.model.module import unwrap
from trainer_side.publisher import Publisher
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.process_folders import ProcessFolder
from vllm_delta_sync.tensors.checkpoint import ADAPTER_CONFIG_NAME

__all__ = ["adapter_publisher"]


def adapter_publisher(model: Any, bucket: Any, *, adapter: str = "default", **options: Any) -> Publisher:
    """Return a publisher of one adapter's tensors; each ``publish`` reads their values at that moment.

    Args:
        model: a ``peft.PeftModel``; wrappers such as DistributedDataParallel may be around it.
        bucket: run URL, or a ``Bucket``.
        adapter: the adapter's name in the model. Others are not read.
        options: as ``Publisher``, without ``model``, ``bucket`` and ``files``.

    Raises:
        ModelError: not a PEFT model, no adapter of that name, not one that vLLM loads, or the run that is taken over
            has an adapter of another configuration. Otherwise as ``Publisher``.
    """
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict

    peft_model: Any = unwrap(model, until=(PeftModel,))
    known = peft_model.peft_config if isinstance(peft_model, PeftModel) else {}
    if adapter not in known:
        raise ModelError(
            f"{type(model).__name__} has no adapter {adapter!r}, but {', '.join(map(repr, known)) or 'none'}; give the "
            "PeftModel and one of its adapters"
        )
    config = known[adapter]
    _check_config(adapter, config)

    def tensors() -> list[tuple[str, torch.Tensor]]:
        # False: vLLM leaves out a copy of the base's embedding, and PEFT would ask the Hub whether there is to be one.
        found = get_peft_model_state_dict(peft_model, adapter_name=adapter, save_embedding_layers=False)
        return list(found.items())

    _check_tensors(adapter, tensors())
    with ProcessFolder() as folder:
        was_training, config.inference_mode = config.inference_mode, True
        try:
            config.save_pretrained(str(folder.path))
        finally:
            config.inference_mode = was_training
        publisher = Publisher(tensors, bucket, files=folder.path, **options)
        try:
            _check_same(publisher, (folder.path / ADAPTER_CONFIG_NAME).read_bytes())
        except BaseException:  # including interrupts: the caller gets no publisher to close
            publisher.close()
            raise
        return publisher


MAX_RANK = 512
"""The largest value of vLLM's ``--max-lora-rank``."""

_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Values of ``init_lora_weights`` that leave the base's weights as they are: PiSSA, OLoRA, CorDA and LoftQ do not."""

_REFUSED = (
    "modules_to_save", "trainable_token_indices", "use_dora", "lora_bias", "alora_invocation_tokens",
    "layer_replication", "use_bdlora", "use_qalora",
)  # fmt: skip
"""Fields that make an adapter more than two matrices beside each weight. PEFT marks others as ``is_lora_variant``."""

_TENSORS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")

_INSTEAD = (
    "train without it, or publish the model merged: Publisher(model, …), or Publisher of a copy after "
    "merge_and_unload() where that is refused too"
)


def _check_config(adapter: str, config: Any) -> None:
    """Raise ModelError unless vLLM loads an adapter of this configuration, as its ``PEFTHelper`` decides."""
    from peft import LoraConfig

    if type(config) is not LoraConfig:
        raise ModelError(f"adapter {adapter!r} is {type(config).__name__}, and vLLM loads LoRA only; {_INSTEAD}")
    variants = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    for name in dict.fromkeys([*_REFUSED, *variants]):
        value = getattr(config, name, None)
        if value:
            raise _unloadable(adapter, name, value)
    if config.bias != "none":
        raise _unloadable(adapter, "bias", config.bias)
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise ModelError(
            f"adapter {adapter!r} has init_lora_weights={init!r}, which changed the base's weights, and servers have "
            f"those of the base; give one of {', '.join(_PLAIN_INITS)} or True, or publish the model merged: "
            "Publisher(model, …)"
        )
    for name, rank in {"r": config.r, **(config.rank_pattern or {})}.items():
        if rank > MAX_RANK:
            where = name if name == "r" else f"rank_pattern[{name!r}]"
            raise ModelError(
                f"adapter {adapter!r} has {where}={rank}, and vLLM's --max-lora-rank is {MAX_RANK} at most; give a "
                "lower rank, or publish the model merged: Publisher(model, …)"
            )


def _check_tensors(adapter: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ModelError unless vLLM knows what each tensor is: A or B of a linear layer or embedding."""
    for name, tensor in tensors:
        if not name.endswith(_TENSORS) or tensor.ndim != 2:
            raise ModelError(
                f"adapter {adapter!r} has tensor {name!r} {list(tensor.shape)}, and vLLM loads matrices named "
                f"…{', …'.join(_TENSORS)} only; leave that module out of target_modules, or {_INSTEAD}"
            )


def _unloadable(adapter: str, field: str, value: object) -> ModelError:
    return ModelError(f"adapter {adapter!r} has {field}={repr(value)[:80]}, and vLLM loads plain LoRA only; {_INSTEAD}")


SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""What decides, beside the tensors, what an adapter computes. A run keeps the configuration that it began with."""


def _check_same(publisher: Publisher, config: bytes) -> None:
    """Raise ModelError if a run that was taken over has an adapter that computes something else."""
    kept, own = json.loads(publisher.file(ADAPTER_CONFIG_NAME)), json.loads(config)
    for name in SCALING:
        if kept.get(name) != own.get(name):
            raise ModelError(
                f"the run at {publisher.url} was begun with {name} = {kept.get(name)!r}, and this adapter has "
                f"{own.get(name)!r}; a run keeps its adapter_config.json, so publish to a new URL"
            )
