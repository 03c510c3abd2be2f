"""A run on a quantized base holds, bit for bit, what the library that made the base writes of the trainer's weights."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.support.publishers import left_unfinished
from tests.support.publishing import Tensors, assert_holds
from tests.support.quantizing import SCHEMES, digest, edit_recipe, fill_evenly, library_tensors, save_quantized
from tests.support.tiny import make_model, make_model_like, make_tokenizer, train_steps
from trainer_side import Publisher
from trainer_side.model.live_tensors import LiveTensors
from trainer_side.model.module import ModuleTensors
from trainer_side.model.quantized import QuantizedTensors, quantized
from trainer_side.model.sources import IterableTensors
from trainer_side.model.streamed import StreamedWeights
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import GateError, ModelError
from vllm_delta_sync.tensors.checkpoint import Checkpoint

BLOCK = 64


def small_model() -> PreTrainedModel:
    """A model in float32, of which the last blocks of the MLP's weights are narrower than the rest."""
    return make_model("llama", seed=5, intermediate_size=160)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_versions_are_what_the_library_writes(url: str, tmp_path: Path, scheme: str) -> None:
    model = small_model()
    base = save_quantized(model, tmp_path / "base", scheme)
    expected = [load_file(base / "model.safetensors")]
    steps = train_steps(model, lr=1e-3)
    with Publisher(model, url, base=base) as publisher:
        for version in (1, 2):
            next(steps)
            assert publisher.publish(step=version, wait=True).version == version
            expected.append(library_tensors(model, tmp_path / f"v{version}", scheme))
    # Taken over: the recipe is that of the run's own config.json.
    with Publisher(model, url) as publisher:
        next(steps)
        publisher.publish(step=3, wait=True)
        expected.append(library_tensors(model, tmp_path / "v3", scheme))
    run = open_run(url)
    assert (run.manifest(0).kind, run.manifest(0).payload_bytes) == ("reference", 0)
    for version, tensors in enumerate(expected):
        assert_holds(run, version, tensors)
    assert run.verify().replayed
    before, after = expected[0], expected[3]
    quantized_names = [name for name in before if name.endswith("_proj.weight")]
    assert len(quantized_names) == 14
    assert all(before[name].element_size() == 1 for name in quantized_names)
    assert all(not torch.equal(before[name].float(), after[name].float()) for name in quantized_names)


LLM_COMPRESSOR = {
    "int8 channel": "e05172ab08d9bfb58d91bf90498719e525bc1e1e07631582f1609f322f5c29b2",
    "int8 tensor": "01db7d893dee747960e3df6e731a405fd136d1c450f39f13701539ea15b328f1",
    "fp8 channel": "bc0a018915cfa9271133e09ea2e058cb9be1757b5831d89ff3847445d659a008",
    "fp8 tensor": "cb47d878d340d89f85f444a531e5de77b427b9ec394ac58a147585904c86f2f8",
    "fp8 block": "05fdec92581a6be254e06c0f99e156b3a694536eac216d7498c32a4859498090",
}
"""SHA-256 of the tensors that ``oneshot`` of llmcompressor 0.12.0 (compressed-tensors 0.17.1) saved of the model below,
in bfloat16, with ``QuantizationModifier`` and these schemes, on a CPU."""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_versions_are_what_llm_compressor_saved(url: str, tmp_path: Path, scheme: str) -> None:
    model = make_model("llama", num_hidden_layers=1, intermediate_size=160)
    base = save_quantized(model, tmp_path / "base", scheme)
    fill_evenly(model)
    with Publisher(model, url, base=base):
        pass
    assert digest({name: tensor.clone() for name, tensor in open_run(url).tensors(0)}) == LLM_COMPRESSOR[scheme]


def fine_grained(model: PreTrainedModel) -> Tensors:
    """What DeepSeek's format holds of a model: blocks in fp8, each with the inverse of its scale, in float32.

    The formula is that of ``Fp8Quantize`` in transformers, block by block.
    """
    found: Tensors = {}
    for name, tensor in make_model_like(model).state_dict().items():
        if not name.endswith("_proj.weight"):
            found[name] = tensor
            continue
        rows = []
        inverse = torch.empty(-(-tensor.shape[0] // BLOCK), -(-tensor.shape[1] // BLOCK))
        for i, row in enumerate(tensor.float().split(BLOCK)):
            pieces = []
            for j, piece in enumerate(row.split(BLOCK, dim=1)):
                scale = piece.abs().max().reciprocal() * 448  # as torch divides a number by a tensor
                inverse[i, j] = scale.reciprocal()
                pieces.append((piece * scale).clamp(-448, 448).to(torch.float8_e4m3fn))
            rows.append(torch.cat([piece.view(torch.uint8) for piece in pieces], dim=1))
        found[name] = torch.cat(rows).view(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = inverse
    return found


def save_fine_grained(model: PreTrainedModel, path: Path, **fields: Any) -> Path:
    make_model_like(model).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    save_file(fine_grained(model), path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    recipe = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
    config["quantization_config"] = {**recipe, **fields}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_versions_in_fp8_with_block_scales_are_those_of_the_formula(url: str, tmp_path: Path) -> None:
    model = small_model()
    base = save_fine_grained(model, tmp_path / "base")
    steps = train_steps(model, lr=1e-3)
    expected = [fine_grained(model)]
    with Publisher(model, url, base=base) as publisher:
        next(steps)
        publisher.publish(step=1, wait=True)
        expected.append(fine_grained(model))
    run = open_run(url)
    assert run.manifest(0).kind == "reference"
    for version, tensors in enumerate(expected):
        assert_holds(run, version, tensors)


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
    from trainer_side import Gate

    model = small_model()
    base = save_quantized(model, tmp_path / "base")
    with left_unfinished(Publisher(model, url, base=base, gate=Gate())) as publisher:
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight[3, 5] = torch.nan
        publisher.publish(step=1, wait=True)
        with pytest.raises(GateError, match=r"q_proj\.weight_scale"):
            publisher.flush()


def live_on(base: Path, source: LiveTensors) -> LiveTensors:
    return quantized(source, Checkpoint(base).specs, (base / "config.json").read_bytes(), base)


def with_recipe(base: Path, text: str) -> Path:
    (base / "recipe.yaml").write_text(text)
    return base


def without_scale(base: Path) -> Path:
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, base / "model.safetensors")
    return base


GPTQ = "default_stage:\n  default_modifiers:\n    GPTQModifier:\n      targets: [Linear]\n"
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
ROTATED = {"config_groups": {"u": {"type": "hadamard", "apply": []}}}
TWO_GROUPS = {
    name: {"targets": [target], "weights": {"num_bits": 8, "strategy": "channel"}}
    for name, target in (("a", "Linear"), ("b", "Embedding"))
}
CASES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "gptq": (lambda base: edit_recipe(base, quant_method="gptq"), "quant_method 'gptq'"),
    "plain": (lambda base: edit_recipe(base, group__format="pack-quantized"), "format 'pack-quantized'"),
    "4 bits": (lambda base: edit_recipe(base, weights__num_bits=4), r"group_0\.weights\.num_bits 4"),
    "zero points": (lambda base: edit_recipe(base, weights__symmetric=False), r"weights\.symmetric False"),
    "groups": (
        lambda base: edit_recipe(base, weights__strategy="group", weights__group_size=32), r"weights\.strategy 'group'"
    ),
    "order": (lambda base: edit_recipe(base, weights__actorder="weight"), r"weights\.actorder 'weight'"),
    "observer": (lambda base: edit_recipe(base, weights__observer="mse"), r"weights\.observer 'mse'"),
    "fixed inputs": (
        lambda base: edit_recipe(base, group__input_activations=STATIC), r"input_activations\.dynamic False.*go stale"
    ),
    "fixed outputs": (
        lambda base: edit_recipe(base, group__output_activations=STATIC), r"output_activations\.dynamic False"
    ),
    "cache": (lambda base: edit_recipe(base, kv_cache_scheme=STATIC), "kv_cache_scheme .*calibration"),
    "rotated": (lambda base: edit_recipe(base, transform_config=ROTATED), "transform_config .*before they are"),
    "sparse": (lambda base: edit_recipe(base, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    "not compressed": (lambda base: edit_recipe(base, quantization_status="frozen"), "quantization_status 'frozen'"),
    "two groups": (
        lambda base: edit_recipe(base, config_groups=TWO_GROUPS), r"config_groups \['a', 'b'\], and only one"
    ),
    "unreadable": (lambda base: edit_recipe(base, weights__strategy="circle"), "cannot be read .*compressed-tensors"),
    "calibrated": (lambda base: with_recipe(base, GPTQ), "recipe.yaml has GPTQModifier"),
    "no scale": (without_scale, "has no 'model.layers.0.mlp.up_proj.weight_scale'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_repeated_is_refused_by_field_and_value(tmp_path: Path, url: str, case: str) -> None:
    model = small_model()
    change, message = CASES[case]
    base = change(save_quantized(model, tmp_path / "base"))
    with pytest.raises(ModelError, match=message) as refused:
        Publisher(model, url, base=base)
    assert re.search("give a base that was quantized from its weights alone|install the version", str(refused.value))
    assert not Path(url).exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'.*go stale"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"scale_fmt": "ue8m0"}, r"is not what the base has: 100\.00% of '.*weight_scale_inv' differ"),
    ],
)
def test_fp8_that_cannot_be_repeated_is_refused(tmp_path: Path, url: str, fields: dict[str, Any], message: str) -> None:
    model = small_model()
    with pytest.raises(ModelError, match=message):
        Publisher(model, url, base=save_fine_grained(model, tmp_path / "base", **fields))
    assert not Path(url).exists()


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    base = save_quantized(model, tmp_path / "base")
    monkeypatch.setitem(__import__("sys").modules, "compressed_tensors.quantization", None)
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


def test_a_quantized_base_without_a_recipe_is_refused(tmp_path: Path, url: str) -> None:
    model = small_model()
    base = save_quantized(model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is I8 in base .* needs scales .* publish from one rank"):
        Publisher(model, url, base=base)
