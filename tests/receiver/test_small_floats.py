"""Weights in NVFP4, MXFP4 and fp8 with scales in powers of two, on vLLM's modules, loaders and kernel layouts: after
each version, all that a model holds has the bits of a fresh load of what the tool writes of the trainer's weights."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.e2e import warm
from tests.receiver.small_floats import CASES, VERSIONS
from tests.receiver.test_derived import BlockQuantized
from vllm_delta_sync.engine.model.load_record import record_load
from vllm_delta_sync.engine.model.reload_units import _LiveMemoryGuard

SECONDS = 400
FAST = ("nvfp4 cutlass", "mxfp4 flashinfer", "gpt-oss")
NEEDS_AMX = ("gpt-oss", "ue8m0")
"""vLLM's kernels for stacked MXFP4 experts, and for blocks of fp8, need a processor with AMX."""
LOADED = [case for case in CASES if case not in NEEDS_AMX or torch.cpu._is_amx_tile_supported()]
RELOADED: dict[str, set[str]] = {
    "nvfp4 emulated": {"weight_global_scale", "input_global_scale"},
    "nvfp4 cutlass": {"weight_global_scale", "input_global_scale", "weight_scale"},
    "nvfp4 padded": {"weight_global_scale", "input_global_scale", "weight_scale", "weight_packed"},
    "nvfp4 fbgemm": {"weight_global_scale", "weight_scale"},
    "modelopt emulated": {"weight_scale_2", "input_scale", "weight_scale"},
    "modelopt flashinfer": {"weight_scale_2", "input_scale", "weight_scale"},
    "mxfp4 emulated": set(),
    "mxfp4 flashinfer": {"weight_scale"},
    "ue8m0": {"weight"},
    "gpt-oss": {
        f"{part}_proj_{kind}" for part in ("gate_up", "down") for kind in ("blocks", "scales", "bias")
    },
}  # fmt: skip
"""Case → what is loaded again, because vLLM changes it after loading; the rest is patched where it lies."""


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process for all that are asked for, forked from the one of tests/e2e, which has imported vLLM."""
    root = tmp_path_factory.mktemp("small_floats")
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    cases = [spec.params["case"] for spec in chosen if spec is not None and spec.params.get("case") in LOADED]
    done = warm.run("tests.receiver.small_floats", str(root), *cases, seconds=SECONDS)
    found = {case: root / f"{case}.json" for case in cases}
    assert all(path.exists() for path in found.values()), done.said[-6000:]
    return {case: json.loads(path.read_text()) for case, path in found.items()}


@pytest.mark.xdist_group("engines")
@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_five_versions_have_the_bits_of_a_fresh_load(rows: dict[str, dict[str, Any]], case: str) -> None:
    if case not in LOADED:
        pytest.skip("vLLM's kernel for these weights needs a processor with AMX")
    row = rows[case]
    assert row["base"] == "reference"
    assert [each["version"] for each in row["seen"]] == list(range(1, VERSIONS + 1))
    for each in row["seen"]:
        assert (each["kind"], each["library"], each["differences"], each["verdict"]) == ("delta", True, [], True)
        assert each["changed"] >= 10
    assert row["rolled_back"] == []
    assert {name.rpartition(".")[2] for name in row["derived"]} == RELOADED[case]


def renamed(model: Any, paths: Iterable[str] | None) -> None:
    model.other = nn.Parameter(model.weight.data.t(), requires_grad=False)
    del model.weight


def written(model: Any, paths: Iterable[str] | None) -> None:
    model.other = model.weight
    del model.weight
    model.other.data.view(torch.uint8).add_(1)


def test_memory_under_another_name_is_known_by_its_former_one() -> None:
    model: Any = BlockQuantized()
    record = record_load(model, renamed)
    live = record.live["", "weight"]()
    assert live is not None
    assert live.untyped_storage()._cdata == model.other.untyped_storage()._cdata
    assert record.changed == {}


def test_memory_that_was_written_is_not_that_of_the_former_name() -> None:
    record = record_load(BlockQuantized(), written)
    assert ("", "weight") not in record.live
    assert record.changed == {"": {("", "weight")}}


def test_memory_that_is_copied_to_itself_is_as_before_and_still_what_others_are_made_of() -> None:
    """As vLLM's experts: padded in place where that is of use, and then in the layout of their kernel."""

    def copied(model: Any, paths: Iterable[str] | None) -> None:
        model.weight.data.copy_(model.weight.data)

    def swapped(model: Any, paths: Iterable[str] | None) -> None:
        copied(model, paths)
        model.weight = nn.Parameter(model.weight.data.view(torch.uint8).flip(0).view(model.weight.dtype), False)

    assert record_load(BlockQuantized(), copied).changed == {}
    assert record_load(BlockQuantized(), swapped).changed == {"": {("", "weight")}}


def test_what_a_step_decides_by_has_data_when_it_is_repeated() -> None:
    def deciding(model: Any, paths: Iterable[str] | None) -> None:
        assert not bool(model.weight.float().isnan().any())
        model.largest = model.weight_scale_inv.data.max()

    record = record_load(BlockQuantized(), deciding)
    assert record.changed == {"": {("", "weight"), ("", "weight_scale_inv")}}


def test_a_table_in_use_is_not_moved_to_where_nothing_has_data() -> None:
    table = torch.arange(8.0)
    with _LiveMemoryGuard(nn.Linear(2, 2)) as guard:
        assert table.to("meta").is_meta
        guard.is_processing = True
        assert torch.equal(table.to("meta"), torch.arange(8.0))
        assert table.bfloat16().dtype == torch.bfloat16
