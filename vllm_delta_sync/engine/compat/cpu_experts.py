"""``keep_plain_cpu_experts`` makes CPU mixture-of-experts layers compute from their plain weights.

Cause: after loading, vLLM's unquantized CPU experts pad ``w13_weight`` and ``w2_weight`` and replace them by copies in
the tile order of one kernel; patching would need a repack of every expert at each commit. Symptom: checkpoint elements
lie where no loader would put them, so that the model is refused when routes are proven. Remove when: vLLM has a CPU
experts class that reads unpacked weights (0.33 has none: ``fused_experts_cpu`` takes them, but packs all experts again
in every step).

The computation is vLLM's own in torch operators: sort the routed rows by expert, one matrix product per chosen expert,
vLLM's activation, another product, and the weighted sum in float32. It is registered as an opaque operator, because
graph capture cannot follow loops over data.
"""

import inspect
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from vllm_delta_sync.errors import EngineError

ACTIVATIONS = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
"""vLLM's compiled operator of each gated activation of its CPU experts, except swigluoai, which has none."""
SUM_TOKENS = 256
"""Tokens whose expert outputs are summed at a time: bounds the float32 scratch memory of a long prefill."""

_LIBRARY = "delta_sync"


def keep_plain_cpu_experts() -> None:
    """Make CPU experts that vLLM loads from now on compute from ``w13_weight`` and ``w2_weight`` as loaded.

    Writes to these parameters take effect at the next step. Does nothing on other platforms, to quantized experts,
    or when called again. tests/receiver/test_compat.py checks that the replaced methods are those of vLLM.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as base

    if hasattr(base.apply, "delta_sync"):
        return
    _register_operator()

    bind = inspect.signature(base.apply).bind

    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        given = bind(self, *args, **kwargs).arguments
        # With one expert per token vLLM may have weighted the input already.
        weighted = not given["apply_router_weight_on_input"]
        torch.ops.delta_sync.plain_experts(
            given["output"], given["hidden_states"], given["w1"], given["w2"], self.w1_bias, self.w2_bias,
            given["topk_weights"], given["topk_ids"], given["expert_map"], given["activation"].value, weighted,
        )  # fmt: skip

    apply.delta_sync = True  # type: ignore[attr-defined]
    base.process_weights_after_loading = _check_layer
    base.apply = apply


def _check_layer(experts: Any, layer: Any) -> None:
    """Refuse a layer for which the plain computation would be wrong; changes nothing."""
    config = experts.moe_config
    inner, hidden, activation_name = config.intermediate_size_per_partition, config.hidden_dim, config.activation.value
    w13, w2 = layer.w13_weight, layer.w2_weight
    count = w13.shape[0]
    if activation_name != "swigluoai" and not (
        activation_name in ACTIVATIONS and hasattr(torch.ops._C, ACTIVATIONS[activation_name])
    ):
        raise _unexpected(f"its experts use activation {activation_name!r}, for which it has no plain operator")
    if tuple(w13.shape) != (count, 2 * inner, hidden) or tuple(w2.shape) != (count, hidden, inner):
        raise _unexpected(
            f"w13_weight and w2_weight have shapes {tuple(w13.shape)} and {tuple(w2.shape)}, expected "
            f"{(count, 2 * inner, hidden)} and {(count, hidden, inner)}"
        )


def _unexpected(finding: str) -> EngineError:
    return EngineError(
        f"this vLLM's CPU experts are not as tested: {finding}. Use a vLLM release that this release was tested with"
    )


@cache
def _register_operator() -> torch.library.Library:
    """Register ``plain_experts`` as an operator, which lives as long as the library that is returned."""
    library = torch.library.Library(_LIBRARY, "FRAGMENT")
    library.define("plain_experts" + torch.library.infer_schema(plain_experts, mutates_args=("out",)))
    library.impl("plain_experts", plain_experts, "CPU")
    torch.library.register_fake(f"{_LIBRARY}::plain_experts", lambda *_: None, lib=library)
    return library


def plain_experts(
    out: torch.Tensor, x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, bias13: torch.Tensor | None,
    bias2: torch.Tensor | None, weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None,
    activation: str, weighted: bool,
) -> None:  # fmt: skip
    """Write the weighted sum of each token's experts, over the experts on this rank, into ``out``.

    Args:
        out: (tokens, hidden), the dtype of ``x``.
        x: (tokens, hidden).
        w13: (experts, 2 * inner, hidden), gate above up (interleaved for swigluoai).
        w2: (experts, hidden, inner).
        bias13: (experts, 2 * inner), or None.
        bias2: (experts, hidden), or None.
        weights: (tokens, chosen) of float32.
        ids: (tokens, chosen) of integers: rows of ``w13`` and ``w2``; or of ``expert_map``, if there is one.
        expert_map: under expert parallelism, per expert of the model, its row here, or -1 if another rank has it.
        activation: a key of ACTIVATIONS, or swigluoai.
        weighted: whether ``weights`` apply to the outputs.
    """
    tokens, chosen = ids.shape
    experts = w2.shape[0]
    flat = ids.reshape(-1).long()
    if expert_map is not None:
        local_rows = expert_map.index_select(0, flat).long()
        # Sort experts of other ranks after those of this rank.
        flat = torch.where(local_rows < 0, experts, local_rows)
    order = flat.argsort(stable=True)
    groups = _groups(torch.bincount(flat, minlength=experts)[:experts].tolist())
    rows = x.index_select(0, order // chosen)
    gate_up = x.new_empty(tokens * chosen, w13.shape[1])
    _multiply(gate_up, rows, w13, bias13, groups)
    inner = x.new_empty(tokens * chosen, w2.shape[2])
    if activation == "swigluoai":
        _swigluoai(inner, gate_up)
    else:
        getattr(torch.ops._C, ACTIVATIONS[activation])(inner, gate_up)
    _multiply(rows, inner, w2, bias2, groups)
    # Other ranks add what they compute.
    rows[groups[-1][2] if groups else 0 :].zero_()
    inverse_order = torch.empty_like(order)
    inverse_order[order] = torch.arange(order.numel(), device=order.device)
    factors = (weights if weighted else torch.ones_like(weights)).float().unsqueeze(1)
    for start in range(0, tokens, SUM_TOKENS):
        stop = min(start + SUM_TOKENS, tokens)
        piece = rows.index_select(0, inverse_order[start * chosen : stop * chosen]).float()
        summed = torch.bmm(factors[start:stop], piece.view(stop - start, chosen, -1))
        out[start:stop].copy_(summed.squeeze(1))


def _groups(counts: list[int]) -> list[tuple[int, int, int]]:
    """Return (expert, first row, end row) of each expert that has rows."""
    ends = pairwise(accumulate(counts, initial=0))
    return [(expert, start, end) for expert, (start, end) in enumerate(ends) if start < end]


def _swigluoai(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """Do vLLM's ``SwigluOAIAndMul`` in float32, with its fixed alpha and limit."""
    gate = gate_up[:, ::2].float().clamp(max=7.0)
    up = gate_up[:, 1::2].float().clamp(-7.0, 7.0)
    out.copy_((up + 1) * gate * torch.sigmoid(1.702 * gate))


def _multiply(
    out: torch.Tensor,
    rows: torch.Tensor,
    matrices: torch.Tensor,
    bias: torch.Tensor | None,
    groups: list[tuple[int, int, int]],
) -> None:
    """Do ``out[start:stop] = rows[start:stop] @ matrices[expert].T + bias[expert]`` per group."""
    for expert, start, stop in groups:
        torch.mm(rows[start:stop], matrices[expert].t(), out=out[start:stop])
    if bias is not None:
        for expert, start, stop in groups:
            out[start:stop] += bias[expert]
