"""Weights that are handed over parameter by parameter, under the names of the module: as tensors of the checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    HrmTextConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from tests.support.publishing import Tensors, assert_holds
from tests.support.tiny import VOCABULARY, make_model, save_checkpoint, train_steps
from tests.support.trainers import SIZES
from trainer_side import Publisher
from trainer_side.integrations.gathered import gathered_publisher
from trainer_side.model.streamed import StreamedWeights
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import ModelError, NotFoundError, TensorMismatchError, UsageError

OTHERS = ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "gpt2"]
Pairs = Iterator[tuple[str, torch.Tensor]]


def handed(model: PreTrainedModel) -> Pairs:
    return ((name, tensor.detach()) for name, tensor in model.named_parameters())


def saved(model: PreTrainedModel, folder: Path) -> Tensors:
    """What ``save_pretrained`` writes of the model in bfloat16."""
    tensors: Tensors = load_file(save_checkpoint(model, folder) / "model.safetensors")
    return tensors


def trained(model: PreTrainedModel) -> PreTrainedModel:
    next(train_steps(model, lr=1e-3))
    return model


def publish(base: Path, url: str, weights: Pairs) -> None:
    with Publisher(StreamedWeights(base), bucket=url, base=base) as publisher:
        publisher.publish(1, weights=weights)


@pytest.mark.parametrize(
    "family", ["qwen3", "mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_parameters_become_what_save_pretrained_writes(family: str, url: str, tmp_path: Path) -> None:
    model = make_model(family)
    base = save_checkpoint(model, tmp_path / "base")
    random = torch.get_rng_state()
    weights = StreamedWeights(base)
    assert torch.equal(torch.get_rng_state(), random)
    with Publisher(weights, bucket=url, base=base) as publisher:
        assert publisher.publish(0, wait=True, weights=handed(model)).changed == 0
        publisher.publish(1, wait=True, weights=handed(trained(model)))
    run = open_run(url)
    assert run.manifest(0).kind == "reference"
    assert_holds(run, 2, saved(model, tmp_path / "saved"), base)


def test_parameters_that_make_up_one_tensor_are_waited_for(url: str, tmp_path: Path) -> None:
    """Projections that are apart in the module and one in the checkpoint; each in a buffer that is filled again."""
    model = _joined_model()
    base = save_checkpoint(model, tmp_path / "base")
    expected = saved(trained(model), tmp_path / "saved")

    def from_one_buffer() -> Pairs:
        buffer = torch.empty(max(tensor.numel() for tensor in model.parameters()))
        for name, tensor in handed(model):
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
            buffer.fill_(torch.nan)

    publish(base, url, from_one_buffer())
    assert_holds(open_run(url), 1, expected, base)


def test_a_part_of_what_makes_up_one_tensor_is_refused(url: str, tmp_path: Path) -> None:
    model = _joined_model()
    base = save_checkpoint(model, tmp_path / "base")
    some = ((name, tensor) for name, tensor in handed(model) if not name.endswith("layers.0.self_attn.k_proj.weight"))
    with pytest.raises(ModelError, match=r"gqkv_proj.*'.*k_proj.weight' was not yielded \(1 of 4\)"):
        publish(base, url, some)
    assert open_run(url).head().version == 0


def test_names_of_the_checkpoint_and_any_layout_in_memory_are_understood_too(url: str, tmp_path: Path) -> None:
    model = make_model("qwen3_moe", **SIZES)
    base = save_checkpoint(model, tmp_path / "base")
    for names in ("checkpoint", "module"):
        expected = saved(trained(model), tmp_path / "saved")
        given = iter(expected.items()) if names == "checkpoint" else handed(model)
        publish(base, f"{url}-{names}", ((name, turned(tensor)) for name, tensor in given))
        assert_holds(open_run(f"{url}-{names}"), 1, expected, base)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


@pytest.mark.parametrize("unknown", ["no configuration", "another's architecture"])
def test_without_a_known_configuration_names_are_the_checkpoints(
    unknown: str, model: PreTrainedModel, base: Path, url: str, tmp_path: Path
) -> None:
    (base / "config.json").unlink()
    if unknown != "no configuration":
        (base / "config.json").write_text('{"model_type": "of_another_library", "architectures": ["Other"]}')
    publish(base, url, handed(trained(model)))
    assert_holds(open_run(url), 1, saved(model, tmp_path / "saved"), base)


def test_what_does_not_fit_is_refused_by_name(model: PreTrainedModel, base: Path, url: str, tmp_path: Path) -> None:
    norm = torch.ones(5)
    with Publisher(StreamedWeights(base), bucket=url, base=base) as publisher:
        with pytest.raises(TensorMismatchError, match=r"'model.norm.weight' is torch.float32 \[5\], but \[32\]"):
            publisher.publish(1, weights=[*handed(trained(model)), ("model.norm.weight", norm)])
        with pytest.raises(TensorMismatchError, match=r"model\.norm\.bias"):
            publisher.publish(1, weights=[*handed(model), ("model.norm.bias", norm)])
        with pytest.raises(TensorMismatchError, match=r"'model.norm.weight' is yielded twice"):
            publisher.publish(1, weights=[*handed(model), ("model.norm.weight", torch.ones(32))])
        with pytest.raises(UsageError, match=r"give weights="):
            publisher.publish(1)
        publisher.publish(2, weights=handed(model))
    assert_holds(open_run(url), 1, saved(model, tmp_path / "saved"), base)


def test_a_model_that_was_resized_is_published_from_the_base_that_is_saved_of_it(
    model: PreTrainedModel, base: Path, url: str, tmp_path: Path
) -> None:
    model.resize_token_embeddings(VOCABULARY + 8)
    with pytest.raises(TensorMismatchError, match=r"embed_tokens.* if it was resized since, save it and give that"):
        publish(base, f"{url}-base", handed(model))
    resized = save_checkpoint(model, tmp_path / "resized")
    publish(resized, url, handed(trained(model)))
    assert_holds(open_run(url), 1, saved(model, tmp_path / "saved"), resized)


def test_a_base_of_another_model_is_refused(base: Path, url: str, tmp_path: Path) -> None:
    other = save_checkpoint(make_model("llama", **SIZES), tmp_path / "other")
    with pytest.raises(TensorMismatchError, match="is not among the"):
        Publisher(StreamedWeights(other), bucket=url, base=base)
    with pytest.raises(NotFoundError, match="does not exist"):
        StreamedWeights(tmp_path / "none")


def test_a_lost_version_is_not_made_up(model: PreTrainedModel, base: Path, url: str, tmp_path: Path) -> None:
    """The weights to begin anew with are not known before the next send; those of the base are another policy's."""
    publish(base, url, handed(trained(model)))
    for lost in (tmp_path / "run" / "objects").iterdir():
        lost.unlink()
    with pytest.raises(NotFoundError, match="gets the weights for a new start only later; repair the run"):
        Publisher(StreamedWeights(base), bucket=url, base=base)
    assert open_run(url).head().version == 1


TEXT = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}


def save_language_inside_vision(folder: Path) -> PreTrainedModel:
    """A vision-language checkpoint; ``AutoModelForCausalLM`` loads its language model, under names of its own."""
    linear = {f"linear_{what}": size for what, size in (("num_key_heads", 2), ("num_value_heads", 4))}
    linear |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    text = {**TEXT, **linear, "layer_types": ["linear_attention", "full_attention"]}
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    Qwen3_5ForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model


def save_under_later_names(folder: Path) -> PreTrainedModel:
    """A checkpoint that names its tensors as the module does, and not as ``save_pretrained`` names them."""
    text = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    vision = {**VISION, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    Qwen2_5_VLForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    prefixes = {"visual.": "model.visual.", "model.": "model.language_model."}
    for name in list(tensors):
        for before, after in prefixes.items():
            if name.startswith(before):
                tensors[after + name.removeprefix(before)] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder)
    return model


@pytest.mark.parametrize("save", [save_language_inside_vision, save_under_later_names])
def test_gathered_parameters_are_mapped_as_those_of_the_module(
    save: Callable[[Path], PreTrainedModel], url: str, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    model = save(base)
    before = load_file(base / "model.safetensors")
    gathered = gathered_publisher(f"{url}-gathered", base)
    assert gathered is not None
    with gathered, Publisher(model, url, base=base) as publisher:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        changed = {publisher.publish(1, wait=True).changed, gathered.publish(1, weights=handed(model)).changed}
    assert changed == {sum(parameter.numel() for parameter in model.parameters())}
    expected = dict(open_run(url).tensors(1, base))
    assert expected.keys() == before.keys()
    assert_holds(open_run(f"{url}-gathered"), 1, expected, base)


def _joined_model() -> PreTrainedModel:
    """A model whose checkpoint joins what its module holds apart: four projections, and two."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4}
    config = HrmTextConfig(vocab_size=VOCABULARY, num_hidden_layers=2, num_key_value_heads=4, **sizes)
    config.dtype = torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.float()
