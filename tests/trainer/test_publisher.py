"""What a Publisher writes, read back through ``open_run`` and held against the trainer's own weights."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from tests.support.architectures import Plain, adamw, qwen3, qwen3_moe, same_bits, saved, train
from tests.support.publishing import Tensors, assert_holds, snapshot
from trainer_side import Publisher, PublishResult
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import (
    TensorMismatchError,
    UsageError,
)
from vllm_delta_sync.notice import NoticeSubscriber


@pytest.mark.parametrize("codec", ["auto", "packed", "context", "raw"])
@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_every_version_is_the_trainers_weights(url: str, codec: Any, compression: Any) -> None:
    model = Plain()
    optimizer = adamw(model)
    names = [name for name in model.state_dict() if name != "head.weight"]
    history = [snapshot({name: model.state_dict()[name] for name in names})]
    with Publisher(model, url, codec=codec, compression=compression) as publisher:
        for step in range(1, 6):
            train(model, optimizer)
            result = publisher.publish(step=step, wait=True)
            history.append(snapshot({name: model.state_dict()[name] for name in names}))
            assert (result.version, result.step, result.kind) == (step, step, "delta")
    run = open_run(url)
    report = run.verify()
    assert (report.versions, report.replayed) == (6, True)
    assert run.head().step == 5
    for version, expected in enumerate(history):
        assert_holds(run, version, expected)


@pytest.mark.parametrize("build", [qwen3, qwen3_moe])
def test_transformers_models_are_published_in_checkpoint_form(build: Any, url: str, tmp_path: Path) -> None:
    model: PreTrainedModel = build(dtype="bfloat16")
    assert model.dtype == torch.float32
    optimizer = adamw(model, 1e-3)
    history = [snapshot(saved(model, tmp_path / "0"), torch.bfloat16)]
    model.config.dtype = "bfloat16"
    with Publisher(model, url) as publisher:
        for step in range(1, 4):
            train(model, optimizer)
            publisher.publish(step=step, wait=True)
            history.append(snapshot(saved(model, tmp_path / str(step)), torch.bfloat16))
    run = open_run(url)
    assert run.verify().replayed
    assert {spec.dtype for spec in run.table} == {"BF16"}
    for version, expected in enumerate(history):
        assert_holds(run, version, expected)


def test_weights_may_change_as_soon_as_publish_returns(url: str) -> None:
    weight = torch.randn(500_000).bfloat16()
    with Publisher([("w", weight)], url) as publisher:
        weight.add_(0.01)
        expected = weight.clone()
        publisher.publish(step=1)
        weight.fill_(7)
    assert_holds(open_run(url), 1, {"w": expected})


def test_bits_not_values_decide(url: str) -> None:
    patterns = {
        "nan payloads": ([0x7FC0, 0x7FC1, 0xFFC0, 0x7F81], [0x7FC1, 0x7FC0, 0x7FC0, 0xFF81]),
        "signed zero": ([0x0000, 0x8000, 0x0000, 0x8000], [0x8000, 0x0000, 0x0000, 0x8000]),
        "infinities": ([0x7F80, 0xFF80, 0x7F7F, 0x0001], [0xFF80, 0x7F80, 0x7F80, 0x8001]),
    }
    before = {name: _bfloat16(old) for name, (old, _) in patterns.items()}
    after = {name: _bfloat16(new) for name, (_, new) in patterns.items()}
    live = snapshot(before)
    with Publisher(live, url) as publisher:
        for name, tensor in after.items():
            live[name].view(torch.int16).copy_(tensor.view(torch.int16))
        assert publisher.publish(step=1).changed == 4 + 2 + 4
    assert_holds(open_run(url), 0, before)
    assert_holds(open_run(url), 1, after)


def _bfloat16(patterns: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(patterns, np.uint16).view(np.int16)).view(torch.bfloat16)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def test_every_dtype_and_shape_goes_through(url: str) -> None:
    def tensors(seed: int) -> Tensors:
        torch.manual_seed(seed)
        named = {str(dtype): (torch.randn(6, 5) * 3).abs().to(dtype) for dtype in DTYPES}
        named |= {f"t {dtype}": (torch.randn(6, 5) * 3).abs().to(dtype).t() for dtype in DTYPES}
        return named | {"scalar": torch.randn(()), "empty": torch.empty(3, 0)}

    live = tensors(0)
    with Publisher(live, url) as publisher:
        for name, tensor in tensors(1).items():
            live[name].copy_(tensor)
        publisher.publish(step=1)
    assert_holds(open_run(url), 0, tensors(0))
    assert_holds(open_run(url), 1, tensors(1))


def test_scales_of_a_module_keep_their_dtype(url: str) -> None:
    model = nn.Linear(4, 4)
    setattr(model, "config", SimpleNamespace(dtype="bfloat16"))  # noqa: B010  nn.Module declares none
    model.scale = nn.Parameter(torch.ones(4).to(torch.float8_e8m0fnu), requires_grad=False)
    with Publisher(model, url) as publisher:
        model.scale.data.copy_(torch.full((4,), 4.0))
        assert publisher.publish(step=1).changed == 4
    held = dict(open_run(url).tensors())
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16, torch.float8_e8m0fnu}
    assert same_bits(held["scale"], model.scale.detach())


def test_unchanged_weights_make_a_version_without_objects(url: str) -> None:
    model = Plain()
    with Publisher(model, url) as publisher:
        result = publisher.publish(step=4)
        assert (result.version, result.changed, result.payload_bytes) == (1, 0, 0)
    manifest = open_run(url).head()
    assert (manifest.version, manifest.step, manifest.objects) == (1, 4, [])
    assert manifest.fingerprint == open_run(url).manifest(0).fingerprint
    open_run(url).verify()


def test_result_fields(url: str) -> None:
    model = Plain()
    with Publisher(model, url) as publisher:
        train(model, adamw(model))
        result = publisher.publish(step=1)
        assert result.payload_bytes > 0
        manifest = open_run(url).head()
        assert result.payload_bytes == manifest.payload_bytes
        assert result.total == manifest.total == open_run(url).table.total
        assert result.full_bytes == manifest.full_bytes
        assert 0 < result.changed <= manifest.changed
        seconds = dict(result.seconds)
        assert seconds.keys() == {"diff", "encode", "upload", "total"}
        assert seconds["total"] >= max(seconds["diff"], seconds["encode"], seconds["upload"]) > 0
        with pytest.raises(KeyError):
            result.seconds["sleep"]
        assert "version=1" in repr(result)


def test_every_kth_call_publishes_all_that_changed(url: str) -> None:
    model = Plain()
    optimizer = adamw(model)
    results: list[PublishResult] = []
    with Publisher(model, url, every=3) as publisher:
        for step in range(1, 8):
            train(model, optimizer)
            results.append(publisher.publish(step=step, wait=True))
            if step == 6:
                expected = snapshot(model.state_dict())
    assert [result.version for result in results] == [None, None, 1, None, None, 2, None]
    assert {result.kind for result in results} == {"skipped", "delta"}
    assert (results[0].payload_bytes, results[0].seconds["upload"]) == (0, 0)
    assert [manifest.step for manifest in open_run(url).log()] == [0, 3, 6]
    del expected["head.weight"]
    assert_holds(open_run(url), 2, expected)


def test_densely_changed_tensor_is_sent_in_full(url: str) -> None:
    weight = torch.randn(100_000).bfloat16()
    other = torch.randn(100_000).bfloat16()
    with Publisher([("noise", weight), ("close", other)], url) as publisher:
        weight.view(torch.int16).random_()
        weight.view(torch.int16).bitwise_and_(0x7F7F)
        other.view(torch.int16).add_(1)
        result = publisher.publish(step=1)
        assert result.payload_bytes < 1.3 * weight.nbytes
    changes = open_run(url).changes(open_run(url).head())
    table = open_run(url).table
    assert [table[full.id].name for full in changes.full] == ["noise"]
    assert [table[int(id)].name for group in changes.sparse for id in group.ids] == ["close"]
    assert_holds(open_run(url), 1, {"noise": weight, "close": other})


def test_raw_codec_is_readable_with_safetensors_alone(url: str) -> None:
    weight = torch.randn(1000)
    with Publisher([("w", weight)], url, codec="raw") as publisher:
        weight[[3, 500]] = 2.5
        publisher.publish(step=1)
    (ref,) = open_run(url).head().objects
    with safe_open(Path(url) / ref.key, "pt") as file:
        assert file.get_tensor("w.indices").tolist() == [3, 500]
        assert file.get_tensor("w.values").tolist() == [2.5, 2.5]


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "codec": ({"codec": "gzip"}, "codec is 'gzip'"),
    "compression": ({"compression": "lz4"}, "compression is 'lz4'"),
    "every": ({"every": 0}, "every is 0"),
    "every, fraction": ({"every": 1.5}, r"every is 1\.5"),
    "bucket": ({"bucket": "ftp://host/run"}, "unknown scheme 'ftp'"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_option_that_is_not_understood_is_refused(case: str, url: str) -> None:
    options, message = OPTIONS[case]
    with pytest.raises(UsageError, match=message):
        Publisher(nn.Linear(2, 2), **({"bucket": url} | options))
    assert not Path(url).exists()


def test_raw_codec_refuses_names_that_clash_with_its_own(url: str) -> None:
    model = [("w", torch.zeros(2)), ("w.values", torch.zeros(2))]
    with pytest.raises(UsageError, match="codec='packed'"):
        Publisher(model, url, codec="raw")
    with Publisher(model, url):
        pass


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_step_that_is_no_step_is_refused(step: Any, url: str) -> None:
    with Publisher(nn.Linear(2, 2), url) as publisher:
        with pytest.raises(UsageError, match="step is"):
            publisher.publish(step=step)


def test_open_bucket_is_left_open(url: str) -> None:
    with open_bucket(url) as bucket:
        with Publisher(nn.Linear(2, 2), bucket) as publisher:
            assert publisher.url == bucket.url
        assert bucket.stat("HEAD.json").bytes > 0


def test_closed_publisher_refuses(url: str) -> None:
    publisher = Publisher(nn.Linear(2, 2), url)
    publisher.close()
    publisher.close()
    with pytest.raises(UsageError, match="closed"):
        publisher.publish(step=1)
    with pytest.raises(UsageError, match="closed"):
        publisher.flush()


class Given(Iterator[tuple[str, torch.Tensor]]):
    """An iterator that a framework hands over; knows whether it was read to its end."""

    def __init__(self, tensors: Tensors) -> None:
        self._items = iter(tensors.items())
        self.drained = False

    def __next__(self) -> tuple[str, torch.Tensor]:
        try:
            return next(self._items)
        except StopIteration:
            self.drained = True
            raise


def test_handed_over_weights(url: str) -> None:
    held = {"a": torch.randn(10), "b": torch.randn(10)}
    with Publisher(snapshot(held), url, every=2) as publisher:
        given = Given({"a": torch.randn(10)})
        assert publisher.publish(step=1, weights=given).kind == "skipped"
        assert given.drained
        new = {"b": torch.randn(10)}
        given = Given(new)
        assert publisher.publish(step=2, weights=given).version == 1
        assert given.drained
    assert_holds(open_run(url), 1, held | new)


def test_handed_over_weights_without_a_model(url: str, tmp_path: Path) -> None:
    base = saved(qwen3(), tmp_path / "base")
    new = {"model.norm.weight": torch.randn(32)}
    with Publisher([], url, base=tmp_path / "base") as publisher:
        publisher.publish(step=1, weights=Given(new))
    assert open_run(url).manifest(0).kind == "reference"
    assert_holds(open_run(url), 1, base | new)


WRONG: dict[str, tuple[list[tuple[str, torch.Tensor]], str]] = {
    "unknown": ([("c", torch.ones(10))], "'c' is not in this run"),
    "shape": ([("b", torch.ones(11))], r"'b' is torch\.float32 \[11\]"),
    "kind of number": ([("b", torch.ones(10, dtype=torch.int32))], r"'b' is torch\.int32"),
    "integer width": ([("n", torch.ones(4, dtype=torch.int64))], r"int64, but 'n' is I32 .* as torch\.int32"),
    "scales": ([("b", torch.ones(10).to(torch.float8_e8m0fnu))], r"'b' is torch\.float8_e8m0fnu"),
    "twice": ([("a", torch.ones(10))], "'a' is yielded twice"),
    "tied apart": ([("b", torch.ones(10)), ("tied", torch.zeros(10))], "'tied' is tied to 'b'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_handed_over_weights_change_nothing(case: str, url: str) -> None:
    items, message = WRONG[case]
    held = {"a": torch.randn(10), "b": torch.randn(10), "n": torch.zeros(4, dtype=torch.int32)}
    live = snapshot(held)
    live["tied"] = live["b"]
    with Publisher(live, url) as publisher:
        rest = Given({f"x{index}": torch.ones(1) for index in range(3)})
        with pytest.raises(TensorMismatchError, match=message):
            publisher.publish(step=1, weights=_chain([("a", torch.ones(10)), *items], rest))
        assert rest.drained
        assert publisher.version == 0
        assert publisher.publish(step=2).changed == 0
    assert open_run(url).verify().head == 1
    assert_holds(open_run(url), 1, held)


def _chain(items: list[tuple[str, torch.Tensor]], rest: Given) -> Iterator[tuple[str, torch.Tensor]]:
    yield from items
    yield from rest


def test_changed_model_is_refused_and_nothing_is_published(url: str) -> None:
    model = nn.Linear(2, 2)
    expected = snapshot(model.state_dict())
    with Publisher(model, url) as publisher:
        model.weight = nn.Parameter(torch.zeros(3, 2))
        with pytest.raises(TensorMismatchError, match="'weight' is now"):
            publisher.publish(step=1)
    assert_holds(open_run(url), None, expected)


def test_notices_name_each_version(url: str) -> None:
    model = Plain()
    with Publisher(model, url, notice="tcp://127.0.0.1:*") as publisher:
        assert publisher.notice_address is not None
        subscriber = NoticeSubscriber(publisher.notice_address, publisher.run)
        received = None
        for step in range(1, 100):
            publisher.publish(step=step, wait=True)
            publisher.flush()
            received = subscriber.receive(0.2)
            if received is not None:
                break
        assert received is not None
        assert received.version <= publisher.version
        assert received.manifest == open_run(url).manifest(received.version).digest
        subscriber.close()


def test_taken_notice_address_only_warns(url: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Plain()
    with Publisher(model, url, notice="tcp://127.0.0.1:*") as first:
        assert first.notice_address is not None
        with caplog.at_level(logging.WARNING):
            with Publisher(model, f"{url}-2", notice=first.notice_address) as second:
                assert second.notice_address is None
                second.publish(step=1)
    assert "publishing without notices" in caplog.text
    assert open_run(f"{url}-2").head().version == 1


def test_tied_weights_are_published_once(url: str) -> None:
    model = qwen3(tied=True)
    with Publisher(model, url) as publisher:
        train(model, adamw(model))
        publisher.publish(step=1)
    run = open_run(url)
    assert "lm_head.weight" not in run.table
    held = dict(run.tensors())
    assert same_bits(held["model.embed_tokens.weight"], model.lm_head.weight.detach())


def test_fingerprint_is_that_of_a_full_scan(url: str) -> None:
    model = Plain()
    optimizer = adamw(model, 1e-2)
    with Publisher(model, url) as publisher:
        for step in range(1, 4):
            train(model, optimizer)
            publisher.publish(step=step, wait=True)
    with Publisher(model, f"{url}-2"):
        pass
    assert open_run(url).head().fingerprint == open_run(f"{url}-2").manifest(0).fingerprint


def test_sizes_are_sane(url: str) -> None:
    weight = torch.randn(1_000_000).bfloat16()
    with Publisher([("w", weight)], url) as publisher:
        chosen = torch.randperm(weight.numel())[:10_000]
        weight.view(torch.int16)[chosen] += 1
        result = publisher.publish(step=1)
        assert result.changed == 10_000
        assert result.payload_bytes < 1.6 * result.changed
        assert math.isclose(result.full_bytes, 2e6)
