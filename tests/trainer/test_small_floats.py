"""A run on a base in NVFP4, MXFP4, MXFP8 or fp8 with scales in powers of two holds what the tool that made the base
writes of the trainer's weights; or the base is refused because its own weights do not give its bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.publishing import assert_holds
from tests.support.quantizing import (
    INPUT_SCALE,
    digest,
    edit_recipe,
    fill_evenly,
    library_tensors,
    save_quantized,
)
from tests.support.small_floats import nearest, packed, save_modelopt, save_powers, save_stacked
from tests.support.tiny import make_model, make_model_like, train_steps
from trainer_side import Budget, Publisher
from trainer_side.model import four_bit
from trainer_side.model.streamed import StreamedWeights
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import ModelError, UsageError

Save = Callable[[PreTrainedModel, Path], Path]
Q, K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
UP, GATE = (f"model.layers.0.mlp.{part}_proj" for part in ("up", "gate"))


def library(scheme: str) -> Save:
    return lambda model, path: save_quantized(model, path, scheme)


def in_e8m0(model: PreTrainedModel, path: Path) -> Path:
    return save_powers(model, path, dtype=torch.float8_e8m0fnu)


SAVE: dict[str, Save] = {
    "nvfp4": library("nvfp4"),
    "nvfp4 a16": library("nvfp4 a16"),
    "mxfp4": library("mxfp4"),
    "mxfp8": library("mxfp8"),
    "modelopt nvfp4": save_modelopt,
    "ue8m0 in float32": save_powers,
    "ue8m0": in_e8m0,
    "stacked mxfp4": save_stacked,
}


def small_model(form: str = "") -> PreTrainedModel:
    return make_model("gpt_oss" if form.startswith("stacked") else "llama", seed=5, intermediate_size=160)


@pytest.mark.parametrize("form", SAVE)
def test_five_versions_are_what_the_tool_writes(url: str, tmp_path: Path, form: str) -> None:
    model = small_model(form)
    base = SAVE[form](model, tmp_path / "base")
    expected = [load_file(base / "model.safetensors")]
    steps = train_steps(model, lr=1e-3)
    with Publisher(model, url, base=base) as publisher:
        for version in range(1, 5):
            next(steps)
            publisher.publish(step=version, wait=True)
            expected.append(load_file(SAVE[form](model, tmp_path / f"v{version}") / "model.safetensors"))
    # Taken over: the recipe is that of the run's own config.json.
    with Publisher(model, url) as publisher:
        next(steps)
        publisher.publish(step=5, wait=True)
        expected.append(load_file(SAVE[form](model, tmp_path / "v5") / "model.safetensors"))
    run = open_run(url)
    assert (run.manifest(0).kind, run.manifest(0).payload_bytes) == ("reference", 0)
    assert [run.manifest(version).kind for version in range(1, 6)] == ["delta"] * 5
    for version, tensors in enumerate(expected):
        assert_holds(run, version, tensors)
    assert run.verify().replayed
    digests = [digest({name: tensor for name, tensor in tensors.items() if "proj" in name}) for tensors in expected]
    assert len(set(digests)) == 6


TOOLS = {
    "nvfp4": "997c0037b77e1b87a9d4cab8f9994d03ef5c6eb86cf5b4021f32851cc37c20a3",
    "mxfp4": "3ae38d6c1824447225dd2c441e1f6e956dcd673e6e469e04360073ee4a346e0b",
    "mxfp8": "b0a7e6a545496541033d42b84fe8fb9bccbf8d701b821e5b635a773540f0f2a2",
    "modelopt nvfp4": "e9154c0a1064127c9510801c3e051b5be5cfd356fad40a1d9e2f5f5d1f23eaa6",
}
"""SHA-256 of the tensors, without the scales of inputs, that ``oneshot`` of llmcompressor 0.12.0 (compressed-tensors
0.17.0) saved of the model below, in bfloat16, with ``QuantizationModifier`` and these schemes, and that
``export_hf_checkpoint`` of nvidia-modelopt 0.47.0 saved with ``NVFP4_DEFAULT_CFG``; on a CPU."""


INPUTS = ("input_global_scale", "input_scale")


@pytest.mark.parametrize("form", TOOLS)
def test_versions_are_what_the_tools_saved(url: str, tmp_path: Path, form: str) -> None:
    model = make_model("llama", num_hidden_layers=1, intermediate_size=160)
    fill_evenly(model)
    base = SAVE[form](model, tmp_path / "base")
    with Publisher(model, url, base=base):
        pass
    held = {name: tensor.clone() for name, tensor in open_run(url).tensors(0) if not name.endswith(INPUTS)}
    assert digest(held) == TOOLS[form]


def test_scales_of_inputs_keep_the_bits_of_the_base(url: str, tmp_path: Path) -> None:
    model = small_model()
    base = SAVE["nvfp4"](model, tmp_path / "base")
    with Publisher(model, url, base=base) as publisher:
        next(train_steps(model, lr=1e-2))
        publisher.publish(step=1, wait=True)
    held = dict(open_run(url).tensors(1))
    inputs = [tensor for name, tensor in held.items() if name.endswith("input_global_scale")]
    assert len(inputs) == 14
    assert all(tensor.item() == INPUT_SCALE for tensor in inputs)


def test_fused_weights_share_the_scale_of_the_largest_and_others_have_their_own(url: str, tmp_path: Path) -> None:
    model = small_model()
    with torch.no_grad():
        model.get_submodule(V).weight[3, 5] = 0.75
        model.get_submodule(UP).weight[3, 5] = 1.5
    base = SAVE["nvfp4"](model, tmp_path / "base")
    with Publisher(model, url, base=base) as publisher:
        with torch.no_grad():
            model.get_submodule(K).weight[0, 0] = 3.0
        publisher.publish(step=1, wait=True)
    for version, expected in ((0, {Q: 0.75, K: 0.75, V: 0.75, UP: 1.5, GATE: 1.5}), (1, {Q: 3, V: 3, UP: 1.5})):
        held = dict(open_run(url).tensors(version))
        for module, largest in expected.items():
            scale = held[f"{module}.weight_global_scale"]
            assert torch.equal(scale, torch.tensor([448 * 6 / largest]).bfloat16().float())
        assert held["model.layers.0.self_attn.o_proj.weight_global_scale"] > 3 * 448


def test_every_bfloat16_is_rounded_as_the_library_rounds_it() -> None:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA

    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    groups = every[torch.isfinite(every)].view(-1, 1, 32)
    for dtype, size in ((torch.bfloat16, 0.25), (torch.float32, 0.37)):
        steps = torch.full((len(groups), 1), size, dtype=dtype)
        scaled = (groups / steps.unsqueeze(-1)).flatten(-2) + 0
        with torch.compiler.set_stance("force_eager"):
            rounded = FP4_E2M1_DATA.cast_to_fp4(scaled.clamp(-6, 6))
        assert torch.equal(four_bit._pack(groups, steps), pack_fp4_to_uint8(rounded))
        away = four_bit._pack(groups.float(), steps.float(), ties_to_even=False)
        assert torch.equal(away, packed(nearest((groups / steps.float().unsqueeze(-1)).flatten(-2), to_even=False)))


def test_mxfp4_stands_for_what_transformers_makes_of_it() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 8, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 8, 3), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(four_bit.mxfp4_values(blocks, scales).flatten(-2), expected)


@pytest.mark.parametrize("form", ["stacked mxfp4", "ue8m0"])
def test_a_trainer_may_start_from_the_values_of_the_base(url: str, tmp_path: Path, form: str) -> None:
    """As where no others were published. A group whose largest value is small gets other bits, of the same values."""
    model = small_model(form)
    name = "model.layers.0.mlp.experts.gate_up_proj" if form.startswith("stacked") else f"{UP}.weight"
    weight = model.get_parameter(name)
    base = SAVE[form](model, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    with torch.no_grad():
        if form.startswith("stacked"):
            tensors[f"{name}_blocks"][0, 0, 0] = 0x21  # 0.5 and 1, which a smaller scale holds too
            values = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
            other = model.get_parameter(name.replace("gate_up", "down"))
        else:
            tensors[name].view(torch.uint8)[:64, :64] = 0x30
            scale = tensors[f"{name}_scale_inv"].float().repeat_interleave(64, 0).repeat_interleave(64, 1)
            values = tensors[name].float() * scale[: weight.shape[0], : weight.shape[1]]
            other = weight
        weight.copy_(values)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with Publisher(model, url, base=base) as publisher:
        with torch.no_grad():
            other[0, 0] += 0.5
        publisher.publish(step=1, wait=True)
    run = open_run(url)
    assert run.manifest(0).kind == "anchor"
    for version in (0, 1):
        expected = load_file(SAVE[form](model, tmp_path / f"v{version}") / "model.safetensors")
        assert (version == 0) != (digest(dict(run.tensors(version))) == digest(expected))


def tampered(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], Path]:
    """Change the tensors with that suffix in a checkpoint."""

    def tamper(base: Path) -> Path:
        tensors = load_file(base / "model.safetensors")
        found = {name: change(tensor) if name.endswith(suffix) else tensor for name, tensor in tensors.items()}
        save_file(found, base / "model.safetensors", metadata={"format": "pt"})
        return base

    return tamper


def recipe(**fields: Any) -> Callable[[Path], Path]:
    """Change fields of ``quantization_config``."""

    def edit(base: Path) -> Path:
        config = json.loads((base / "config.json").read_text())
        config["quantization_config"].update(fields)
        (base / "config.json").write_text(json.dumps(config))
        return base

    return edit


def one_byte(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[5] ^= 1
    return changed


STATIC = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
CASES: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "calibrated global scale": (
        "nvfp4", tampered("weight_global_scale", lambda scale: scale * 0.5),
        r"_proj\.weight'.*100\.00% of '.*_proj\.weight_global_scale' differ.*calibration",
    ),
    "calibrated group scales": (
        "nvfp4 a16", tampered("up_proj.weight_scale", one_byte), r"of '.*up_proj\.weight_scale' differ"
    ),
    "another rounding": (
        "nvfp4 a16", tampered("down_proj.weight_packed", one_byte), r"of '.*down_proj\.weight_packed' differ"
    ),
    "another rounding in mxfp4": (
        "mxfp4", tampered("down_proj.weight_packed", one_byte), r"of '.*down_proj\.weight_packed' differ"
    ),
    "another rounding in mxfp8": ("mxfp8", tampered("down_proj.weight", one_byte), r"of '.*down_proj\.weight' differ"),
    "another rounding by ModelOpt": (
        "modelopt nvfp4", tampered("down_proj.weight", one_byte), r"of '.*down_proj\.weight' differ"
    ),
    "another rounding of experts": (
        "stacked mxfp4", tampered("down_proj_blocks", one_byte), r"of '.*down_proj_blocks' differ"
    ),
    "another rounding in fp8": (
        "ue8m0", tampered("down_proj.weight", one_byte), r"of '.*down_proj\.weight' differ"
    ),
    "fixed inputs": (
        "nvfp4", lambda base: edit_recipe(base, group__input_activations=STATIC),
        r"input_activations\.dynamic False.*go stale",
    ),
    "other groups": (
        "mxfp4", lambda base: edit_recipe(base, weights__group_size=64), r"weights\.group_size 64, and only 32"
    ),
    "other scales": (
        "nvfp4", lambda base: edit_recipe(base, weights__scale_dtype="torch.uint8"), r"scale_dtype torch\.uint8"
    ),
    "ModelOpt with awq": ("modelopt nvfp4", recipe(quant_algo="NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ', and only NVFP4"),
    "ModelOpt with a cache": ("modelopt nvfp4", recipe(kv_cache_quant_algo="FP8"), "kv_cache_scheme 'FP8'.*calibra"),
    "quark": ("mxfp4", recipe(quant_method="quark"), "quant_method 'quark', and only .*'modelopt', 'mxfp4'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_repeated_is_refused_by_name_with_a_fix(tmp_path: Path, url: str, case: str) -> None:
    form, change, message = CASES[case]
    model = small_model(form)
    base = change(SAVE[form](model, tmp_path / "base"))
    with pytest.raises(ModelError, match=message) as refused:
        Publisher(model, url, base=base)
    assert "give a base that was quantized from its weights alone" in str(refused.value)
    assert not Path(url).exists()


def test_other_weights_than_those_of_the_base_are_refused(tmp_path: Path, url: str) -> None:
    model = small_model()
    base = SAVE["nvfp4"](model, tmp_path / "base")
    for _, step in zip(range(2), train_steps(model, lr=1e-3), strict=False):
        assert step is not None
    with pytest.raises(ModelError, match="Start the trainer from the checkpoint that the base was quantized from"):
        Publisher(model, url, base=base)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "modelopt nvfp4", "stacked mxfp4"])
def test_what_is_not_finite_is_refused_where_four_bits_cannot_show_it(tmp_path: Path, url: str, form: str) -> None:
    model = small_model(form)
    name = "model.layers.0.mlp.experts.down_proj" if form.startswith("stacked") else f"{V}.weight"
    base = SAVE[form](model, tmp_path / "base")
    with Publisher(model, url, base=base) as publisher:
        with torch.no_grad():
            model.get_parameter(name).view(-1)[7] = torch.nan if form == "nvfp4" else torch.inf
        with pytest.raises(ModelError, match=f"'{name}' has NaN or infinite values"):
            publisher.publish(step=1, wait=True)
        with torch.no_grad():
            model.get_parameter(name).view(-1)[7] = 0.01
        publisher.publish(step=2, wait=True)
    expected = load_file(SAVE[form](model, tmp_path / "v1") / "model.safetensors")
    assert_holds(open_run(url), 1, expected)


def test_streamed_weights_are_proven_with_the_first_version(url: str, tmp_path: Path) -> None:
    model = small_model()
    base = SAVE["nvfp4"](model, tmp_path / "base")
    first = {name: tensor.clone() for name, tensor in make_model_like(model).state_dict().items()}
    next(train_steps(model, lr=1e-3))
    with Publisher(StreamedWeights(base), url, base=base) as publisher:
        with pytest.raises(ModelError, match="Start the trainer from the checkpoint"):
            publisher.publish(step=1, wait=True, weights=model.state_dict().items())
        publisher.publish(step=1, wait=True, weights=first.items())
        publisher.publish(step=2, wait=True, weights=model.state_dict().items())
        some = {name: tensor for name, tensor in first.items() if name != f"{K}.weight"}
        with pytest.raises(ModelError, match=rf"share a scale, and '{K}\.weight' was not yielded; yield all of them"):
            publisher.publish(step=3, wait=True, weights=some.items())
    run = open_run(url)
    assert_holds(run, run.head().version, library_tensors(model, tmp_path / "v2", "nvfp4"))


def test_a_packed_base_without_a_recipe_is_refused(tmp_path: Path, url: str) -> None:
    model = small_model()
    base = SAVE["nvfp4"](model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is quantized in base .* needs scales .* publish from one rank"):
        Publisher(model, url, base=base)


@pytest.mark.parametrize("form", ["mxfp4", "stacked mxfp4"])
def test_a_budget_which_would_send_parts_of_a_group_is_refused(tmp_path: Path, url: str, form: str) -> None:
    model = small_model(form)
    with pytest.raises(UsageError, match=r"budget is set, and tensor '.*(weight_packed|_blocks)' has dtype U8"):
        Publisher(model, url, base=SAVE[form](model, tmp_path / "base"), budget=Budget(max_bytes=1000))
