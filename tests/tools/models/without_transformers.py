"""Small checkpoints of architectures that transformers does not know, in the names that vLLM's loader reads.

vLLM builds the model from a config with the fields that such configs share; its parameters, with fused projections and
experts taken apart as the model's own mappings say, are the checkpoint. Whether these are the names that published
checkpoints have is not shown by this, only that what the loader reads is patched right.
"""

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.tools.models import vllm_side
from tests.tools.models.checkpoints import NotBuildableError, Tensors, said
from tests.tools.models.shrinking import EXPERTS, HEAD, HIDDEN, INNER, SIZES, VOCABULARY

_GROUPS: list[tuple[Any, str]] = [
    ("silu", "activation_function hidden_activation"),
    ("sigmoid", "score_func score_function scoring_func"),
    ("GQA", "att_impl_type"),
    (None, "router_dtype"),
    ([], "mlp_only_layers"),
    (True, "norm_after_topk norm_topk_prob use_qk_norm"),
    (False, "multi_gate use_bias use_mup use_qkv_bias"),
    (0.0, "embedding_dropout output_dropout"),
    (1.0, "embedding_multiplier routed_scaling_factor scale_depth scale_emb"),
    (1e-5, "layer_norm_eps layer_norm_epsilon layernorm_epsilon"),
    (1e4, "rope_theta"),
    (1, "decoder_sparse_step moe_layer_freq"),
    (2, "layer_group_size"),
    (HEAD, "query_pre_attn_scalar"),
    (64, "expert_hidden_dim"),
    (HIDDEN, "dim_model_base"),
    (VOCABULARY, "padded_vocab_size"),
    (512, "max_position_embedding"),
]
GUESSES: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "sliding_window"},
    **{name: value for value, names in _GROUPS for name in names.split()},
}
"""What a field is given that a model asks for; some have more than one name among models."""
_ASKED = re.compile(r"has no attribute '(\w+)'")
_MOST = 24
_ROUTED: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_LATENT = {name: SIZES[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")}
FIELDS: dict[str, dict[str, Any]] = {
    "DeepseekForCausalLM": _ROUTED,
    "MistralLarge3ForCausalLM": {**_ROUTED, **_LATENT, "v_head_dim": HEAD},
    "PanguProMoEV2ForCausalLM": _ROUTED,
    "PanguUltraMoEForCausalLM": {**_ROUTED, **_LATENT, "v_head_dim": HEAD},
    "Plamo3ForCausalLM": {"layer_types": ["sliding_attention", "full_attention"], "window_size": 32},
    "Rnj1ForCausalLM": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    "SarvamMLAForCausalLM": {**_ROUTED, **_LATENT, "v_head_dim": HEAD, "num_experts": EXPERTS},
}
"""Fields that models do not ask for in this way, or that have to be others."""


def write_base(architecture: str, folder: Path) -> Tensors:
    """Write a checkpoint of random weights; what it holds, by name."""
    # The worker makes groups of ranks for experts only if there are any.
    _config("LlamaForCausalLM", {"num_experts": EXPERTS}).save_pretrained(folder)
    vllm_side.started_worker(vllm_side.worker_config(folder))
    fields = dict(FIELDS.get(architecture, {}))
    for _ in range(_MOST):
        _config(architecture, fields).save_pretrained(folder)
        try:
            model = vllm_side.fresh_model(vllm_side.worker_config(folder, load_format="dummy"), folder)
            break
        except Exception as error:  # foreign code, which may raise anything of a config that it does not like
            asked = _ASKED.search(str(error))
            if asked is None or asked[1] in fields or asked[1] not in GUESSES:
                raise NotBuildableError(f"no such class in transformers, and vLLM: {said(error)}") from error
            fields[asked[1]] = GUESSES[asked[1]]
    else:
        raise NotBuildableError("no such class in transformers, and its config has too many fields to guess")
    torch.manual_seed(0)
    tensors = {name: (0.05 * torch.randn(shape)).to(dtype) for name, shape, dtype in named(model)}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def _config(architecture: str, fields: dict[str, Any]) -> transformers.PretrainedConfig:
    # Of a type that takes any field.
    common = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": HEAD}
    counts = {name: SIZES[name] for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
    config = transformers.LlamaConfig(**{**common, **counts, "max_position_embeddings": 512, **fields})
    config.architectures, config.dtype = [architecture], torch.bfloat16
    return config


def named(model: Any, fused: dict[str, list[str]] | None = None) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of what the loader is to read. ``fused``: projections of which the model does not say so."""
    packed: dict[str, list[str]] = (fused or {}) | getattr(model, "packed_modules_mapping", {})
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    for same in names.values():
        # Of shared modules and tied heads the name that checkpoints have.
        name = min(same, key=lambda name: ("lm_head" in name, len(name)))
        tensor = model.get_parameter(name)
        path, _, last = name.rpartition(".")
        if last in ABSORBED:
            continue
        owner, _, module = path.rpartition(".")
        sizes = _parts(model.get_submodule(path))
        shape = _unpadded(model.get_submodule(path), tensor)
        if module == "routed_experts" and last.startswith(("w13_weight", "w2_weight")):
            for part in _experts(model, last):
                inner = (tensor.shape[1] // 2, *tensor.shape[2:]) if last.startswith("w13") else tuple(tensor.shape[1:])
                found[f"{owner.removesuffix('.experts')}.{part}{last.partition('_')[2]}"] = inner, tensor.dtype
        elif sizes and len(packed.get(module, ())) == len(sizes):
            for part, size in zip(packed[module], sizes, strict=True):
                found[f"{owner}.{part}.{last}"] = (size, *tensor.shape[1:]), tensor.dtype
        else:
            found[name.replace(".routed_experts.", ".")] = shape, tensor.dtype
    return [(name, shape, dtype) for name, (shape, dtype) in found.items()]


def _parts(module: Any) -> list[int]:
    """Rows of each of the projections that a linear layer fuses."""
    sizes = getattr(module, "output_sizes", None)
    return list(sizes) if sizes else []


def _unpadded(module: Any, tensor: torch.Tensor) -> tuple[int, ...]:
    rows = getattr(module, "org_vocab_size", None)
    return (rows, *tensor.shape[1:]) if rows is not None else tuple(tensor.shape)


ABSORBED = ("W_UK_T", "W_UV")
"""Made of other weights after loading."""
EXPERT_NAMES = {"PhiMoEForCausalLM": ("w1", "w3", "w2")}
"""Of gate, up and down, where the model itself does not say."""


def _experts(model: Any, parameter: str) -> list[str]:
    """Beginnings of checkpoint names, ``experts.0.gate_proj.`` and so on, of what becomes one parameter of experts."""
    owner = next((m for m in (model, *model.children()) if hasattr(m, "get_expert_mapping")), None)
    if owner is None:
        known = EXPERT_NAMES.get(type(model).__name__, ("gate_proj", "up_proj", "down_proj"))
        kinds = known[:2] if parameter.startswith("w13") else known[2:]
        return [f"experts.{expert}.{kind}." for expert in range(EXPERTS) for kind in kinds]
    wanted = parameter.partition("_")[0] + "_"
    return [part for target, part, *_ in owner.get_expert_mapping() if target.endswith(wanted)]
