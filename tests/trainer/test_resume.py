"""A publisher that takes over a run: what it reads back, what it publishes next, and what it begins anew behind."""

import json
import logging
import shutil
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.architectures import adamw, qwen3, saved, train
from tests.support.checkpoints import write_checkpoint
from tests.support.publishers import Hooked
from tests.support.publishing import Tensors, assert_holds, assert_versions, damage, keys, snapshot
from trainer_side import Publisher
from trainer_side.checkpoint_folders import CheckpointPublisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import ObjectInfo, open_bucket
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    ConflictError,
    DeltaSyncError,
    FormatError,
    LimitError,
    NotFoundError,
    TensorMismatchError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import dump_canonical
from vllm_delta_sync.format.documents import Claim, claim_key
from vllm_delta_sync.format.manifest import HEAD_KEY, Manifest, version_key
from vllm_delta_sync.maintenance.branch import branch


def tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(5000, generator=generator).bfloat16(),
        "b": torch.randn(40, 30, generator=generator),
        "empty": torch.empty(3, 0),
    }


def step(live: Tensors, number: int) -> None:
    """A few elements of each tensor."""
    live["a"].view(torch.int16)[number::50] += 1
    live["b"][number % 40] += 0.25


def published(url: str, versions: int, **options: Any) -> tuple[Tensors, list[Tensors]]:
    """A run of so many versions beside version 0; the live weights, and those of each version."""
    live = tensors()
    history = [snapshot(live)]
    with Publisher(live, url, **options) as publisher:
        for number in range(1, versions + 1):
            step(live, number)
            publisher.publish(step=10 * number, wait=True)
            history.append(snapshot(live))
    return live, history


@pytest.mark.parametrize("codec", ["plain", "tiled", "raw"])
def test_next_version_is_a_delta_against_the_head(codec: Any, url: str) -> None:
    live, history = published(url, 3, codec=codec)
    run = open_run(url).info.run
    for turn in range(2):
        before = keys(url)
        # What was not published before goes out with the next version.
        step(live, 40 + turn)
        with Publisher(live, url, codec=codec) as publisher:
            assert (publisher.run, publisher.version) == (run, 3 + turn)
            assert keys(url) - before == {claim_key(turn + 1)}
            claim, head = Claim.from_bytes(Path(url, claim_key(turn + 1)).read_bytes()), open_run(url).head()
            assert (claim.epoch, claim.version, claim.run, claim.manifest) == (turn + 1, 3 + turn, run, head.digest)
            result = publisher.publish(step=100)
            assert (result.version, result.changed) == (4 + turn, 100 + 30)
        history.append(snapshot(live))
    manifests = list(assert_versions(url, history).log())
    assert [manifest.epoch for manifest in manifests] == [0, 0, 0, 0, 1, 2]
    assert [manifest.base_version for manifest in manifests] == [None, 0, 1, 2, 3, 4]
    assert [manifest.breaks for manifest in manifests] == [[]] * 6


def test_another_run_than_the_expected_one_is_refused_before_any_effect(url: str) -> None:
    """The URL may have been used again, or be mistyped."""

    def refused(error: type[DeltaSyncError], message: str) -> None:
        before = keys(url)
        for make in (partial(Publisher, tensors()), CheckpointPublisher):
            with pytest.raises(error, match=f"expect_run is '{32 * '0'}', but .*run holds {message}"):
                make(url, expect_run=32 * "0")
        assert keys(url) == before

    refused(UsageError, "no run; correct the URL, or leave expect_run out")
    live, _ = published(url, 1)
    run = open_run(url).info.run
    refused(ConflictError, f"run '{run}'; correct the URL")
    with pytest.raises(UsageError, match="expect_run is given with resume=False"):
        Publisher(live, url, expect_run=run, resume=False)
    with Publisher(live, url, expect_run=run) as publisher:
        assert (publisher.run, publisher.version) == (run, 1)


UNFIT: dict[str, tuple[Tensors, str]] = {
    "name": ({"z": torch.ones(2)}, r"'z' .*not among the 3 .*publish the model of this run, or start a new run"),
    "shape": ({"a": torch.ones(4999)}, r"'a' is BF16 \[5000\] in the run .*\[4999\] in the model"),
    "kind of number": ({"a": torch.ones(5000, dtype=torch.int16)}, r"'a' is torch\.int16"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_model_that_does_not_fit_is_refused_before_anything_is_claimed(case: str, url: str) -> None:
    live, message = UNFIT[case]
    published(url, 1)
    before = keys(url)
    with pytest.raises(TensorMismatchError, match=message):
        Publisher(live, url)
    assert keys(url) == before


def test_tensors_not_in_the_model_keep_their_bits(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = qwen3()
    base = saved(model, tmp_path / "base") | {"mtp.weight": torch.randn(50).half()}
    save_file(base, tmp_path / "base" / "model.safetensors")
    own = torch.randn(50).half()
    with Publisher(model, url, base=tmp_path / "base") as publisher:
        publisher.publish(step=1, weights=[("mtp.weight", own)])
    with Publisher(model, url) as publisher:
        train(model, adamw(model))
        publisher.publish(step=2)
    assert "1 of the run's" in caplog.text
    assert "mtp.weight" in caplog.text
    assert [manifest.kind for manifest in open_run(url).log()] == ["reference", "delta", "delta"]
    assert_holds(open_run(url), 2, saved(model, tmp_path / "now") | {"mtp.weight": own})


def test_one_line_before_the_claim_says_what_is_read_and_written(
    bucket: Hooked, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = tensors()
    base = write_checkpoint(tmp_path / "base", live)
    with Publisher(live, bucket, base=base, merge=False) as publisher:
        step(live, 1)
        publisher.publish(step=1)
    run = open_run(bucket.url)
    said: list[str] = []
    bucket.before = lambda key: said.append(caplog.text) if key.startswith("claims/") else None
    expected = (
        f"taking over run {run.info.run} at {bucket.url}: this reads version 1 back; then it claims the run, and "
        "writes nothing else unless"
    )
    with caplog.at_level(logging.INFO):
        Publisher(live, bucket).close()
        damage(bucket.url, run.head().objects[0].key)
        Publisher(live, bucket).close()
    assert [expected in text for text in said] == [True, True]
    lost = f"version 1 of {bucket.url} cannot be rebuilt, so the current weights are committed as a full snapshot after"
    assert [f"{lost} it, of {run.table.full_bytes:,} bytes" in text for text in said] == [False, True]


def test_base_says_where_the_first_version_lies_now(url: str, tmp_path: Path) -> None:
    live = tensors()
    write_checkpoint(tmp_path / "base", live)
    with Publisher(live, url, base=tmp_path / "base") as publisher:
        publisher.publish(step=1)
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    before = keys(url)
    with pytest.raises(NotFoundError, match="is not a directory"):
        Publisher(live, url, base=tmp_path / "base")
    assert keys(url) == before
    with pytest.raises(BaseUnavailableError, match="which is not here; pass base= with its path"):
        Publisher(live, url)
    assert keys(url) == before
    with Publisher(live, url, base=tmp_path / "elsewhere") as publisher:
        step(live, 1)
        publisher.publish(step=2)
    assert [manifest.kind for manifest in open_run(url).log()] == ["reference", "delta", "delta"]


def give_other_base(case: str, base: Path) -> tuple[Path, str]:
    """Make a base that is not the one in ``base``, which is sharded → where it is, and what is said of it."""
    if case == "missing file":
        (base / "model-00002-of-00002.safetensors").unlink()
        return base, "'model-00002-of-00002.safetensors' is missing"
    changed = tensors()
    if case == "quantized":
        quantized = {"a": changed["a"].to(torch.float8_e4m3fn), "a_scale": torch.ones(1)}
        return write_checkpoint(base.with_name(case), changed | quantized), "tensor 'a' has 5000 elements of uint8"
    changed["b"][7, 3] += 1  # a single element of the last tensor but one
    where = base if case == "overwritten" else base.with_name(case)
    return write_checkpoint(where, changed, sharded=True), "has fingerprint"


@pytest.mark.parametrize("state", ["replayed", "anchored", "damaged"])
@pytest.mark.parametrize("case", ["other revision", "overwritten", "missing file", "quantized"])
def test_a_wrong_base_is_refused_before_the_claim_and_the_first_publisher_continues(
    case: str, state: str, url: str, tmp_path: Path
) -> None:
    """With an anchor the base is not needed; where the newest version is lost, the base is not why."""
    live = tensors()
    base = write_checkpoint(tmp_path / "base", live, sharded=True)
    original = shutil.copytree(base, tmp_path / "original")
    with Publisher(live, url, base=base, merge=False) as first:
        step(live, 1)
        first.publish(step=1, wait=True)
        first.flush()
        if state == "anchored":
            first.anchor()
        lost = open_run(url).head().objects[0].key
        intact = Path(url, lost).read_bytes()
        if state == "damaged":
            damage(url, lost)
        where, reason = give_other_base(case, base)
        before = keys(url)
        with pytest.raises(BaseUnavailableError) as caught:
            Publisher(snapshot(live), url, base=where)
        message = caught.value.message
        assert str(where) in message
        assert reason in message
        assert "pass base= with" in message
        assert caught.value.kind == "base"
        assert keys(url) == before
        Path(url, lost).write_bytes(intact)
        step(live, 2)
        assert first.publish(step=2, wait=True).version == 2
        first.flush()
    with Publisher(live, url, base=original) as second:
        assert second.version == 2
        step(live, 3)
        second.publish(step=3)
    assert [manifest.kind for manifest in open_run(url).log()] == ["reference", "delta", "delta", "delta"]
    assert_holds(open_run(url), 3, live, original)


@pytest.mark.parametrize("head", [None, b"{}", b"behind", b"ahead"])
def test_head_that_lags_is_damaged_or_names_what_never_was_is_put_right(head: bytes | None, url: str) -> None:
    live, _ = published(url, 2)
    with open_bucket(url) as bucket:
        good = bucket.get(HEAD_KEY)
        first = open_run(url).manifest(0)
        if head is None:
            bucket.delete(HEAD_KEY)
        elif head == b"behind":
            old = good.replace(open_run(url).head().digest.encode(), first.digest.encode())
            bucket.put(HEAD_KEY, old.replace(b'"version":2', b'"version":0'))
        else:
            bucket.put(HEAD_KEY, head if head == b"{}" else good.replace(b'"version":2', b'"version":9'))
        with Publisher(live, url) as publisher:
            assert publisher.version == 2
            assert bucket.get(HEAD_KEY) == good
    assert [manifest.kind for manifest in open_run(url).log()] == ["anchor", "delta", "delta"]


LOST = {
    "object gone": 1, "object damaged": 1 << 30, "manifest damaged": 1, "every object gone": 1 << 30,
    "manifest and HEAD damaged": 1 << 30, "every manifest damaged": 1,
}  # fmt: skip


@pytest.mark.parametrize(("case", "shard_bytes"), LOST.items())
def test_lost_head_is_begun_anew_behind(
    case: str, shard_bytes: int, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    live, history = published(url, 3, merge=False)
    manifest = open_run(url).manifest(3)
    with open_bucket(url) as bucket:
        if case == "object damaged":
            damage(url, manifest.objects[0].key)
        elif "gone" in case:
            every = [info.key for info in bucket.list("objects/")]
            for key in every if "every" in case else [manifest.objects[0].key]:
                bucket.delete(key)
        else:
            for version in range(4) if "every" in case else [3]:
                damage(url, version_key(version))
        stored = sha256(bucket.get(version_key(3))).hexdigest()
        if "HEAD" in case:
            bucket.put(HEAD_KEY, b"{")
    elsewhere = snapshot(live)
    step(elsewhere, 9)
    with Publisher(elsewhere, url, shard_bytes=shard_bytes) as publisher:
        assert publisher.version == 4
        anew = snapshot(elsewhere)
        step(elsewhere, 10)
        publisher.publish(step=50)
    assert "version 3 of" in caplog.text
    assert "cannot be rebuilt" in caplog.text
    run = open_run(url)
    assert run.head().version == 5
    fourth = run.manifest(4)
    assert (fourth.kind, fourth.base_version, fourth.epoch, fourth.parent) == ("anchor", None, 1, stored)
    assert [(item.version, item.base_version) for item in run.head().breaks] == [(4, None)]
    assert len(fourth.objects) == (3 if shard_bytes == 1 else 1)
    assert_holds(run, 4, anew)
    assert_holds(run, 5, elsewhere)
    if "every" not in case:
        assert_holds(run, 2, history[2])
    with Publisher(elsewhere, url) as publisher:
        assert publisher.version == 5


def test_a_model_that_lacks_tensors_begins_anew_only_with_a_base_that_has_them(url: str, tmp_path: Path) -> None:
    live, _ = published(url, 1)
    write_checkpoint(tmp_path / "base", live)
    for version in range(2):
        damage(url, version_key(version))
    rest = snapshot(live)
    del live["b"]
    with pytest.raises(FormatError, match="for a full snapshot the model lacks tensor 'b'"):
        Publisher(live, url)
    assert open_run(url).versions() == [0, 1]
    with Publisher(live, url, base=tmp_path / "base") as publisher:
        assert publisher.version == 2
    assert_holds(open_run(url), 2, rest)


def test_gap_in_the_chain_is_no_reason_to_begin_anew_where_the_head_can_be_rebuilt(url: str) -> None:
    live, _ = published(url, 2)
    with Publisher(live, url) as publisher:
        publisher.anchor()
    with open_bucket(url) as bucket:
        for info in list(bucket.list("objects/")):
            if any(info.key == ref.key for version in range(3) for ref in open_run(url).manifest(version).objects):
                bucket.delete(info.key)
    with Publisher(live, url) as publisher:
        assert publisher.version == 2


def test_manifests_say_whether_they_can_be_taken_back(url: str) -> None:
    live = tensors()
    with Publisher(live, url, codec="plain") as publisher:
        step(live, 1)
        publisher.publish(step=1)
        publisher.publish(step=2, wait=True)
        live["a"].view(torch.int16).random_().bitwise_and_(0x3FFF)
        publisher.publish(step=3, wait=True)
    assert [manifest.reversible for manifest in open_run(url).log()] == [False, True, True, False]
    with Publisher(tensors(), f"{url}-raw", codec="raw") as publisher:
        publisher.publish(step=1, weights=[("b", torch.ones(40, 30))])
    assert not open_run(f"{url}-raw").head().reversible


def test_manifest_of_a_later_release_is_left_alone(url: str) -> None:
    live, _ = published(url, 1)
    with open_bucket(url) as bucket:
        data = bucket.get(version_key(1)).replace(b'"requires":["tiled","zstd"]', b'"requires":["later"]')
        bucket.put(version_key(1), data)
    before = keys(url)
    with pytest.raises(UnsupportedError, match="upgrade to read it"):
        Publisher(live, url)
    assert keys(url) == before


@pytest.mark.parametrize("moved", [False, True])
def test_branch_is_gone_on_with(moved: bool, url: str, tmp_path: Path) -> None:
    live, history = published(url, 2)
    own = f"{url}-branch"
    branch(open_run(url), 1, own)
    place = None
    if moved:
        Path(url).rename(tmp_path / "elsewhere")
        place = (tmp_path / "elsewhere").as_uri()
        # A forgotten argument is no lost chain.
        before = keys(own)
        with pytest.raises(BaseUnavailableError, match="pass base= with its URL"):
            Publisher(live, own)
        assert keys(own) == before
    with Publisher(live, own, base=place) as publisher:
        assert publisher.version == 0
        step(live, 5)
        publisher.publish(step=1)
    run = open_run(own)
    assert [manifest.kind for manifest in run.log()] == ["reference", "delta"]
    if not moved:
        assert_holds(run, 0, history[1])
        assert_holds(run, None, live)


def test_versions_that_a_listing_does_not_show_yet_are_found(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live, _ = published(url, 3)
    damage(url, version_key(3))
    with open_bucket(url) as bucket:
        bucket.delete(HEAD_KEY)
        listed = bucket.list

        def late(prefix: str = "") -> Iterator[ObjectInfo]:
            return (info for info in listed(prefix) if info.key not in (version_key(2), version_key(3)))

        monkeypatch.setattr(bucket, "list", late)
        with Publisher(live, bucket) as publisher:
            assert publisher.version == 4


def test_run_that_can_have_no_break_more_is_not_begun_anew(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live, _ = published(url, 2)
    damage(url, open_run(url).manifest(2).objects[0].key)
    before = keys(url)
    monkeypatch.setattr(limits, "MAX_BREAKS", 0)
    with pytest.raises(LimitError, match="MAX_BREAKS"):
        Publisher(live, url)
    assert keys(url) == before


@pytest.mark.parametrize("strays", [(9_999_999_999,), (6, 8, 9_999_999_999)])
def test_manifests_of_strangers_beyond_a_gap_stop_nobody(strays: tuple[int, ...], url: str) -> None:
    live, _ = published(url, 3)
    bucket = open_bucket(url)
    for number in strays:
        bucket.put(version_key(number), b"{}")
    bucket.put(HEAD_KEY, b"{}")
    with Publisher(live, url) as publisher:
        assert publisher.version == 3
        step(live, 40)
        assert publisher.publish(step=100, wait=True).version == 4
    assert [manifest.base_version for manifest in open_run(url).log()] == [None, 0, 1, 2, 3]
    assert_holds(open_run(url), 4, snapshot(live))


def test_a_manifest_that_head_names_and_that_is_lost_is_no_gap(url: str) -> None:
    """The version that lies behind it takes no part in what is begun anew."""
    live, _ = published(url, 5)
    bucket = open_bucket(url)
    head = json.loads(bucket.get(HEAD_KEY))
    lost = Manifest.from_bytes(bucket.get(version_key(4)))
    bucket.put(HEAD_KEY, dump_canonical({**head, "version": 4, "manifest": lost.digest}))
    bucket.delete(version_key(4))
    with Publisher(live, url) as publisher:
        assert publisher.version == 6
    assert open_run(url).head().version == 6


def test_a_manifest_larger_than_readers_take_is_not_committed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("trainer_side.run_start.document_limit", lambda table: 200)
        with pytest.raises(LimitError, match=r"0000000000.*document_limit"):
            Publisher(tensors(), url)
    assert keys(url) == set()
    live, _ = published(url, 1)
    with open_bucket(url) as bucket:
        most = max(len(bucket.get(version_key(version))) for version in range(2))
    monkeypatch.setattr("vllm_delta_sync.run.run_reader.document_limit", lambda table: most)
    # An object for each tensor makes its manifest longer.
    publisher = Publisher(live, url, shard_bytes=1)
    step(live, 2)
    publisher.publish(step=2)
    with pytest.raises(DeltaSyncError, match=r"0000000002.*document_limit"):
        publisher.close()
    assert open_run(url).versions() == [0, 1]
