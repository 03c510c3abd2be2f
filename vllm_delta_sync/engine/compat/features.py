"""Which of vLLM's options are followed, and which are refused at start-up. docs/features.md has the whole table.

Options that change how ranks hold weights are in ``layout``. Refused here is what would leave weights that no fresh
start from the same version would have, or write weights that are not this engine's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_delta_sync.errors import EngineError

WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that draft from text."""
OWN_WEIGHTS = "draft_model"
"""The one whose drafts come from a whole model of its own; others draft with layers of the served checkpoint, or with
heads that were trained for it."""
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
FLAGS_WITHOUT_PLUGINS = ("--grpc",)
"""Flags of ``vllm serve`` that start a server which loads no endpoint plugins."""


def check_features(vllm_config: Any) -> None:
    """Refuse options that are not followed.

    Args:
        vllm_config: of the engine, as its client has it.

    Raises:
        EngineError: names the flag, its value and what to do instead.
    """
    _check_load_format(vllm_config.load_config.load_format)
    _check_offloading(vllm_config.offload_config)
    if vllm_config.speculative_config is not None:
        _check_speculation(vllm_config.speculative_config, vllm_config.model_config.model)


def _check_load_format(load_format: Any) -> None:
    chosen = str(load_format)
    if chosen == "dummy":
        raise EngineError(
            "--load-format is 'dummy': random weights are no version of any run; use delta_sync, which starts from the "
            "bucket, or leave it out"
        )
    if chosen == "ipc_cache":
        raise EngineError(
            "--load-format is 'ipc_cache': the weights lie in the cache daemon's memory, where patches would reach "
            "every engine that maps them; use auto or delta_sync"
        )


def _check_offloading(offload: Any) -> None:
    """Weights that are elsewhere between two layers have no address to patch."""
    for flag, size in (
        ("--cpu-offload-gb", offload.uva.cpu_offload_gb),
        ("--offload-group-size", offload.prefetch.offload_group_size),
    ):
        if size:
            raise EngineError(
                f"{flag} is {size:g}: offloaded weights are moved while the engine runs, so they have no address to "
                "patch; leave it out, or use more tensor parallel ranks"
            )


def _check_speculation(speculative: Any, served: str) -> None:
    method = str(speculative.method)
    if method in WITHOUT_WEIGHTS:
        return
    if method != OWN_WEIGHTS:
        raise EngineError(
            f"--speculative-config has method {method!r}: its draft weights go with the served checkpoint and would "
            f"stay behind it; use {', '.join(WITHOUT_WEIGHTS)} or {OWN_WEIGHTS}, or leave it out"
        )
    draft = speculative.draft_model_config.model
    if _same_folder(draft, served):
        raise EngineError(
            f"--speculative-config has model {draft!r}, which is the served one: the draft's copy would stay behind; "
            "use another model, or leave it out"
        )


def _same_folder(first: str, second: str) -> bool:
    return first == second or (Path(first).exists() and Path(second).exists() and Path(first).samefile(second))


def check_front_end(environment: Mapping[str, str]) -> None:
    """Refuse vLLM's Rust API server, which loads no plugins: nobody would follow the run.

    Cause: vLLM takes it instead of its own server where ``VLLM_USE_RUST_FRONTEND`` is 1. Symptom: a server without
    /delta_sync, which serves version 0 for ever. Remove when: it has endpoint plugins.

    Raises:
        EngineError: names the variable, its value and what to do instead.
    """
    value = environment.get(RUST_FRONT_END, "0").strip()
    if value not in ("", "0"):
        raise EngineError(
            f"{RUST_FRONT_END} is {value[:20]!r}: vLLM's Rust API server loads no plugins, so nothing would follow the "
            "run; unset it"
        )
