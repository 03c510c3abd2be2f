"""An adapter on a real worker of vLLM: what it computes with is what its version is, across sleep and other writers.

The engine is asked nothing: its worker loads a model and adapters, and its layers are asked one by one. What an engine
says across sleep is compared in tests/e2e/test_features.py.
"""

from typing import Any

import pytest

from tests.e2e.lora_worker import CHECKS
from tests.e2e.warm import see

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("lora")]

FAMILIES = ["qwen3_moe", pytest.param("llama", marks=pytest.mark.slow)]
ASLEEP = "busy: the engine is asleep and its weights are not in memory; wake it up (POST /wake_up, or LLM.wake_up())"


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("lora")
    environment = {"DELTA_SYNC_STATE_DIR": str(root / "state")}
    found: dict[str, Any] = see("tests.e2e.lora_worker", root, request.param, environment=environment)
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_an_adapter_sleeps_with_its_engine(seen: dict[str, Any], level: int) -> None:
    """Asleep it stays at its version, without being ready; awake it is right from the first answer on."""
    assert seen["start"] == [0, True, True]
    slept = seen[f"sleep {level}"]
    assert (slept["to"], slept["verify"]) == (ASLEEP, ASLEEP)
    assert slept["asleep"] == {
        "served": slept["before"],
        "state": "idle",
        "label": f"default;math={slept['before']}",
        "ready": False,
        "reasons": ["the engine is asleep; wake it up (POST /wake_up)"],
    }
    assert (slept["first answer"], slept["plain"]) == (True, True)
    assert (slept["after"], slept["right"], slept["verdicts"]) == (slept["before"] + 1, True, [True, True])


def test_base_and_adapter_sleep_together(seen: dict[str, Any]) -> None:
    slept = seen["with base"]
    assert slept["asleep"] == [ASLEEP, ASLEEP]
    assert (slept["found again"], slept["base"], slept["right"], slept["verdicts"]) == ("", 1, True, [True, True])


def test_verify_finds_a_change_wherever_it_is_and_the_next_call_repairs_it(seen: dict[str, Any]) -> None:
    """In each kind of layer, in what vLLM fills slots from, in the host copy, and in the files."""
    layers = {"v_proj", "model.embed_tokens", "lm_head", "model.layers.1.self_attn.qkv_proj"}
    others = {"zero_slot", "flip_held", "flip_host_copy", "load_another", "change_weights_file", "change_config_file"}
    assert layers | others | {"remove_file", "model.layers.1.self_attn.o_proj"} <= set(seen["changed"])
    for case, found in seen["changed"].items():
        state = found["found"]
        assert found["verdict"] is False, case
        assert (state["served"], state["state"], state["ready"], state["label"]) == (None, "refused", False, "default")
        assert (found["restored"], found["right"], found["verify"]) == (True, True, True), case


def test_verify_names_the_tensors_of_the_layer(seen: dict[str, Any]) -> None:
    path = "base_model.model.model.layers"
    parts = [f"{part}_proj.lora_{side}.weight" for part in "kq" for side in "AB"]
    named = {case: found["mismatched"] for case, found in seen["changed"].items()}
    assert named["v_proj"] == [f"{path}.0.self_attn.{part}" for part in parts]
    assert (
        named["flip_held"]
        == named["model.layers.1.self_attn.qkv_proj"]
        == [f"{path}.1.self_attn.{part}" for part in parts]
    )
    assert named["lm_head"] == [f"base_model.model.lm_head.lora_{side}.weight" for side in "AB"]
    if "model.layers.1.mlp.experts" in named:
        assert all(name.startswith(f"{path}.1.mlp.experts.") for name in named["model.layers.1.mlp.experts"])
    # The adapter has no tensor for this layer, which computes something else nevertheless.
    assert named["model.layers.1.self_attn.o_proj"] == named["zero_slot"]


def test_another_adapter_under_the_same_number_is_noticed_before_the_next_version(seen: dict[str, Any]) -> None:
    noticed = seen["noticed"]
    assert noticed["to"].startswith("fingerprint: served weights are not version")
    assert noticed["to"].endswith("changed from outside (add_lora)")
    assert (noticed["state"]["served"], noticed["state"]["ready"]) == (None, False)
    assert (noticed["after"], noticed["right"]) == (noticed["before"] + 1, True)


def test_a_full_disk_keeps_the_version_served(seen: dict[str, Any]) -> None:
    """Where its files lie: a version and a rollback fail, and succeed once there is room."""
    found = seen["disk full"]
    refused = "engine: the files of adapter 'math' cannot be written: [Errno 27] File too large"
    assert (found.pop("to"), found.pop("back")) == (refused, refused)
    assert found.pop("files") == ["adapter_config.json", "adapter_model.safetensors"]
    assert found.pop("verdicts") == [True, True]
    assert found == dict.fromkeys(("served", "right", "later", "right later"), True)


def test_what_vllm_drops_and_loads_again_is_no_change(seen: dict[str, Any]) -> None:
    assert set(seen["unchanged"]) == {"take_slots", "take_all_places", "remove", "reset"}
    for case, found in seen["unchanged"].items():
        assert found == {"verdicts": [True, True], "to": ["", ""], "right": True}, case
    for found in seen["swapped"].values():
        assert set(found["verdicts"]) == {True}
        assert min(len(found["verdicts"]), found["turns"]) >= CHECKS
        assert found["right"]


def test_verify_writes_nothing_to_the_model(seen: dict[str, Any]) -> None:
    """Of a layer that is not as we know it, it says so."""
    found = seen["out of sight"]
    assert "would write to the model by aten." in found["verify"]
    assert (found["same"], found["verdict"]) == (True, True)


def test_a_run_of_the_same_tensors_with_another_factor_is_loaded(seen: dict[str, Any]) -> None:
    assert seen["replaced"] == {"served": 0, "right": True, "verify": True}


def test_a_second_attach_leaves_files_where_vllm_looks_for_them(seen: dict[str, Any]) -> None:
    found = seen["attached again"]
    assert found == {"moved": False, "made": [], "right": True, "loaded again": True, "verify": True}
