"""``adapter_publisher``: publish a PEFT model's LoRA adapter as a run of its own, beside the base that it belongs to.

The tensors are those of the adapter under PEFT's names, and the run keeps the adapter's ``adapter_config.json``.
Servers with ``--enable-lora`` take the run over under the name in the setting ``lora_name`` or ``lora_adapters``. To
publish the base with the adapter merged instead, give the PEFT model itself to ``Publisher``. Servers refuse what vLLM
does not load, such as DoRA (docs/lora.md).
"""

from collections.abc import Iterator
from typing import Any

import torch

from trainer_side.model.module import unwrap, without_wrappers, wrapper_prefixes
from trainer_side.publisher import Publisher
from trainer_side.ranks.given_parts import Part
from trainer_side.ranks.group import in_world
from vllm_delta_sync.errors import ModelError, UsageError
from vllm_delta_sync.process_folders import ProcessFolder
from vllm_delta_sync.tensors.torch_sharding import is_sharded, local_boxes

__all__ = ["adapter_publisher"]


def adapter_publisher(model: Any, bucket: Any, *, adapter: str = "default", **options: Any) -> Publisher:
    """Return a publisher of one adapter's tensors; each ``publish`` reads their values at that moment.

    An adapter whose tensors are sharded (FSDP2, ZeRO-3) is published by all ranks of the world together: each calls
    this, and the publisher's methods, at the same points of the program (docs/sharded.md). Otherwise one rank calls
    it, also if the model is wrapped in DistributedDataParallel.

    Args:
        model: a ``peft.PeftModel``; wrappers such as DistributedDataParallel may be around it.
        bucket: run URL, or a ``Bucket``.
        adapter: the adapter's name in the model. Others are not read.
        options: as ``Publisher``, without ``model``, ``bucket`` and ``files``.

    Raises:
        ModelError: not a PEFT model, no adapter of that name, or the run that is taken over has an adapter of another
            configuration. Otherwise as ``Publisher``.
    """
    tensors = AdapterTensors(model, adapter)
    config, inner = tensors.config, type(unwrap(tensors.model))
    # FSDP2 gives a module a class of its own, derived from the model's.
    base = next((cls for cls in inner.__mro__ if not cls.__module__.startswith("torch.")), inner)
    # As PEFT writes it: without task_type, AutoPeftModel finds the base's class by this.
    mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    with ProcessFolder() as folder:
        was_training, config.inference_mode = config.inference_mode, True
        try:
            config.save_pretrained(str(folder.path), auto_mapping_dict=None if config.task_type else mapping)
        finally:
            config.inference_mode = was_training
        if tensors.are_sharded:
            return Publisher(None, bucket, files=folder.path, parts=tensors.parts, **options)
        return Publisher(tensors.whole, bucket, files=folder.path, **options)


def adapter_name(adapter: bool | str) -> str | None:
    """Return the name of the adapter that an integration publishes alone; None if it publishes the model."""
    return "default" if adapter is True else adapter or None


def check_adapter_options(adapter: bool | str, options: dict[str, Any]) -> None:
    """Raise UsageError if an option of ``Publisher`` is given that does not fit an adapter alone."""
    unfit = sorted({"base", "files", "include", "exclude", "rename"} & options.keys())
    if adapter and unfit:
        raise UsageError(
            f"{unfit[0]}= is given with adapter={adapter!r}: the run of an adapter has the tensors and the "
            "configuration that PEFT saves; leave it out"
        )


class AdapterTensors:
    """The tensors of one adapter of a PEFT model, under PEFT's names, with their values at each call.

    Attributes:
        model: the ``PeftModel``, without wrappers. config: the adapter's ``LoraConfig``.
    """

    def __init__(self, model: Any, adapter: str = "default") -> None:
        """Find the adapter. Raises ModelError: not a PEFT model, or it has no adapter of that name."""
        from peft import PeftModel

        self.model: Any = unwrap(model, until=(PeftModel,))
        known = self.model.peft_config if isinstance(self.model, PeftModel) else {}
        if adapter not in known:
            raise ModelError(
                f"{type(model).__name__} has no adapter {adapter!r}, but {', '.join(map(repr, known)) or 'none'}; give "
                "the PeftModel and one of its adapters"
            )
        self._adapter, self.config = adapter, known[adapter]

    @property
    def are_sharded(self) -> bool:
        """Whether a process has boxes of them, though perhaps of each tensor all, as in a world of one."""
        return any(is_sharded(tensor) for _, tensor in self.whole())

    @property
    def need_ranks(self) -> bool:
        """Whether all ranks of a world have to publish it together."""
        return in_world() and self.are_sharded

    def whole(self) -> list[tuple[str, torch.Tensor]]:
        """Return (name, tensor) as this process has it."""
        from peft.utils import get_peft_model_state_dict

        # PEFT looks for the names of modules. Some wrappers, as for activation checkpointing, take themselves out of a
        # state dict's names, and others, as of torch.compile, do not.
        wrapped = [pair for pair in wrapper_prefixes(self.model) if pair[0] != "base_model.model."]  # but PEFT's own
        held = *self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers(remove_duplicate=False)
        names = {without_wrappers(name, wrapped): name for name, _ in held}
        # Parameters as they are, since a detached one of ZeRO-3 no longer says that it is sharded.
        state = {names.get(key, key): tensor for key, tensor in self.model.state_dict(keep_vars=True).items()}
        # False: vLLM leaves out a copy of the base's embedding, and PEFT would ask the Hub whether there is to be one.
        found = get_peft_model_state_dict(
            self.model, state_dict=state, adapter_name=self._adapter, save_embedding_layers=False
        )
        return [(without_wrappers(name, wrapped), tensor) for name, tensor in found.items()]

    def parts(self) -> Iterator[Part]:
        """Yield what this rank holds."""
        for name, tensor in self.whole():
            for box, piece in local_boxes(tensor, name):
                yield Part(name, box.whole, box.offsets, piece)
