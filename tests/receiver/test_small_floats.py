"""Weights in NVFP4, MXFP4 and fp8 with scales in powers of two, on vLLM's modules, loaders and kernel layouts: after
each version, all that a model holds has the bits of a fresh load of what the tool writes of the trainer's weights."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.receiver.small_floats import CASES, VERSIONS
from tests.receiver.test_derived import BLOCK, BlockQuantized, every_tensor, in_fp8, made_of, step
from tests.support.modules import ModulePort
from trainer_side import Publisher
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.model.load_record import record_load
from vllm_delta_sync.engine.model.reload_units import _LiveMemoryGuard
from vllm_delta_sync.settings import Settings

SECONDS = 400
FAST = ("nvfp4 cutlass", "mxfp4 flashinfer", "gpt-oss")
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
    """One process for all that are asked for: importing vLLM takes longer than any case."""
    root = tmp_path_factory.mktemp("small_floats")
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    cases = [spec.params["case"] for spec in chosen if spec is not None and "case" in spec.params]
    command = [sys.executable, "-m", "tests.receiver.small_floats", str(root), *cases]
    done = subprocess.run(command, timeout=SECONDS, capture_output=True, text=True)
    found = {case: root / f"{case}.json" for case in cases}
    assert all(path.exists() for path in found.values()), done.stderr[-6000:]
    return {case: json.loads(path.read_text()) for case, path in found.items()}


@pytest.mark.xdist_group("small_floats")
@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_five_versions_have_the_bits_of_a_fresh_load(rows: dict[str, dict[str, Any]], case: str) -> None:
    row = rows[case]
    assert row["base"] == "reference"
    assert [each["version"] for each in row["seen"]] == list(range(1, VERSIONS + 1))
    for each in row["seen"]:
        assert (each["kind"], each["library"], each["differences"], each["verdict"]) == ("delta", True, [], True)
        assert each["changed"] >= 10
    assert row["rolled_back"] == []
    assert {name.rpartition(".")[2] for name in row["derived"]} == RELOADED[case]


def test_a_step_that_makes_powers_of_two_of_scales_in_place_is_repeated(tmp_path: Path) -> None:
    """As vLLM does on Blackwell before DeepGEMM, by its own function."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    def requantized(model: Any, paths: Iterable[str] | None) -> None:
        requant_weight_ue8m0_inplace(model.weight.data, model.weight_scale_inv.data, (BLOCK, BLOCK))

    generator = torch.Generator().manual_seed(2)
    live = {f"{part}_proj.weight": torch.randn(64, 96, generator=generator).bfloat16() for part in "qk"}
    recipe = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"quantization_config": recipe}))
    save_file(in_fp8(live), base / "model.safetensors")
    model = made_of(in_fp8(live), requantized)
    assert set(torch.frexp(model.weight_scale_inv.data).mantissa.view(-1).tolist()) == {0.5}
    port = ModulePort(model)
    port.ranks[0].folder = str(base)
    receiver = Receiver(port, Settings(bucket=str(tmp_path / "run")))
    with Publisher(lambda: list(live.items()), bucket=str(tmp_path / "run"), base=base) as publisher:
        for version in range(1, 4):
            step(live, version)
            publisher.publish(step=version, wait=True)
            publisher.flush()
            before = every_tensor(model)
            receiver.advance()
            assert every_tensor(model) == every_tensor(made_of(in_fp8(live), requantized)) != before
            assert receiver.verify()["verdict"]


def renamed(model: Any, paths: Iterable[str] | None) -> None:
    model.other = nn.Parameter(model.weight.data.t(), requires_grad=False)
    del model.weight


def replaced(model: Any, paths: Iterable[str] | None) -> None:
    """A new tensor may get the address of one that was freed."""
    shape, dtype = model.weight.shape, model.weight.dtype
    del model.weight
    model.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


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


@pytest.mark.parametrize("process", [replaced, written])
def test_other_or_changed_memory_is_not_that_of_the_former_name(process: Any) -> None:
    record = record_load(BlockQuantized(), process)
    known = record.live.get(("", "weight"))
    if process is written:
        assert known is None
        assert record.changed == {"": {("", "weight")}}
    else:
        assert known is not None  # the new tensor itself, of which routes are refused or reloaded


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
