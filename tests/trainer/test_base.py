"""Version 0 is a reference to the base that is given, or a snapshot; bases that do not fit are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.support.architectures import adamw, qwen3, saved, train
from tests.support.checkpoints import write_checkpoint
from tests.support.publishing import assert_holds, snapshot
from trainer_side import Part, Publisher
from trainer_side.checkpoint_folders import CheckpointPublisher
from trainer_side.integrations.gathered import gathered_publisher, publish_gathered
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import ModelError, NotFoundError, StoreError, TensorMismatchError


def test_base_that_matches_is_referred_to(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = qwen3().bfloat16()
    expected = saved(model, tmp_path / "base")
    model = model.float()
    with Publisher(model, url, base=tmp_path / "base") as publisher:
        train(model, adamw(model, 1e-3))
        publisher.publish(step=1)
    first = open_run(url).manifest(0)
    assert (first.kind, first.objects, first.payload_bytes) == ("reference", [], 0)
    assert first.base is not None
    assert Path(first.base.location) == tmp_path / "base"
    assert caplog.records == []
    assert open_run(url).verify().replayed
    assert_holds(open_run(url), 0, expected)
    after = snapshot({name: dict(model.state_dict())[name] for name in expected}, torch.bfloat16)
    assert_holds(open_run(url), 1, after)


def test_base_that_differs_is_reported_and_replaced(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = qwen3().bfloat16()
    expected = saved(model, tmp_path / "base")
    with torch.no_grad():
        model.model.norm.weight[3] += 1
    with Publisher(model, url, base=tmp_path / "base"):
        pass
    assert "first difference in tensor model.norm.weight" in caplog.text
    assert open_run(url).manifest(0).kind == "anchor"
    expected["model.norm.weight"] = model.model.norm.weight.detach()
    assert_holds(open_run(url), 0, expected)


def test_sharded_base_decides_dtypes_and_keeps_what_the_model_has_not(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = qwen3(tied=False)
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    extra = {"mtp.weight": torch.randn(5).half()}
    save_file(extra, tmp_path / "base" / "mtp.safetensors")
    index = tmp_path / "base" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"weight_map": {', '"weight_map": {"mtp.weight": "mtp.safetensors",'))
    with Publisher(model.double(), url, base=tmp_path / "base") as publisher:
        train(model, adamw(model))
        publisher.publish(step=1)
    assert "1 of the base's 26 tensors are not in the model and keep the base's values: mtp.weight" in caplog.text
    assert_holds(open_run(url), 1, snapshot(model.state_dict(), torch.float32) | extra)


def test_an_untied_head_that_the_base_lacks_is_refused_with_a_way_out(url: str, tmp_path: Path) -> None:
    """tests/e2e/test_tied_heads.py goes that way."""
    saved(qwen3(tied=True), tmp_path / "base")
    with pytest.raises(TensorMismatchError) as caught:
        Publisher(qwen3(tied=False), url, base=tmp_path / "base")
    message = caught.value.message
    assert "tensor 'lm_head.weight' of the model is not among the" in message
    assert "leave base= out, and start servers with --load-format delta_sync" in message


def test_a_resized_embedding_is_refused_with_a_way_out_that_works(url: str, tmp_path: Path) -> None:
    model = qwen3()
    saved(model, tmp_path / "base")
    model.resize_token_embeddings(model.config.vocab_size + 8)
    with pytest.raises(TensorMismatchError, match=r"embed_tokens.*a resized embedding, leave base= out"):
        Publisher(model, url, base=tmp_path / "base")
    with Publisher(model, url):
        assert_holds(open_run(url), 0, saved(model, tmp_path / "resized"))


WEIGHT = torch.zeros(4, 2)
MISFITS: dict[str, tuple[str, str, torch.Tensor, type[Exception], str]] = {
    "no folder": ("none", "w", WEIGHT, NotFoundError, "does not exist"),
    "no checkpoint": ("empty", "w", WEIGHT, NotFoundError, "only safetensors"),
    "unknown tensor": ("base", "v", WEIGHT, TensorMismatchError, "'v' of the model is not among the 2"),
    "shape": ("base", "w", WEIGHT.t(), TensorMismatchError, r"'w' is F32 \[4, 2\] in base"),
    "kind of number": ("base", "n", torch.zeros(3), TensorMismatchError, "'n' is I64"),
    "fp8": ("fp8", "w", WEIGHT, ModelError, "needs scales"),
    "integer width": (
        "base", "n", torch.zeros(3, dtype=torch.int32), TensorMismatchError,
        r"'n' is torch\.int32, but 'n' is I64 in base .*; give it as torch\.int64",
    ),
    "bool": ("base", "n", torch.zeros(3, dtype=torch.bool), TensorMismatchError, r"'n' is torch\.bool"),
    "scales": (
        "base", "w", WEIGHT.to(torch.float8_e8m0fnu), TensorMismatchError, r"float8_e8m0fnu, .* F32"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_base_that_does_not_fit_is_refused_before_anything_is_written(case: str, url: str, tmp_path: Path) -> None:
    folder, name, tensor, error, message = MISFITS[case]
    (tmp_path / "empty").mkdir()
    write_checkpoint(tmp_path / "base", {"w": WEIGHT, "n": torch.zeros(3, dtype=torch.int64)})
    write_checkpoint(tmp_path / "fp8", {"w": WEIGHT.to(torch.float8_e4m3fn)})
    with pytest.raises(error, match=message):
        Publisher({name: tensor}, url, base=tmp_path / folder)
    assert not Path(url).exists()


def test_a_file_of_the_base_that_cannot_be_read_is_named(url: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    config = tmp_path / "config.json"
    config.symlink_to("x" * 300)
    with pytest.raises(StoreError, match=f"'{config}' cannot be read: File name too long"):
        Publisher({"w": torch.ones(4)}, url, base=tmp_path)
    assert not Path(url).exists()


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def publish_as(source: str, model: PreTrainedModel, url: str, base: Path, folder: Path) -> None:
    """Begin the run or take it over, as trainers do that have a tied head under one of its names only."""
    named = dict(model.named_parameters())
    if source == "folder":
        saved(model, folder)
        with CheckpointPublisher(url, base) as folders:
            folders.publish(folder)
    elif source == "handed":
        with gathered_publisher(url, base) as publisher:  # type: ignore[union-attr]
            publish_gathered(publisher, 1, named.items())
    elif source == "parts":
        whole = [Part(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor) for name, tensor in named.items()]
        with Publisher(None, url, base, parts=lambda: whole) as publisher:
            publisher.publish(1)
    else:
        if source == "head":
            named[HEAD] = named.pop(EMBEDDING)
        with Publisher(named, url, base=base) as publisher:
            publisher.publish(1)


@pytest.mark.parametrize("source", ["embedding", "head", "parts", "handed", "folder"])
def test_a_tied_head_of_the_base_follows_a_trainer_that_has_it_once(source: str, url: str, tmp_path: Path) -> None:
    """A server loads both tensors where a checkpoint has both."""
    model, base = qwen3(tied=True), tmp_path / "base"
    tensors = saved(model, base)
    assert HEAD not in tensors
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, base / "model.safetensors", {"format": "pt"})
    for step in (1, 2):  # the second publisher takes the run over
        train(model, adamw(model))
        publish_as(source, model, url, base, tmp_path / f"checkpoint-{step}")
        now = snapshot(dict(model.named_parameters()))
        assert_holds(open_run(url), None, now | {HEAD: now[EMBEDDING]})


def test_a_tied_head_of_an_unknown_embedding_is_refused(url: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", {name: torch.zeros(4, 2) for name in ("a", "b", HEAD)})
    (base / "config.json").write_text('{"text_config": {"tie_word_embeddings": true}, "limits": [0, Infinity]}')
    given = {name: torch.zeros(4, 2) for name in ("a", "b")}
    with pytest.raises(ModelError, match=rf"config.json ties tensor '{HEAD}' of base .* 'a', 'b' have its shape"):
        Publisher(given, url, base=base)
    with Publisher(given | {HEAD: given["b"]}, url, base=base):
        assert open_run(url).manifest(0).kind == "reference"
