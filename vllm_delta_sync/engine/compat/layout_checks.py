"""``check_layout`` refuses layouts of a model over ranks and engines, at start-up, that cannot be kept consistent.

How weights are cut over tensor, pipeline and expert parallel ranks, and copied over data parallel engines, plays no
part here: every rank traces its own loader, and ``shard_ownership`` proves that together they hold every tensor. This
module checks what that proof assumes: every rank can be called, all can be paused together, and nothing else moves
their weights.
"""

from typing import Any

from vllm_delta_sync.errors import EngineError


def check_layout(vllm_config: Any, *, offline: bool = False, missing: list[str] | None = None) -> None:
    """Refuse layouts that cannot be kept consistent.

    Args:
        vllm_config: of the engine, as its client has it.
        offline: whether the engine is an ``LLM`` object and not a server.
        missing: what ``core.hooks.missing_names`` found missing in vLLM's engine core.

    Raises:
        EngineError: names the flag, its value and the remedy.
    """
    parallel = vllm_config.parallel_config
    engines = parallel.data_parallel_size
    if parallel.enable_eplb:
        raise EngineError(
            "--enable-eplb is on: it moves experts between ranks while they serve, so that their addresses change; "
            "turn it off"
        )
    if parallel.enable_elastic_ep:
        raise EngineError("--enable-elastic-ep is on: ranks that are added later hold no version; turn it off")
    if engines == 1:
        return
    if offline:
        raise EngineError(
            f"data_parallel_size is {engines}: an LLM object reaches one engine only; make one LLM for each, or use a "
            "server"
        )
    if missing:
        raise EngineError(
            f"--data-parallel-size is {engines}, and this vLLM's engine core is not as expected (no "
            f"{', '.join(missing)}): its engines cannot be paused together; use 1, or a vLLM release that was tested"
        )
    if not vllm_config.model_config.is_moe:
        return
    if parallel.local_engines_only:
        raise EngineError(
            f"--data-parallel-size is {engines} with external or hybrid load balancing: the engines of a "
            "mixture-of-experts model run in step, and this server reaches only some of them; use internal load "
            "balancing (leave out --data-parallel-external-lb, --data-parallel-hybrid-lb, --data-parallel-rank and "
            "--data-parallel-start-rank)"
        )
    if cannot_exchange_tokens():
        raise EngineError(
            f"--data-parallel-size is {engines} for a mixture of experts on the CPU: vLLM's engines exchange tokens in "
            "every forward pass, and its CPU communicator has no all_gatherv for that, so it would end at the first "
            "request; use 1, and --tensor-parallel-size with --enable-expert-parallel"
        )


def cannot_exchange_tokens() -> bool:
    """Return whether vLLM, on the CPU, cannot pass tokens between data parallel engines. Imports vLLM.

    Cause: its CPU communicator claims to dispatch to experts on other ranks, and lacks the gathering for it.
    Symptom: NotImplementedError in the first forward pass. Remove when: it has that.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    return bool(CpuCommunicator.all_gatherv is DeviceCommunicatorBase.all_gatherv)


def reached_engines(client: Any) -> list[bytes]:
    """Return the identities of the engine cores that a server's client reaches, by data parallel rank."""
    return list(client.engine_core.core_engines)


def ranks_per_engine(client: Any) -> int:
    """Return the number of workers of each engine, which is the number of answers to a call to one engine."""
    return int(client.vllm_config.parallel_config.world_size)
