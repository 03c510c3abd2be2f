"""PEFT models: published merged into their base, bit for bit as ``merge_and_unload`` of a copy; adapters as runs."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, BdLoraConfig, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.config import KasaConfig, VeloraConfig
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from tests.support.adapters import TARGETS, adapted, randomize
from tests.support.architectures import qwen3, qwen3_moe, same_bits, saved, train
from tests.support.publishing import assert_holds, snapshot
from trainer_side import Publisher
from trainer_side.integrations.peft import adapter_publisher
from trainer_side.model.sources import live_tensors
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.maintenance.branch import branch

EXPERTS: dict[str, Any] = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def merged(model: PeftModel, folder: Path) -> dict[str, torch.Tensor]:
    """What PEFT merges and transformers saves, of a copy."""
    return saved(copy.deepcopy(model).merge_and_unload(), folder)


def two_adapters(model: PreTrainedModel) -> PeftModel:
    found = adapted(model)
    found.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM"))
    randomize(found, 1)
    # Both are merged, in this order; PeftModel itself activates only one.
    found.base_model.set_adapter(["other", "default"])
    return found


CASES: dict[str, Callable[[], PeftModel]] = {
    "float32": lambda: adapted(qwen3()),
    "bfloat16 under float32 adapters": lambda: adapted(qwen3().bfloat16()),
    "bfloat16": lambda: adapted(qwen3().bfloat16()).bfloat16(),
    "float16": lambda: adapted(qwen3().half()).half(),
    "rank-stabilized": lambda: adapted(qwen3(), use_rslora=True, rank_pattern={"down_proj": 3}),
    "embedding": lambda: adapted(qwen3(tied=False).bfloat16(), target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "modules to save": lambda: adapted(qwen3(tied=False), modules_to_save=["lm_head", "norm"]),
    "biases": lambda: adapted(qwen3(attention_bias=True), bias="all"),
    "two adapters": lambda: two_adapters(qwen3().bfloat16()),
    "experts": lambda: adapted(qwen3_moe().bfloat16(), target_modules=["q_proj"], **EXPERTS),
}


@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_tensors_are_those_of_merge_and_unload(build: Callable[[], PeftModel], tmp_path: Path) -> None:
    model = build()
    before = snapshot(model.state_dict())
    expected = merged(model, tmp_path)
    base = saved(copy.deepcopy(model).unload(), tmp_path / "base")
    read = dict(live_tensors(model).read())
    assert read.keys() == expected.keys()
    assert [name for name in expected if not same_bits(read[name], expected[name])] == []
    changed = [name for name in expected if not same_bits(base[name], expected[name])]
    assert changed, "the adapter does too little to tell"
    assert [name for name, tensor in model.state_dict().items() if not same_bits(tensor, before[name])] == []


def test_versions_follow_training(url: str, tmp_path: Path) -> None:
    model = adapted(qwen3())
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    history = [merged(model, tmp_path / "0")]
    with Publisher(model, url) as publisher:
        for step in range(1, 4):
            train(model, optimizer)
            publisher.publish(step=step, wait=True)
            history.append(merged(model, tmp_path / str(step)))
    run = open_run(url)
    for version, weights in enumerate(history):
        assert_holds(run, version, weights)
    assert "config.json" in {file.name for file in run.info.files}
    moved = {name.split(".")[-2] for name in history[0] if not same_bits(history[0][name], history[3][name])}
    assert moved == set(TARGETS)


def test_adapters_that_transformers_adds_and_peft_has_merged(tmp_path: Path) -> None:
    model = qwen3()
    model.add_adapter(LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False))
    wrapped = adapted(qwen3())
    expected = merged(wrapped, tmp_path)
    assert model.peft_config
    assert dict(live_tensors(model).read()).keys() == expected.keys()
    wrapped.merge_adapter()
    read = dict(live_tensors(nn.DataParallel(wrapped)).read())
    assert [name for name in expected if not same_bits(read[name], expected[name])] == []


def test_the_active_adapter_is_read(tmp_path: Path) -> None:
    model = two_adapters(qwen3())
    live = live_tensors(model)
    model.set_adapter("other")
    expected = merged(model, tmp_path)
    read = dict(live.read())
    assert [name for name in expected if not same_bits(read[name], expected[name])] == []


REFUSED: dict[str, tuple[Callable[[], PeftModel], str]] = {
    "dora": (lambda: adapted(qwen3(), use_dora=True), r"q_proj' has adapter 'default', a variant of LoRA \(DoraLinear"),
    "bias": (
        lambda: adapted(qwen3(attention_bias=True), target_modules=["q_proj"], lora_bias=True),
        "q_proj' has adapter 'default', LoRA with a bias",
    ),
    "tied": (lambda: adapted(qwen3(), target_modules=["embed_tokens"]), "has a LoRA adapter and is tied to"),
    "tokens": (
        lambda: adapted(qwen3(), trainable_token_indices=[1, 2]),
        "embed_tokens' is PEFT's TrainableTokensWrapper",
    ),
    "other method": (
        lambda: get_peft_model(qwen3(), AdaLoraConfig(target_modules=TARGETS, total_step=10)),
        "carries PEFT adapters, of which 'default' is ADALORA, not LORA",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        live_tensors(build())


def test_an_adapter_is_a_run_of_its_own(url: str, tmp_path: Path) -> None:
    model = two_adapters(qwen3())
    with adapter_publisher(nn.DataParallel(model), url) as publisher:
        model.save_pretrained(tmp_path / "0")
        randomize(model, 7)
        publisher.publish(step=1, wait=True)
        model.save_pretrained(tmp_path / "1")
    run = open_run(url)
    for version in (0, 1):
        assert_holds(run, version, load_file(tmp_path / str(version) / "adapter_model.safetensors"))
    assert json.loads(run.file("adapter_config.json")) == json.loads(
        (tmp_path / "1" / "adapter_config.json").read_text()
    )
    assert model.peft_config["default"].inference_mode is False
    with adapter_publisher(model, f"{url}-other", adapter="other") as publisher:
        assert publisher.version == 0
    assert len(open_run(f"{url}-other").table) == len(load_file(tmp_path / "1" / "other" / "adapter_model.safetensors"))


def test_a_branch_goes_on_with_deltas_between_related_adapters(url: str) -> None:
    model = adapted(qwen3())
    with adapter_publisher(model, url) as publisher:
        randomize(model, 1)
        publisher.publish(step=1, wait=True)
    branch(open_run(url), 1, f"{url}-branch")
    with adapter_publisher(model, f"{url}-branch") as publisher:
        randomize(model, 2)
        assert publisher.publish(step=2, wait=True).kind == "delta"
    assert_holds(open_run(f"{url}-branch"), 1, get_peft_model_state_dict(model))
    with pytest.raises(ModelError, match="was begun with lora_alpha = 6, and this adapter has 8"):
        adapter_publisher(adapted(qwen3(), lora_alpha=8), url)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(qwen3, "Qwen3ForCausalLM has no adapter 'default', but none", id="no peft"),
        pytest.param(
            lambda: get_peft_model(qwen3(), AdaLoraConfig(target_modules=TARGETS, total_step=10)),
            "is AdaLoraConfig",
            id="other method",
        ),
        pytest.param(
            lambda: get_peft_model(nn.Sequential(nn.Conv1d(4, 4, 3)), LoraConfig(target_modules=["0"])),
            r"has tensor 'base_model.model.0.lora_A.weight' \[8, 4, 3\], and vLLM loads matrices",
            id="convolution",
        ),
    ],
)
def test_what_is_no_adapter_of_lora_is_refused(build: Callable[[], nn.Module], message: str, url: str) -> None:
    with pytest.raises(ModelError, match=message):
        adapter_publisher(build(), url)


ACCEPTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled by the root of the rank": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "largest rank": {"r": 512, "target_modules": ["q_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "some layers": {"layers_to_transform": [0]},
    "no first values": {"init_lora_weights": False},
    "gaussian": {"init_lora_weights": "gaussian"},
    "eva": {"init_lora_weights": "eva"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "lora_ga": {"init_lora_weights": "lora_ga"},
}
UNLOADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"r": 513, "target_modules": ["q_proj"]}, "r=513"),
    "rank of a module": ({"rank_pattern": {"q_proj": 600}}, r"rank_pattern\['q_proj'\]=600"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
    "tokens": ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices=\[1, 2\]"),
    "dora": ({"use_dora": True}, "use_dora=True"),
    "bias of LoRA": ({"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias=True"),
    "biases": ({"bias": "all"}, "bias='all'"),
    "biases of targets": ({"bias": "lora_only"}, "bias='lora_only'"),
    "activated": ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens=\[1\]"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication=.*"),
    "blocks": (
        {"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj", "v_proj"], target_modules_bd_b=["down_proj"])},
        "use_bdlora=BdLoraConfig.*",
    ),
    "qalora": ({"use_qalora": True, "qalora_group_size": 4}, "use_qalora=True"),
    "kasa": ({"kasa_config": KasaConfig()}, "kasa_config=KasaConfig.*"),
    "velora": ({"velora_config": VeloraConfig(num_groups=2)}, "velora_config=VeloraConfig.*"),
    **{
        init: ({"init_lora_weights": init}, f"init_lora_weights='{init}', which changed the base's weights")
        for init in ("olora", "pissa", "pissa_niter_2", "corda", "loftq")
    },
}
NEEDS_DATA = ("corda", "loftq")
"""Values of ``init_lora_weights`` that need data, or another package; set afterwards, which saves the same files."""


def with_options(options: dict[str, Any]) -> PeftModel:
    init = options.get("init_lora_weights")
    given = {**options, "init_lora_weights": True} if init in NEEDS_DATA else options
    made = adapted(qwen3(tied=False, attention_bias=True), **given)
    if init in NEEDS_DATA:
        made.peft_config["default"].init_lora_weights = init
    return made


def vllm_loads(folder: Path) -> bool:
    """Whether vLLM takes an adapter that PEFT has saved, with the largest rank that a server can have."""
    from vllm.config.lora import LoRAConfig as ServersConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), None)
    modules = {name.split(".")[-1] for name, module in qwen3().named_modules() if not list(module.children())}
    try:
        helper.validate_legal(ServersConfig(max_lora_rank=512))
        LoRAModel.from_local_checkpoint(str(folder), modules, helper, lora_model_id=1, device="cpu")
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("case", [*ACCEPTED, *UNLOADABLE])
def test_what_vllm_does_not_load_is_refused_by_field_and_the_rest_is_not(case: str, url: str, tmp_path: Path) -> None:
    options, message = UNLOADABLE[case] if case in UNLOADABLE else (ACCEPTED[case], None)
    model = with_options(options)
    model.save_pretrained(tmp_path)
    assert vllm_loads(tmp_path) is (message is None)
    if message is None:
        adapter_publisher(model, url).close()
        assert open_run(url).head().version == 0
        return
    with pytest.raises(ModelError, match=f"adapter 'default' has {message}.* publish the model merged"):
        adapter_publisher(model, url)
    assert not list(Path(url).glob("*"))


def test_every_field_that_vllm_reads_is_known() -> None:
    """A release of vLLM that reads another one has to be looked at."""
    from vllm.lora.peft_helper import PEFTHelper

    options = [*ACCEPTED.values(), *(options for options, _ in UNLOADABLE.values())]
    covered = {name for each in options for name in each} | {"lora_alpha"}
    read = {field.name for field in dataclasses.fields(PEFTHelper) if not field.name.startswith("vllm_")}
    assert read <= covered
