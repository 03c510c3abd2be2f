"""What a Publisher writes, read back through ``open_run`` and held against the trainer's own weights."""

import logging
import pickle
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.architectures import Plain, adamw, qwen3, same_bits, saved, train
from tests.support.publishers import Hooked
from tests.support.publishing import Tensors, assert_holds, assert_versions, published, snapshot
from trainer_side import Publisher
from vllm_delta_sync import follow, open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import LimitError, ModelError, TensorMismatchError, UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.safetensors_file import shard_tables
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.maintenance.compact import compact
from vllm_delta_sync.tensors.changes import Changes, Full
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import generate


@pytest.mark.parametrize("codec", ["plain", "tiled", "raw"])
@pytest.mark.parametrize(("compression", "shard_bytes"), [("zstd", 2**30), ("zstd", 1), ("none", 1)])
def test_every_version_is_the_trainers_weights(url: str, codec: Any, compression: Any, shard_bytes: int) -> None:
    """Also where each tensor that changes is an object of its own, and once versions are merged."""
    model = Plain()
    optimizer = adamw(model)
    history = [published(model)]
    with Publisher(model, url, codec=codec, compression=compression, shard_bytes=shard_bytes) as publisher:
        for step in range(1, 5):
            train(model, optimizer)
            result = publisher.publish(step=step, wait=True)
            history.append(published(model))
            assert (result.version, result.step, result.kind) == (step, step, "delta")
    run = assert_versions(url, history)
    assert run.head().step == 4
    for version, (old, new) in enumerate(pairwise(history), start=1):
        changed = [name for name in new if not same_bits(old[name], new[name])]
        assert len(run.manifest(version).objects) == (len(changed) if shard_bytes == 1 else 1)
        assert len(changed) > 1
    compact(run)
    assert_versions(url, history)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize(("codec", "shard_bytes"), [("plain", 1), ("tiled", 200), ("raw", 2**30)])
def test_every_dtype_and_shape_goes_through(codec: Any, shard_bytes: int, url: str) -> None:
    def tensors(seed: int) -> Tensors:
        torch.manual_seed(seed)
        named = {str(dtype): (torch.randn(6, 5) * 3).abs().to(dtype) for dtype in DTYPES}
        named |= {f"t {dtype}": (torch.randn(6, 5) * 3).abs().to(dtype).t() for dtype in DTYPES}
        return named | {"scalar": torch.randn(()), "empty": torch.empty(3, 0)}

    live = tensors(0)
    with Publisher(live, url, codec=codec, shard_bytes=shard_bytes) as publisher:
        for name, tensor in tensors(1).items():
            live[name].copy_(tensor)
        publisher.publish(step=1)
    assert (len(open_run(url).head().objects) > 1) == (shard_bytes < 2**30)
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


def test_results_say_what_became_of_a_version(url: str) -> None:
    model = Plain()
    with Publisher(model, url) as publisher:
        result = publisher.publish(step=4, wait=True)
        assert (result.version, result.changed, result.payload_bytes) == (1, 0, 0)
        publisher.flush()
        manifest = open_run(url).head()
        assert (manifest.version, manifest.step, manifest.objects) == (1, 4, [])
        assert manifest.fingerprint == open_run(url).manifest(0).fingerprint
        train(model, adamw(model))
        result = publisher.publish(step=1, sidecars={"state": b"large"})
        # As an actor of Ray returns it: under way still, or done.
        copies = [pickle.loads(pickle.dumps(result)) for _ in range(2)]  # noqa: S301 (its own bytes)
        assert [each.metrics() for each in copies] == [result.metrics()] * 2
        copies[0].wait()
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
        assert "version=2" in repr(result)


OPTIONS: dict[str, list[Any]] = {
    "codec": ["gzip"], "compression": ["lz4"], "every": [0, 1.5], "baseline": ["gpu"], "rescan_bytes": [-1, 1.5, True],
    "anchor_every": [0, -1, 2.5], "gate": ["refuse"], "budget": [{"max_bytes": 9}], "first_step": [-1, 2**53, 1.0],
    "bucket": ["ftp://host/run", None, 5], "base": [5], "notice": [5555], "files": [5], "signing_key": [5],
}  # fmt: skip


@pytest.mark.parametrize(("option", "value"), [(name, value) for name, values in OPTIONS.items() for value in values])
def test_option_that_makes_no_sense_is_refused_by_name(option: str, value: Any, url: str) -> None:
    with pytest.raises(UsageError, match="unknown scheme" if value == "ftp://host/run" else f"{option} is"):
        Publisher(nn.Linear(2, 2), **({"bucket": url} | {option: value}))
    assert not Path(url).exists()


def test_a_path_names_a_run_or_a_key_too_and_a_mapping_has_weights(tmp_path: Path) -> None:
    """As the types of the arguments say, which mypy checks here."""
    generate(tmp_path / "key")
    live = {"w": torch.zeros(3)}
    keys, run = (tmp_path / "key", tmp_path / "key.pub"), tmp_path / "run"
    with Publisher(live, run, signing_key=keys[0], trusted_keys=keys[1]) as publisher:
        publisher.publish(1, weights={"w": torch.ones(3)})
    with open_run(run, Keyring.load(keys[1])) as reader:
        assert reader.head().version == 1
    [update] = follow(run, tmp_path / "folder", once=True, keyring=Keyring.load(keys[1]))
    assert update.version == 1


def test_raw_codec_refuses_names_that_clash_with_its_own(url: str) -> None:
    model = [("w", torch.zeros(2)), ("w.values", torch.zeros(2))]
    with pytest.raises(UsageError, match="codec='plain'"):
        Publisher(model, url, codec="raw")
    with Publisher(model, url):
        pass


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_step_that_is_no_step_is_refused(step: Any, url: str) -> None:
    with Publisher(nn.Linear(2, 2), url) as publisher:
        with pytest.raises(UsageError, match="step is"):
            publisher.publish(step=step)


def test_closed_publisher_refuses_and_leaves_the_bucket_open(url: str) -> None:
    with open_bucket(url) as bucket:
        publisher = Publisher(nn.Linear(2, 2), bucket)
        assert publisher.url == bucket.url
        publisher.close()
        publisher.close()
        for call in (lambda: publisher.publish(step=1), publisher.flush):
            with pytest.raises(UsageError, match="closed"):
                call()
        assert bucket.stat("HEAD.json").bytes > 0


class Given:
    """An iterable that a framework hands over; knows whether it was read to its end."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self.drained = tensors, False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()
        self.drained = True


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
            publisher.publish(step=1, weights=chain([("a", torch.ones(10)), *items], rest))
        assert rest.drained
        assert publisher.version == 0
        assert publisher.publish(step=2).changed == 0
    assert open_run(url).verify().head == 1
    assert_holds(open_run(url), 1, held)


def test_handed_over_weights_that_need_scales_are_refused(url: str) -> None:
    live = {"w": torch.randn(10).to(torch.float8_e4m3fn)}
    with Publisher(live, url) as publisher:
        with pytest.raises(ModelError, match=r"'w' is F8_E4M3 in this run .*needs scales"):
            publisher.publish(step=1, weights=[("w", torch.randn(10))])
        assert publisher.version == 0


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


# Objects too small for a model are refused before any of them is uploaded


TOO_MANY = limits.MAX_OBJECTS_PER_VERSION + 1
MESSAGE = (
    rf"shard_bytes is 1: .* {TOO_MANY} objects, .* 65536 .*MAX_OBJECTS_PER_VERSION.*; set shard_bytes to \d+ or more"
)


def no_object(key: str) -> None:
    assert not key.startswith("objects/"), "something was uploaded"


@pytest.mark.slow
def test_a_full_snapshot_of_too_many_objects(bucket: Hooked) -> None:
    live = {f"{number:06d}": torch.zeros(2) for number in range(TOO_MANY)}
    bucket.before = no_object
    with pytest.raises(LimitError, match=MESSAGE):
        Publisher(live, bucket, shard_bytes=1)
    assert list(bucket.list()) == []


def test_the_size_that_is_advised_is_large_enough() -> None:
    """For shards and for parts of a delta, though the tensors fit badly into it."""
    sizes = np.random.default_rng(0).choice([1, 3, 700, 1000], TOO_MANY).tolist()
    table = TensorTable([TensorSpec(f"{number:06d}", "U8", (size,)) for number, size in enumerate(sizes)])
    assert len(shard_tables(table, advised(lambda: shard_tables(table, 1)))) <= limits.MAX_OBJECTS_PER_VERSION
    changes = Changes(full=[Full(number, np.zeros(size, np.uint8)) for number, size in enumerate(sizes[:1000])])
    assert len(changes.parts(advised(lambda: changes.parts(1, 50)), 50)) <= 50
    assert len(changes.parts(1, 1000)) == 1000


def advised(cut: Callable[[], object]) -> int:
    with pytest.raises(LimitError) as error:
        cut()
    return int(error.value.message.split("set shard_bytes to ")[1].split()[0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda url, live: Publisher(live, url, notice_key="/nowhere"), "without notice="),
        (lambda url, live: Publisher(live, url, on_version=cast(Any, 5)), "on_version is a int"),
        (lambda url, live: Publisher(cast(Any, lambda: None), url), "got a NoneType"),
        (lambda url, live: Publisher(live, url).publish(1, weights=cast(Any, nn.Linear(1, 1))), "weights= is a Linear"),
        (lambda url, live: Publisher(live, url).publish(1, weights=cast(Any, lambda: live)), "weights= is a function"),
        (lambda url, live: Publisher(live, url).publish(True), "step is True"),
    ],
)
def test_arguments_of_another_kind(call: Callable[[str, Any], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        call(str(tmp_path / "run"), {"w": torch.zeros(3)})
