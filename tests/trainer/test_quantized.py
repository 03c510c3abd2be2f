"""A run on a quantized base holds, bit for bit, what the tool that made the base writes of the trainer's weights; or
the base is refused because its own weights do not give its bits."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.publishers import left_unfinished
from tests.support.publishing import assert_holds, digest
from tests.support.quantizing import (
    SCHEMES,
    SMALL_FLOATS,
    edit_recipe,
    fill_evenly,
    library_tensors,
    save_quantized,
)
from tests.support.small_floats import nearest, packed, save_blocks, save_modelopt, save_powers, save_stacked
from tests.support.tiny import make_model, make_model_like, train_steps
from trainer_side import Budget, Gate, Publisher
from trainer_side.model import four_bit
from trainer_side.model.live_tensors import IterableTensors, LiveTensors
from trainer_side.model.module import ModuleTensors
from trainer_side.model.quantized import QuantizedTensors, quantized
from trainer_side.model.streamed import StreamedWeights
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import GateError, ModelError, TensorMismatchError, UsageError
from vllm_delta_sync.tensors.checkpoint import Checkpoint

Save = Callable[[PreTrainedModel, Path], Path]
K, V = (f"model.layers.0.self_attn.{part}_proj" for part in "kv")
UP = "model.layers.0.mlp.up_proj"
SAVE: dict[str, Save] = {
    **{scheme: partial(save_quantized, scheme=scheme) for scheme in SCHEMES | SMALL_FLOATS},
    "modelopt nvfp4": save_modelopt,
    "fp8 blocks": save_blocks,
    "ue8m0 in float32": save_powers,
    "ue8m0": partial(save_powers, dtype=torch.float8_e8m0fnu),
    "stacked mxfp4": save_stacked,
}
"""What writes a base, and says what any version should be."""


def small_model(form: str = "") -> PreTrainedModel:
    """A model in float32, of which the last blocks of the MLP's weights are narrower than the rest."""
    return make_model("gpt_oss" if form.startswith("stacked") else "llama", seed=5, intermediate_size=160)


# Forms that differ from others in one step, which others have too.
RARE = ("int8 tensor", "fp8 channel", "nvfp4 a16", "ue8m0 in float32")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] if form in RARE else []) for form in SAVE]
)
def test_versions_are_what_the_tool_writes(url: str, tmp_path: Path, form: str) -> None:
    model = small_model(form)
    base = SAVE[form](model, tmp_path / "base")
    expected = [load_file(base / "model.safetensors")]
    steps = train_steps(model, lr=1e-3)
    with Publisher(model, url, base=base) as publisher:
        for version in (1, 2):
            next(steps)
            assert publisher.publish(step=version, wait=True).version == version
            expected.append(load_file(SAVE[form](model, tmp_path / f"v{version}") / "model.safetensors"))
    # Taken over: the recipe is that of the run's own config.json.
    with Publisher(model, url) as publisher:
        next(steps)
        publisher.publish(step=3, wait=True)
        expected.append(load_file(SAVE[form](model, tmp_path / "v3") / "model.safetensors"))
    run = open_run(url)
    assert (run.manifest(0).kind, run.manifest(0).payload_bytes) == ("reference", 0)
    assert [run.manifest(version).kind for version in (1, 2, 3)] == ["delta"] * 3
    for version, tensors in enumerate(expected):
        assert_holds(run, version, tensors)
    assert run.verify().replayed
    codes = [name for name, tensor in expected[0].items() if tensor.element_size() == 1 and "scale" not in name]
    assert len(codes) == (4 if form.startswith("stacked") else 14)
    assert all(len({digest({name: tensors[name]}) for tensors in expected}) > 1 for name in codes)
    assert len({digest({name: tensors[name] for name in codes}) for tensors in expected}) == 4


TOOLS = {
    "int8 channel": "e05172ab08d9bfb58d91bf90498719e525bc1e1e07631582f1609f322f5c29b2",
    "int8 tensor": "01db7d893dee747960e3df6e731a405fd136d1c450f39f13701539ea15b328f1",
    "fp8 channel": "bc0a018915cfa9271133e09ea2e058cb9be1757b5831d89ff3847445d659a008",
    "fp8 tensor": "cb47d878d340d89f85f444a531e5de77b427b9ec394ac58a147585904c86f2f8",
    "fp8 block": "05fdec92581a6be254e06c0f99e156b3a694536eac216d7498c32a4859498090",
    "nvfp4": "997c0037b77e1b87a9d4cab8f9994d03ef5c6eb86cf5b4021f32851cc37c20a3",
    "mxfp4": "3ae38d6c1824447225dd2c441e1f6e956dcd673e6e469e04360073ee4a346e0b",
    "mxfp8": "b0a7e6a545496541033d42b84fe8fb9bccbf8d701b821e5b635a773540f0f2a2",
    "modelopt nvfp4": "e9154c0a1064127c9510801c3e051b5be5cfd356fad40a1d9e2f5f5d1f23eaa6",
}
"""SHA-256 of the tensors, without the scales of inputs, that ``oneshot`` of llmcompressor 0.12.0 (compressed-tensors
0.17) saved of the model below, in bfloat16, with ``QuantizationModifier`` and these schemes, and that
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


def test_streamed_weights_are_quantized_and_quantized_ones_are_taken_as_they_are(url: str, tmp_path: Path) -> None:
    model = small_model()
    base = save_quantized(model, tmp_path / "base")
    steps = train_steps(model, lr=1e-3)
    with Publisher(model, url, base=base) as publisher:
        next(steps)
        first = library_tensors(model, tmp_path / "v1")
        publisher.publish(step=1, wait=True, weights=make_model_like(model).state_dict().items())
        next(steps)
        second = library_tensors(model, tmp_path / "v2")
        publisher.publish(step=2, wait=True, weights=second.items())
    assert_holds(open_run(url), 1, first)
    assert_holds(open_run(url), 2, second)
    # Names and shapes of the parameters in the module of transformers, as frameworks yield them.
    with Publisher(StreamedWeights(base), url + "-streamed", base=base) as publisher:
        publisher.publish(step=1, wait=True, weights=model.state_dict().items())
    assert_holds(open_run(url + "-streamed"), 1, second)
    # A caller that quantizes needs no recipe.
    with Publisher(list(second.items()), url + "-own", base=edit_recipe(base, quant_method="gptq")):
        pass
    assert_holds(open_run(url + "-own"), 0, second)


@pytest.mark.parametrize("form", ["int8 channel", "nvfp4"])
def test_a_quantized_weight_that_is_left_out_must_keep_its_bits(url: str, tmp_path: Path, form: str) -> None:
    model = make_model_like(small_model())
    base = SAVE[form](model, tmp_path / "base")
    whole = dict(model.named_parameters())
    left_out = "model.layers.0.mlp.down_proj.weight"
    handed: list[Any] = [None, whole.items()]
    for source, weights in zip((model, StreamedWeights(base)), handed, strict=True):
        where = f"{url}-{weights is None}"
        with Publisher(source, where, base=base, exclude=left_out) as publisher:
            publisher.publish(step=1, wait=True, weights=weights)
            with torch.no_grad():
                whole["model.norm.weight"] += 1
                whole[left_out] *= 2  # of which int8 shows in its scales alone
            with pytest.raises(TensorMismatchError, match=r"down_proj.* is left out by include= or exclude="):
                publisher.publish(step=2, wait=True, weights=weights)
            with torch.no_grad():
                whole[left_out] /= 2
            publisher.publish(step=3, wait=True, weights=weights)
        assert_holds(open_run(where), 2, library_tensors(model, tmp_path / f"v2-{weights is None}", form))


def test_streamed_weights_are_proven_with_the_first_version(url: str, tmp_path: Path) -> None:
    model = small_model()
    base = SAVE["nvfp4"](model, tmp_path / "base")
    first = {name: tensor.clone() for name, tensor in make_model_like(model).state_dict().items()}
    next(train_steps(model, lr=1e-3))
    # Also after a restart: version 0 alone proves nothing.
    for _ in range(2):
        with (
            pytest.raises(ModelError, match="Start the trainer from the checkpoint"),
            Publisher(StreamedWeights(base), url, base=base) as publisher,
        ):
            publisher.publish(step=1, wait=True, weights=model.state_dict().items())
    with Publisher(StreamedWeights(base), url, base=base) as publisher:
        publisher.publish(step=1, wait=True, weights=first.items())
        publisher.publish(step=2, wait=True, weights=model.state_dict().items())
        some = {name: tensor for name, tensor in first.items() if name != f"{K}.weight"}
        with pytest.raises(ModelError, match=rf"share a scale, and '{K}\.weight' was not yielded; yield all of them"):
            publisher.publish(step=3, wait=True, weights=some.items())
    run = open_run(url)
    assert_holds(run, run.head().version, library_tensors(model, tmp_path / "v2", "nvfp4"))


@pytest.mark.parametrize("form", ["modelopt nvfp4", "nvfp4", "stacked mxfp4"])
def test_the_default_dtype_of_torch_changes_nothing(url: str, tmp_path: Path, form: str) -> None:
    model, trained = small_model(form), small_model(form)
    base = SAVE[form](model, tmp_path / "base")
    next(train_steps(trained, lr=1e-3))
    expected = load_file(SAVE[form](trained, tmp_path / "v1") / "model.safetensors")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with Publisher(model, url, base=base) as publisher:
            model.load_state_dict(trained.state_dict())
            publisher.publish(step=1, wait=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_holds(open_run(url), 1, expected)


def test_weights_are_quantized_one_at_a_time(tmp_path: Path) -> None:
    model = small_model()
    base = save_quantized(model, tmp_path / "base")
    live = live_on(base, ModuleTensors(model))
    assert isinstance(live, QuantizedTensors)
    reading = live.read()
    assert next(name for name, _ in reading if name.endswith("weight_scale"))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:] = 3
    rest = dict(reading)
    assert torch.equal(rest["model.layers.1.mlp.down_proj.weight"], torch.full((128, 160), 127, dtype=torch.int8))


def test_the_gate_sees_what_is_not_finite_in_the_scales(url: str, tmp_path: Path) -> None:
    model = small_model()
    base = save_quantized(model, tmp_path / "base")
    with left_unfinished(Publisher(model, url, base=base, gate=Gate())) as publisher:
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight[3, 5] = torch.nan
        publisher.publish(step=1, wait=True)
        with pytest.raises(GateError, match=r"q_proj\.weight_scale"):
            publisher.flush()


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


# What is refused


def live_on(base: Path, source: LiveTensors) -> LiveTensors:
    return quantized(source, Checkpoint(base).specs, (base / "config.json").read_bytes(), base)


def tampered(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], Path]:
    """Change the tensors with that suffix in a checkpoint."""

    def tamper(base: Path) -> Path:
        tensors = load_file(base / "model.safetensors")
        found = {name: change(tensor) if name.endswith(suffix) else tensor for name, tensor in tensors.items()}
        save_file(found, base / "model.safetensors", metadata={"format": "pt"})
        return base

    return tamper


def edited(**fields: Any) -> Callable[[Path], Path]:
    return lambda base: edit_recipe(base, **fields)


def one_byte(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[5] ^= 1
    return changed


def with_recipe(base: Path) -> Path:
    text = "default_stage:\n  default_modifiers:\n    GPTQModifier:\n      targets: [Linear]\n"
    (base / "recipe.yaml").write_text(text)
    return base


def without_scale(base: Path) -> Path:
    tensors = load_file(base / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if name != f"{UP}.weight_scale"}, base / "model.safetensors")
    return base


def without_recipe(base: Path) -> Path:
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]
    (base / "config.json").write_text(json.dumps(config))
    return base


STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
STATIC_4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
ROTATED = {"config_groups": {"u": {"type": "hadamard", "apply": []}}}
TWO_GROUPS = {
    name: {"targets": [target], "weights": {"num_bits": 8, "strategy": "channel"}}
    for name, target in (("a", "Linear"), ("b", "Embedding"))
}
INT8 = "int8 channel"
CASES: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "gptq": (INT8, edited(quant_method="gptq"), "quant_method 'gptq'"),
    "plain": (INT8, edited(group__format="pack-quantized"), "format 'pack-quantized'"),
    "4 bits": (INT8, edited(weights__num_bits=4), r"group_0\.weights\.num_bits 4"),
    "zero points": (INT8, edited(weights__symmetric=False), r"weights\.symmetric False"),
    "groups": (INT8, edited(weights__strategy="group", weights__group_size=32), r"weights\.strategy 'group'"),
    "order": (INT8, edited(weights__actorder="weight"), r"weights\.actorder 'weight'"),
    "observer": (INT8, edited(weights__observer="mse"), r"weights\.observer 'mse'"),
    "fixed inputs": (INT8, edited(group__input_activations=STATIC), r"input_activations\.dynamic False.*go stale"),
    "fixed inputs in nvfp4": ("nvfp4", edited(group__input_activations=STATIC_4), r"dynamic False.*go stale"),
    "fixed outputs": (INT8, edited(group__output_activations=STATIC), r"output_activations\.dynamic False"),
    "cache": (INT8, edited(kv_cache_scheme=STATIC), "kv_cache_scheme .*calibration"),
    "rotated": (INT8, edited(transform_config=ROTATED), "transform_config .*before they are"),
    "sparse": (INT8, edited(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    "not compressed": (INT8, edited(quantization_status="frozen"), "quantization_status 'frozen'"),
    "two groups": (INT8, edited(config_groups=TWO_GROUPS), r"config_groups \['a', 'b'\], and only one"),
    "unreadable": (INT8, edited(weights__strategy="circle"), "cannot be read .*compressed-tensors"),
    "calibrated": (INT8, with_recipe, "recipe.yaml has GPTQModifier"),
    "no scale": (INT8, without_scale, "has no 'model.layers.0.mlp.up_proj.weight_scale'"),
    "no recipe": (INT8, without_recipe, r"is I8 in base .* needs scales .* publish from one rank"),
    "no recipe in nvfp4": ("nvfp4", without_recipe, r"is quantized in base .* needs scales .* publish from one rank"),
    "fp8 without blocks": ("fp8 blocks", edited(weight_block_size=None), "weight_block_size None"),
    "fp8 with fixed inputs": ("fp8 blocks", edited(activation_scheme="static"), "scheme 'static'.*go stale"),
    "other fp8": ("fp8 blocks", edited(fmt="e5m2"), "fmt 'e5m2'"),
    "other scales in fp8": ("fp8 blocks", edited(scale_fmt="ue8m0"), r"has: 100\.00% of '.*weight_scale_inv' differ"),
    "calibrated global scale": (
        "nvfp4", tampered("weight_global_scale", lambda scale: scale * 0.5),
        r"_proj\.weight'.*100\.00% of '.*_proj\.weight_global_scale' differ.*calibration",
    ),
    **{
        f"another byte of {suffix} in {form}": (form, tampered(suffix, one_byte), rf"of '.*{suffix}' differ")
        for form, suffix in (
            ("nvfp4 a16", "up_proj.weight_scale"), ("nvfp4 a16", "down_proj.weight_packed"),
            ("mxfp4", "down_proj.weight_packed"), ("mxfp8", "down_proj.weight"),
            ("modelopt nvfp4", "down_proj.weight"), ("stacked mxfp4", "down_proj_blocks"),
            ("ue8m0", "down_proj.weight"),
        )
    },
    "other groups": ("mxfp4", edited(weights__group_size=64), r"weights\.group_size 64, and only 32"),
    "other scales": ("nvfp4", edited(weights__scale_dtype="torch.uint8"), r"scale_dtype torch\.uint8"),
    "ModelOpt with awq": ("modelopt nvfp4", edited(quant_algo="NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ', and only NVFP4"),
    "ModelOpt with a cache": ("modelopt nvfp4", edited(kv_cache_quant_algo="FP8"), "kv_cache_scheme 'FP8'.*calibra"),
    "quark": ("mxfp4", edited(quant_method="quark"), "quant_method 'quark', and only .*'modelopt', 'mxfp4'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The base in a form, made once."""
    return cache(lambda form: SAVE[form](small_model(form), tmp_path_factory.mktemp("base")))


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_repeated_is_refused_by_name_with_a_fix(
    tmp_path: Path, url: str, case: str, base_of: Callable[[str], Path]
) -> None:
    form, change, message = CASES[case]
    base = change(shutil.copytree(base_of(form), tmp_path / "base"))
    with pytest.raises(ModelError, match=message) as refused:
        Publisher(small_model(form), url, base=base)
    fixes = ("give a base that was quantized from its weights alone", "install the version", "publish from one rank")
    assert any(fix in refused.value.message for fix in fixes)
    assert not Path(url).exists()


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    base = save_quantized(model, tmp_path / "base")
    monkeypatch.setitem(sys.modules, "compressed_tensors.quantization", None)
    with pytest.raises(ModelError, match="pip install compressed-tensors"):
        live_on(base, ModuleTensors(model))


def test_tied_weights_that_the_base_has_quantized_are_refused(tmp_path: Path) -> None:
    weight = torch.randn(4, 2)
    base = tmp_path / "base"
    base.mkdir()
    tensors = {"a.weight": torch.zeros(4, 2, dtype=torch.int8), "a.weight_scale": torch.ones(4, 1)}
    save_file(tensors, base / "model.safetensors")
    (base / "config.json").write_text('{"quantization_config": {"quant_method": "compressed-tensors"}}')
    with pytest.raises(ModelError, match=r"'a\.weight' and 'b\.weight' are tied"):
        live_on(base, IterableTensors(lambda: [("a.weight", weight), ("b.weight", weight)]))


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


@pytest.mark.parametrize("form", ["mxfp4", "stacked mxfp4"])
def test_a_budget_which_would_send_parts_of_a_group_is_refused(
    url: str, form: str, base_of: Callable[[str], Path]
) -> None:
    with pytest.raises(UsageError, match=r"budget is set, and tensor '.*(weight_packed|_blocks)' has dtype U8"):
        Publisher(small_model(form), url, base=base_of(form), budget=Budget(max_bytes=1000))
