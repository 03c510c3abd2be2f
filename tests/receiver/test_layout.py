"""Which layouts are followed, and what is said to whoever asks for another."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_delta_sync.engine.layout import check_layout
from vllm_delta_sync.errors import EngineError


def config(moe: bool = False, **parallel: Any) -> Any:
    settings = {
        "data_parallel_size": 1,
        "enable_eplb": False,
        "enable_elastic_ep": False,
        "local_engines_only": False,
        **parallel,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**settings),
        model_config=SimpleNamespace(is_moe=moe),
    )


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(config(), id="one engine"),
        pytest.param(config(data_parallel_size=2), id="engines that know nothing of each other"),
        pytest.param(config(data_parallel_size=4, local_engines_only=True), id="dense, other servers have the rest"),
    ],
)
def test_layouts_that_are_followed(found: Any) -> None:
    check_layout(found)


@pytest.mark.parametrize(
    ("found", "given", "says"),
    [
        pytest.param(config(enable_eplb=True), {}, "--enable-eplb is on", id="experts that move"),
        pytest.param(config(enable_elastic_ep=True), {}, "--enable-elastic-ep is on", id="ranks that come and go"),
        pytest.param(config(data_parallel_size=2), {"offline": True}, "data_parallel_size is 2", id="LLM object"),
        pytest.param(
            config(data_parallel_size=2), {"missing": ["run_busy_loop"]}, r"no run_busy_loop\)", id="no guard"
        ),
        pytest.param(
            config(moe=True, data_parallel_size=2, local_engines_only=True),
            {},
            "external or hybrid load balancing",
            id="engines in step, out of reach",
        ),
    ],
)
def test_layouts_that_are_refused(found: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        check_layout(found, **given)


def test_engines_in_step_are_refused_where_vllm_cannot_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    in_step = config(moe=True, data_parallel_size=2)
    with pytest.raises(EngineError, match="exchange tokens"):
        check_layout(in_step)
    monkeypatch.setattr(CpuCommunicator, "all_gatherv", lambda *args: None)
    check_layout(in_step)
