"""``check_features`` refuses vLLM options at start-up that the receiver does not support; docs/features.md lists them.

``layout_checks`` handles options that change how ranks hold weights. An option is refused here if it would leave
weights that a fresh start from the same version would not have, or if patches would reach weights of other engines.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_delta_sync.errors import EngineError

WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that draft from text."""
OWN_WEIGHTS = "draft_model"
"""The method whose drafts come from a separate model; others draft with layers of the served checkpoint, or with heads
that were trained for it."""
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
FLAGS_WITHOUT_PLUGINS = ("--grpc",)
"""Flags of ``vllm serve`` that start a server which loads no endpoint plugins."""


def check_features(vllm_config: Any) -> None:
    """Refuse unsupported options.

    Args:
        vllm_config: of the engine, as its client has it.

    Raises:
        EngineError: names the flag, its value and the remedy.
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
    """Refuse offloading: offloaded weights have no fixed address to patch."""
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
            f"--speculative-config has method {method!r}: its draft weights belong to the served checkpoint and would "
            f"go stale; use {', '.join(WITHOUT_WEIGHTS)} or {OWN_WEIGHTS}, or leave it out"
        )
    draft = speculative.draft_model_config.model
    if _same_folder(draft, served):
        raise EngineError(
            f"--speculative-config has model {draft!r}, which is the served one: the draft's copy would go stale; use "
            "another model, or leave it out"
        )


def _same_folder(first: str, second: str) -> bool:
    return first == second or (Path(first).exists() and Path(second).exists() and Path(first).samefile(second))


def check_front_end(environment: Mapping[str, str]) -> None:
    """Refuse vLLM's Rust API server, which loads no plugins, so that nothing would follow the run.

    Cause: vLLM uses it instead of its own server where ``VLLM_USE_RUST_FRONTEND`` is 1. Symptom: a server without
    /delta_sync, which serves version 0 forever. Remove when: it has endpoint plugins.

    Raises:
        EngineError: names the variable, its value and the remedy.
    """
    value = environment.get(RUST_FRONT_END, "0").strip()
    if value not in ("", "0"):
        raise EngineError(
            f"{RUST_FRONT_END} is {value[:20]!r}: vLLM's Rust API server loads no plugins, so nothing would follow the "
            "run; unset it"
        )
