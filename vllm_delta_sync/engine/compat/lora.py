"""What vLLM's LoRA is asked: does an adapter fit the model, load it in place, forget it, which adapters it holds.

All of this runs in a worker process. ``load`` is vLLM's own call on its worker; ``check_adapter`` finds beforehand
what vLLM would find during a commit, or would not find: it copies tensors of too small a shape into its buffers, and
leaves out modules that the model lacks.
"""

import json
from collections.abc import Collection
from typing import Any

from vllm_delta_sync.engine.protocol import Adapter
from vllm_delta_sync.errors import EngineError, ModelError
from vllm_delta_sync.format.table import TensorSpec, TensorTable

BASE_SUFFIX = ".base_layer.weight"
"""Ends the names of tensors of the base that PEFT saves with an adapter, and that vLLM leaves out."""


def lora_request(adapter: Adapter, in_place: bool = False) -> Any:
    """Return vLLM's request for an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.number, adapter.folder, load_inplace=in_place)


def load(worker: Any, adapter: Adapter) -> None:
    """Load an adapter from its folder, in place of the one of its number. Raises EngineError: vLLM does not load it."""
    try:
        worker.add_lora(lora_request(adapter, in_place=True))
    except Exception as error:  # vLLM raises what its loader raises
        raise EngineError(f"vLLM did not load adapter {adapter.name!r}: {type(error).__name__}: {error}") from error
    if adapter.number not in worker.list_loras():
        raise EngineError(f"vLLM loaded adapter {adapter.name!r} and does not list it")


def forget_all(worker: Any) -> None:
    """Let vLLM forget all adapters, also those that no run follows. It loads each again when a request asks for it.

    Cause: sleep at level 2 discards the device memory of everything that belongs to adapters, and waking up restores
    none of it: the buffers of layers, the map of tokens to adapters, and, where ranks share a head, the order of its
    logits.
    Symptom: requests for an adapter are answered by the base alone, or by wrong logits. Remove when: ``wake_up`` does
    this, as vLLM does after it has replaced weights.
    """
    runner: Any = getattr(worker, "model_runner", None)
    if runner is not None and getattr(runner, "lora_manager", None) is not None:
        runner.reset_lora_state()


def manager_of(worker: Any) -> Any:
    """Return vLLM's manager of a worker's adapters and their layers; None without --enable-lora."""
    return getattr(getattr(getattr(worker, "model_runner", None), "lora_manager", None), "_adapter_manager", None)


def held_adapter(worker: Any, adapter: Adapter) -> Any:
    """Return what vLLM holds of an adapter, another object each time that it was loaded; None if it holds nothing."""
    manager = manager_of(worker)
    while manager is not None:
        try:
            return manager.list_adapters().get(adapter.number)
        except (RuntimeError, KeyError):
            continue  # vLLM loaded or dropped an adapter while the list was copied beside generation
    return None


def tensors_of_modules(worker: Any, table: TensorTable, modules: Collection[str]) -> set[int]:
    """Return the ids of the tensors that belong to these layers of vLLM's; all ids if no tensor belongs to one."""
    manager = manager_of(worker)
    found: dict[str, set[int]] = {name: set() for name in modules}
    for tensor, spec in enumerate(table):
        if spec.name.endswith(BASE_SUFFIX):
            continue
        module, _ = _parse_name(manager, spec.name)
        before, experts, _ = module.partition(".experts")
        name = before + experts if experts else _find_module(manager, module)[0]
        if name in found:
            found[name].add(tensor)
    return set().union(*found.values()) if all(found.values()) else set(range(len(table)))


def check_adapter(worker: Any, name: str, table: TensorTable, config: bytes) -> None:
    """Raise ModelError unless a worker's model takes an adapter.

    Args:
        name: of the adapter, for messages. table: its tensors. config: its adapter_config.json.
    """
    from vllm.lora.peft_helper import PEFTHelper

    manager = manager_of(worker)
    if manager is None:
        raise ModelError(f"adapter {name!r} cannot be served: start vLLM with --enable-lora")
    try:
        helper = PEFTHelper.from_dict(json.loads(config))
    except (ValueError, TypeError) as error:
        raise ModelError(f"adapter {name!r}: its adapter_config.json is not one of LoRA ({error})") from error
    largest = manager.lora_config.max_lora_rank
    found = [spec for spec in table if not spec.name.endswith(BASE_SUFFIX)]
    rank = max([helper.r, *helper.rank_pattern.values(), *(_rank_of(spec) for spec in found)])
    if rank > largest:
        raise ModelError(
            f"adapter {name!r} has rank {rank}, and --max-lora-rank is {largest}; set it to {rank} or more"
        )
    try:
        helper.validate_legal(manager.lora_config)
    except ValueError as error:
        raise ModelError(f"adapter {name!r} is not one that vLLM takes: {error}") from error
    for spec in found:
        _check_tensor(worker, manager, name, spec)


def _rank_of(spec: TensorSpec) -> int:
    """Return the rank that a tensor of an adapter has; 0 if it is not A of a linear layer. Experts may be stacked."""
    is_a = spec.name.endswith(".lora_A.weight") and ".experts" not in spec.name
    return spec.shape[0] if is_a and spec.shape else 0


def _check_tensor(worker: Any, manager: Any, adapter: str, spec: TensorSpec) -> None:
    """Raise ModelError unless the model has the module that a tensor belongs to, with its size."""
    try:
        module, is_a = _parse_name(manager, spec.name)
    except ValueError as error:
        raise ModelError(f"adapter {adapter!r}: tensor {spec.name!r} is not one of LoRA on a linear layer") from error
    if ".experts" in module:
        # Held in other shapes, with many names for one module; vLLM checks these itself.
        return
    name, part = _find_module(manager, module)
    if name is None:
        if worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
            return  # another rank may have it
        raise ModelError(
            f"adapter {adapter!r} is of another base: it changes {module!r}, a module that this model lacks or that "
            "vLLM adapts nothing in; serve the base that it was trained on"
        )
    layer = manager.modules[name]
    expected = _input_size(layer) if is_a else _output_size(layer, part)
    size = spec.shape[-1] if is_a else spec.shape[0]
    if expected is not None and (len(spec.shape) != 2 or size != expected):
        raise ModelError(
            f"adapter {adapter!r} is of another base: tensor {spec.name!r} is {list(spec.shape)}, and {module!r} has "
            f"{expected} {'inputs' if is_a else 'outputs'} in this model; serve the base that it was trained on"
        )


def _parse_name(manager: Any, name: str) -> tuple[str, bool]:
    """Return vLLM's name of the module that a tensor belongs to, and whether it is A. Raises ValueError."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    module, is_a = parse_fine_tuned_lora_name(name, None if mapper is None else mapper.get_rename_mapper())
    return str(module), bool(is_a)


def _find_module(manager: Any, module: str) -> tuple[str | None, int | None]:
    """Return the name of vLLM's layer of a module, and which part of it the module is; (None, None) if none."""
    if module in manager.modules:
        return module, None
    parent, _, leaf = module.rpartition(".")
    for packed, parts in manager.packed_modules_mapping.items():
        name = f"{parent}.{packed}" if parent else packed
        if leaf in parts and name in manager.modules:
            return name, parts.index(leaf)
    return None, None


def _input_size(layer: Any) -> int | None:
    """Return the inputs of a whole linear layer or embedding; None for other layers. Row parallel layers keep both
    sizes."""
    base = layer.base_layer
    # An embedding's input_size is that of its vectors.
    return getattr(base, "org_vocab_size" if hasattr(base, "embedding_dim") else "input_size", None)


def _output_size(layer: Any, part: int | None) -> int | None:
    """Return the outputs of a whole linear layer or embedding, or of one part of a layer; None for other layers."""
    base = layer.base_layer
    if hasattr(base, "embedding_dim"):
        return base.embedding_dim
    if part is None:
        return getattr(base, "output_size", None)
    if not hasattr(base, "output_sizes"):
        return None
    # Where ranks share a head of keys and values, vLLM counts it once per rank.
    return base.output_sizes[part] // (getattr(base, "num_kv_head_replicas", 1) if part else 1)
