"""Version 0 is a reference to the base that is given, or a snapshot; bases that do not fit are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.architectures import adamw, qwen3, qwen3_moe, saved, train
from tests.support.publishing import assert_holds, assert_same, snapshot
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import ModelError, NotFoundError, TensorMismatchError


def test_anchor_is_a_plain_checkpoint(url: str, tmp_path: Path) -> None:
    model = qwen3_moe()
    with Publisher(model, url):
        pass
    (ref,) = open_run(url).manifest(0).objects
    assert_same(load_file(Path(url) / ref.key), saved(model, tmp_path / "checkpoint"))


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


def base_refusals(base: Path) -> dict[str, tuple[Any, Path, type[Exception], str]]:
    weight = torch.randn(4, 2)
    save_file({"w": weight, "n": torch.zeros(3, dtype=torch.int64)}, base / "model.safetensors")
    (base / "empty").mkdir(exist_ok=True)
    (base / "fp8").mkdir(exist_ok=True)
    save_file({"w": weight.to(torch.float8_e4m3fn)}, base / "fp8" / "model.safetensors")
    return {
        "no folder": ([("w", weight)], base / "none", NotFoundError, "does not exist"),
        "no checkpoint": ([("w", weight)], base / "empty", NotFoundError, "only safetensors"),
        "unknown tensor": ([("v", weight)], base, TensorMismatchError, "'v' of the model is not among the 2"),
        "shape": ([("w", weight.t())], base, TensorMismatchError, r"'w' is F32 \[4, 2\] in base"),
        "kind of number": ([("n", torch.zeros(3))], base, TensorMismatchError, "'n' is I64"),
        "fp8": ([("w", weight)], base / "fp8", ModelError, "needs scales"),
        "integer width": (
            [("n", torch.zeros(3, dtype=torch.int32))], base, TensorMismatchError,
            r"'n' is torch\.int32, but 'n' is I64 in base .*; give it as torch\.int64",
        ),
        "bool": ([("n", torch.zeros(3, dtype=torch.bool))], base, TensorMismatchError, r"'n' is torch\.bool"),
        "scales": (
            [("w", torch.ones(4, 2).to(torch.float8_e8m0fnu))], base, TensorMismatchError, r"float8_e8m0fnu, .* F32"
        ),
    }  # fmt: skip


BASE_CASES = ["no folder", "no checkpoint", "unknown tensor", "shape", "kind of number", "fp8"]
BASE_CASES += ["integer width", "bool", "scales"]


@pytest.mark.parametrize("case", BASE_CASES)
def test_base_that_does_not_fit_is_refused_before_anything_is_written(case: str, url: str, tmp_path: Path) -> None:
    model, base, error, message = base_refusals(tmp_path)[case]
    with pytest.raises(error, match=message):
        Publisher(model, url, base=base)
    assert not Path(url).exists()
