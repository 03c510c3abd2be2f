"""Speculative decoding: which methods draft with weights, and where vLLM keeps the model that drafts."""

from pathlib import Path
from typing import Any

from vllm_delta_sync.engine.model.draft import Draft
from vllm_delta_sync.errors import EngineError, ModelError

WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods that draft from text."""
OWN_MODEL = "draft_model"
"""The method whose drafts come from a model that could serve by itself; others draft with layers of the served
checkpoint, or with heads that were trained for it."""
UNKNOWN = ("custom_class", "mlp_speculator", "extract_hidden_states")
"""Methods that keep weights where this package does not find them, or that were not tried."""


def check_speculation(speculative: Any) -> None:
    """Refuse methods with weights, or with results computed from weights, that would go stale unseen.

    Args:
        speculative: vLLM's ``SpeculativeConfig``.

    Raises:
        EngineError: names the method.
    """
    if str(speculative.method) in UNKNOWN:
        raise EngineError(
            f"--speculative-config has method {str(speculative.method)!r}: where it keeps its weights is not known, so "
            "they could go stale; use another method, or leave it out"
        )
    if getattr(speculative, "parallel_drafting", False):
        # vLLM computes what stands for the tokens to come once, after loading, and keeps it beside the model.
        raise EngineError(
            "--speculative-config has parallel_drafting: vLLM keeps a result of the draft's weights that patches do "
            "not reach; turn it off, or use another draft"
        )


def draft_of(worker: Any) -> Draft | None:
    """Return the model that drafts on a worker of vLLM; None if there is none, as on ranks that do not draft.

    Raises:
        ModelError: this rank drafts with a model that is not where vLLM keeps it.
    """
    speculative = getattr(getattr(worker, "vllm_config", None), "speculative_config", None)
    if speculative is None or str(speculative.method) in WITHOUT_WEIGHTS:
        return None
    runner = worker.model_runner
    # Names of the runners of vLLM: the second is that of model runner V2.
    drafting = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    if drafting is None:
        return None
    model = getattr(drafting, "model", None)
    # With breakable CUDA graphs it is wrapped.
    model = getattr(model, "unwrap", lambda: model)()
    if model is None or not hasattr(model, "load_weights"):
        raise ModelError(
            f"this rank drafts with {type(drafting).__name__}, which has no model that can be loaded again: its "
            "weights would go stale; use another method for --speculative-config, or leave it out"
        )
    config, served = speculative.draft_model_config, speculative.target_model_config.model
    own_checkpoint, is_head = not same_folder(config.model, served), str(speculative.method) != OWN_MODEL
    return Draft(model, folder_of(config), own_checkpoint, is_head)


def is_draft(model_config: Any) -> bool:
    """Return whether a ``ModelConfig`` of vLLM is that of a draft."""
    return getattr(model_config, "runner", None) == "draft"


def folder_of(model_config: Any) -> str:
    """Return what a ``ModelConfig`` of vLLM loads from: a folder, or a public model with the revision that was set."""
    model, revision = str(model_config.model), model_config.revision
    return model if revision is None or Path(model).exists() else f"{model}@{revision}"


def same_folder(first: str, second: str) -> bool:
    """Return whether two models are one: the same name, or the same folder."""
    return first == second or (Path(first).exists() and Path(second).exists() and Path(first).samefile(second))
