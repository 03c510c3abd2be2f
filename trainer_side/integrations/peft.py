"""``adapter_publisher``: publish a PEFT model's LoRA adapter as a run of its own, beside the base that it belongs to.

The tensors are those of the adapter under PEFT's names, and the run keeps the adapter's ``adapter_config.json``.
Servers with ``--enable-lora`` take the run over under the name in the setting ``lora_name`` or ``lora_adapters``. To
publish the base with the adapter merged instead, give the PEFT model itself to ``Publisher``. Servers refuse what vLLM
does not load, such as DoRA (docs/lora.md).
"""

import json
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
        ModelError: not a PEFT model, no adapter of that name, or the run that is taken over has an adapter of another
            configuration. Otherwise as ``Publisher``.
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

    def tensors() -> list[tuple[str, torch.Tensor]]:
        # False: vLLM leaves out a copy of the base's embedding, and PEFT would ask the Hub whether there is to be one.
        found = get_peft_model_state_dict(peft_model, adapter_name=adapter, save_embedding_layers=False)
        return list(found.items())

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
