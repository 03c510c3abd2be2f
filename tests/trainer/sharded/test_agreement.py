"""Ranks that publish together do the same, whatever one of them meets or is given; asserts are made in the ranks."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support.checkpoints import write_checkpoint
from tests.support.publishers import FailAt, Gated, Hooked, Late, Trainer, flip, nothing
from tests.trainer.sharded.models import Mixed, built, fsdp, gathered, move
from tests.trainer.sharded.nursery import Nursery
from trainer_side import Budget, Gate, Publisher
from trainer_side.integrations.training import StopSignal
from trainer_side.ranks import group
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    ConflictError,
    DeltaSyncError,
    ModelError,
    NotFoundError,
    PublishError,
    PublishTimeoutError,
    SettingsError,
    SignatureError,
    StoreError,
    TensorMismatchError,
    UsageError,
)
from vllm_delta_sync.format.limits import MAX_SIDECAR_BYTES
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import generate

GUARDS: dict[str, Any] = {"gate": Gate(max_norm_jump=9.0, action="quarantine"), "budget": Budget(max_share=1.0)}
"""A gate that lets all pass, and a budget that holds nothing back: the ranks then have more to agree on."""


class Trained:
    """A sharded model, and what was published of it so far. ``options``: of its publishers."""

    def __init__(self, rank: int, folder: str, guarded: bool = False) -> None:
        self.rank = rank
        self.options = GUARDS if guarded else {}
        self.bucket = Hooked(Path(folder))
        self.model = fsdp(built("mixed"))
        self.expected: dict[int, dict[str, torch.Tensor]] = {}
        self.step = 0

    def train(self) -> None:
        self.step += 1
        move(self.model)

    def publish(self, publisher: Publisher) -> None:
        self.train()
        self.note(publisher.publish(self.step, wait=True).version)
        publisher.flush()

    def note(self, version: int | None) -> None:
        assert version is not None
        self.expected[version] = gathered(self.model)

    def check(self) -> None:
        """Every version noted holds what it should; one rank looks, all wait."""
        distributed.barrier()
        if self.rank == 0:
            run = open_run(self.bucket.url)
            for version, tensors in self.expected.items():
                held = dict(run.tensors(version))
                assert [name for name in tensors if not torch.equal(held[name], tensors[name])] == [], version
            run.verify()
        distributed.barrier()


def refused(work: Callable[[], Any], kind: type[DeltaSyncError], text: str) -> str:
    with pytest.raises(kind, match=re.escape(text)) as caught:
        work()
    return caught.value.message


def failures(rank: int, size: int, folder: str, guarded: bool) -> None:
    trained = Trained(rank, folder, guarded)
    bucket = trained.bucket
    with Publisher(trained.model, bucket, **trained.options) as publisher:
        trained.publish(publisher)
        # A rank cannot read its weights: it says so at once, the others with their next call, which does nothing.
        trained.train()
        if rank == 1:
            trained.model.odd = torch.nn.Parameter(torch.zeros(2))
            refused(lambda: publisher.publish(trained.step), TensorMismatchError, "'odd' appeared")
            del trained.model.odd
        else:
            publisher.publish(trained.step)
        if rank == 1:
            assert publisher.publish(trained.step, wait=True).version is None
        else:
            refused(lambda: publisher.publish(trained.step, wait=True), PublishError, "rank 1: tensor 'odd' appeared")
        trained.note(publisher.publish(trained.step, wait=True).version)
        publisher.flush()
        # An upload of one rank fails; the manifest is not written; both are told, and the next version has it all.
        for where, prefix in ((1, "objects/"), (0, "versions/")):
            trained.train()
            if rank == where:
                bucket.before = FailAt(prefix)
            assert publisher.publish(trained.step).version == publisher.version + 1
            message = refused(publisher.flush, PublishError, "injected")
            assert (rank == where) == (f"rank {where}:" not in message)
            bucket.before = nothing
            trained.note(publisher.publish(trained.step, wait=True).version)
            publisher.flush()
        assert publisher.version == 4
        # A bad memory cell of one rank, which shows before anything is encoded.
        trained.train()
        if rank == 1:
            flip(publisher, 0, 0)
        publisher.publish(trained.step)
        message = refused(publisher.flush, PublishError, "the baseline in memory was damaged")
        assert (rank == 1) == ("rank 1:" not in message)
        trained.publish(publisher)
    trained.check()


def uncertain(rank: int, size: int, folder: str, guarded: bool) -> None:
    trained = Trained(rank, folder, guarded)
    bucket = trained.bucket
    with Publisher(trained.model, bucket, **trained.options) as publisher:
        for written in (True, False):
            trained.train()
            fail = FailAt("versions/")
            if rank == 0:
                # The answer to the put is lost, and then the store does not say whether it was written.
                if written:
                    bucket.after = fail
                else:
                    bucket.before = fail
                bucket.reading = silent_after(fail)
            assert publisher.publish(trained.step).version == publisher.version + 1
            refused(publisher.flush, PublishError, "not known")
            # Still not known: the same again, on all of them.
            refused(publisher.flush, PublishError, "not known")
            bucket.before = bucket.after = bucket.reading = nothing
            before = publisher.version
            publisher.flush()
            assert publisher.version == before + written
            if written:
                trained.note(publisher.version)
            trained.publish(publisher)
    trained.check()
    assert publisher.version == 3


def former(rank: int, size: int, folder: str, guarded: bool) -> None:
    trained = Trained(rank, folder, guarded)
    bucket = trained.bucket = Late(Path(folder))
    with Publisher(trained.model, bucket, **trained.options) as publisher:
        trained.publish(publisher)
        trained.train()
        bucket.holds_back = rank == 0
        publisher.publish(trained.step)
        refused(publisher.flush, PublishError, "late")
        trained.note(2)
        if bucket.late is not None:
            bucket.arrive()
        trained.train()
        publisher.publish(trained.step)
        refused(publisher.flush, PublishError, "continues from that version")
        assert publisher.version == 2
        trained.publish(publisher)
        assert publisher.version == 3
    trained.check()


def silent_after(fail: FailAt) -> Callable[[str], None]:
    """A store that does not read manifests any more, once something has failed."""

    def reading(key: str) -> None:
        if fail.fired and key.startswith("versions/"):
            raise StoreError("injected: no answer")

    return reading


def skipping(rank: int, size: int, folder: str) -> list[Any]:
    trained = Trained(rank, folder)
    gate, found = Gated(""), []
    with Publisher(trained.model, trained.bucket, every=2) as publisher:
        if rank == 1:
            trained.bucket.before = gate
        for call in range(6):
            trained.train()
            found.append(publisher.publish(trained.step).version)
            if call == 1:
                trained.note(1)
            if call == 4:
                # All calls that are due are skipped while one rank's store is slow: here only rank 1's is.
                gate.open.set()
                publisher.flush()
        trained.note(2)
    trained.check()
    return found


def operations(rank: int, size: int, folder: str, guarded: bool) -> None:
    trained = Trained(rank, folder, guarded)
    with Publisher(trained.model, trained.bucket, shard_bytes=200, rescan_bytes=0, **trained.options) as publisher:
        for _ in range(3):
            trained.publish(publisher)
        publisher.rebase(1)
        trained.publish(publisher)
        publisher.flush()
        assert open_run(folder).manifest(4).base_version == 1
        assert [publisher.tag("good", 2).version, publisher.tag("newest").version] == [2, 4]
        assert publisher.anchor() == 4
        assert {ref.rank for ref in open_run(folder).anchor(4).objects} == set(range(size))
        if rank == 1:
            trained.bucket.before = FailAt("objects/")
        refused(publisher.anchor, StoreError, "injected")
        trained.bucket.before = nothing
        assert publisher.anchor() == 4
        # A bad memory cell of one rank: found by all, mended where it is.
        if rank == size - 1:
            flip(publisher, 0, 0)
        assert [len(publisher.rescan()), len(publisher.rescan())] == [1, 0]
        trained.publish(publisher)
        # What cannot be done is refused on every rank alike, and nothing is broken by it.
        refused(lambda: publisher.rebase(99), NotFoundError, "version 99 is not published")
        refused(lambda: publisher.publish(9, weights=[]), UsageError, "weights=")
        refused(lambda: publisher.publish(9, skip_unchanged=True), UsageError, "skip_unchanged")
        trained.publish(publisher)
        publisher.flush()
        # Another publisher takes the run over.
        if rank == 0:
            Publisher(trained.expected[max(trained.expected)], folder).close()
        distributed.barrier()
        trained.train()
        publisher.publish(trained.step)
        refused(publisher.flush, ConflictError, "another publisher")
        refused(lambda: publisher.publish(trained.step), ConflictError, "another publisher")
        refused(publisher.close, ConflictError, "another publisher")
    trained.check()


def refusals(rank: int, size: int, folder: str, key: str) -> None:
    trained = Trained(rank, folder)
    model, bucket = trained.model, trained.bucket
    refused(lambda: Publisher(model, bucket, baseline="disk"), UsageError, "give 'host'")
    refused(lambda: Publisher(model, bucket, base=f"{folder}/nowhere"), NotFoundError, "nowhere")
    refused(lambda: Publisher(model, bucket, expect_run=f"{rank}"), UsageError, "expect_run is '1' on rank 1, and '0'")
    refused(lambda: Publisher(model, bucket, expect_run="0"), UsageError, "expect_run is '0', but")
    other = Mixed()
    if rank == 1:
        other.last = torch.nn.Linear(7, 4, bias=False)
    refused(lambda: Publisher(fsdp(other), bucket), ModelError, "rank 1 has other tensors")
    # Only rank 0 has the key.
    path = key if rank == 0 else f"{key}-elsewhere"
    with Publisher(model, bucket, signing_key=path) as publisher:
        trained.publish(publisher)
    with Publisher(model, bucket, signing_key=path) as publisher:
        trained.publish(publisher)
    refused(lambda: Publisher(model, bucket), SignatureError, "signing_key")
    refused(lambda: Publisher(model, bucket, signing_key=path, resume=False), ConflictError, "holds a run already")
    trained.check()


def wrong_bases(rank: int, size: int, folder: str) -> None:
    """One rank has another base than the run: with an anchor, too, from which the weights could be read."""
    trained = Trained(rank, folder)
    model, bucket = trained.model, trained.bucket
    tensors = gathered(model)
    good = write_checkpoint(Path(f"{folder}-base-{rank}"), tensors)
    other = write_checkpoint(Path(f"{folder}-other-{rank}"), tensors | {"last.weight": tensors["last.weight"] + 1})
    missing = write_checkpoint(Path(f"{folder}-missing-{rank}"), tensors, sharded=True)
    (missing / "model-00002-of-00002.safetensors").unlink()
    with Publisher(model, bucket, base=good, merge=False) as first:
        trained.publish(first)
        for anchored in (False, True):
            if anchored:
                first.anchor()
            for odd, wrong in ((0, other), (1, other), (1, missing)):
                own = wrong if rank == odd else good
                take_over = partial(Publisher, model, bucket, base=own)
                message = refused(take_over, BaseUnavailableError, f"{wrong.name.rpartition('-')[0]}-{odd}' is not")
                assert ("is missing" if wrong == missing else "fingerprint") in message
                assert list(bucket.list("claims/")) == []
        trained.publish(first)
    with Publisher(model, bucket, base=good) as second:
        assert second.version == 2
        trained.publish(second)
    trained.check()


def out_of_step(rank: int, size: int, folder: str) -> None:
    trained = Trained(rank, folder)
    publisher = Publisher(trained.model, trained.bucket)
    refused(lambda: publisher.flush() if rank == 1 else publisher.publish(1), PublishError, "every rank")
    refused(publisher.flush, PublishError, "every rank")
    refused(publisher.close, PublishError, "every rank")


def test_skipping_is_agreed(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.run(2, skipping, folder=str(tmp_path / "run")) == [[None, 1, None, None, None, 2]] * 2


def test_what_cannot_be_published_is_refused_by_all_and_rank_zero_signs(nursery: Nursery, tmp_path: Path) -> None:
    key = tmp_path / "key"
    generate(key)
    nursery.run(2, refusals, folder=str(tmp_path / "run"), key=str(key))
    run = open_run(str(tmp_path / "run"), Keyring.load(f"{key}.pub"))
    assert run.verify().head == 2


def of_calls(rank: int, size: int, folder: str) -> None:
    trained = Trained(rank, folder)
    odd = rank == 1
    with Publisher(trained.model, trained.bucket, budget=Budget(max_share=1.0)) as publisher:
        trained.publish(publisher)
        trained.train()
        # On the rank itself without the name of the rank, as it was called there.
        whose = "" if odd else "rank 1: "
        refused(lambda: publisher.publish(-1 if odd else 2), UsageError, f"{whose}step is -1; give")
        big = {"state": bytes(MAX_SIDECAR_BYTES + 1)} if odd else None
        refused(lambda: publisher.publish(2, sidecars=big), UsageError, f"{whose}sidecar 'state' has 16,777,217 bytes")
        pairs: Any = [] if odd else None
        refused(lambda: publisher.publish(2, weights=pairs), UsageError, f"{whose}weights= is given")
        refused(lambda: publisher.publish(2 + rank), UsageError, "step is 3 on rank 1, and 2 on rank 0")
        refused(lambda: publisher.publish(2, exact=odd), UsageError, "exact is True on rank 1, and False on rank")
        refused(lambda: publisher.rebase(-1 if odd else 1), UsageError, f"{whose}version is -1; give")
        refused(lambda: publisher.rebase(rank), UsageError, "version is 1 on rank 1, and 0 on rank 0")
        refused(lambda: publisher.tag("a b" if odd else "ab"), UsageError, f"{whose}tag 'a b' is not a name")
        refused(lambda: publisher.tag("good", rank), UsageError, "['tags/good.json', 1, False] on rank 1, and")
        assert publisher.version == 1
        trained.publish(publisher)
    trained.check()
    assert open_run(folder).tags() == {}


def of_calls_that_are_not_due(rank: int, size: int, folder: str) -> list[int | None]:
    trained = Trained(rank, folder)
    found = []
    with Publisher(trained.model, trained.bucket, every=2) as publisher:
        # The others do not ask then; this rank counts its call all the same.
        if rank == 1:
            refused(lambda: publisher.publish(-1), UsageError, "step is -1")
        else:
            found.append(publisher.publish(1).version)
        found += [publisher.publish(step, wait=True).version for step in (2, 3, 4)]
    return found


def of_making(rank: int, size: int, folder: str) -> None:
    trained = Trained(rank, folder)
    model, bucket = trained.model, trained.bucket
    for name, here, there in (
        ("every", 2, 1), ("codec", "raw", "plain"), ("compression", "none", "zstd"), ("shard_bytes", 300, 200),
        ("gate", Gate(), None), ("budget", Budget(max_bytes=9), Budget(max_bytes=8)),
    ):  # fmt: skip
        given: Any = {name: here if rank == 1 else there}
        shown = [asdict(value) if is_dataclass(value) else value for value in (here, there)]
        message = f"{name} is {shown[0]!r} on rank 1, and {shown[1]!r} on rank 0"
        refused(lambda: Publisher(model, bucket, **given), UsageError, message)  # noqa: B023 - called here
    whose = "" if rank == 1 else "rank 1: "
    refused(lambda: Publisher(model, bucket, every=1 - rank), UsageError, f"{whose}every is 0: ")
    layers: dict[str, Any] = {}
    if rank == 0:
        odd = partial(Publisher, None, bucket, parts=list)  # no parts
        refused(odd, PublishError, "rank 1: failed unexpectedly: KeyError('layer')")
    else:
        with pytest.raises(KeyError, match="layer"):
            Publisher(None, bucket, parts=lambda: iter(layers["layer"]))
    if rank == 0:
        write_checkpoint(Path(folder), built("mixed").state_dict())
    distributed.barrier()
    base = folder if rank == 0 else None
    refused(lambda: Publisher(model, bucket, base=base), UsageError, "base= is given is False on rank 1, and True")
    missing = f"{folder}/no-such-key" if rank == 0 else None
    whose = "rank 0: " if rank == 1 else ""
    refused(
        lambda: Publisher(model, bucket, notice="tcp://127.0.0.1:*", notice_key=missing),
        SettingsError, f"{whose}notice_allowed is missing",
    )  # fmt: skip
    assert not Path(folder, "run.json").exists()
    with Publisher(model, bucket) as publisher:
        trained.publish(publisher)
    trained.check()


def leaving(rank: int, size: int, folder: str) -> None:
    """A rank closes its publisher by itself, or makes none."""
    trained = Trained(rank, folder)
    publisher = Publisher(trained.model, trained.bucket)
    if rank == 1:
        publisher.close(finish=False)
    else:
        refused(lambda: publisher.publish(1), PublishError, "rank 1 did not answer rank 0 (it has ended")
        publisher.close(finish=False)
    distributed.barrier()
    group.CALL_SECONDS = 1.0
    if rank == 0:
        refused(lambda: Publisher(trained.model, trained.bucket), PublishError, "not all ranks have come together in 1")


def world_made_anew(rank: int, size: int, folder: str) -> None:
    """Training starts over in these processes before the publisher of the former world is closed."""
    trained = Trained(rank, folder)
    publisher, stop = Publisher(trained.model, trained.bucket), StopSignal()
    trained.publish(publisher)
    distributed.destroy_process_group()
    store = distributed.FileStore(f"{folder}.store", size)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    publisher.close(finish=False)
    stop.close()
    trained.model = fsdp(built("mixed"))
    with Publisher(trained.model, trained.bucket) as publisher:
        trained.publish(publisher)
    trained.check()


def one_is_late(rank: int, size: int, folder: str) -> None:
    """One rank does not come to a call in time: rank 0 knows which, the others may not blame rank 0 for it."""
    group.CALL_SECONDS = 2.0
    trained = Trained(rank, folder)
    publisher = Publisher(trained.model, trained.bucket)
    if rank == 1:
        time.sleep(1.5 * group.CALL_SECONDS)
    found = "rank 1 did not answer rank 0" if rank == 0 else "or it has lost another rank, which its own error names"
    refused(lambda: publisher.publish(1), PublishError, found)
    refused(publisher.close, PublishError, found)


def of_timeouts(rank: int, size: int, folder: str) -> None:
    """Rank 0 does not wait for its slow store, and the other would."""
    trained, gate = Trained(rank, folder), Gated("")
    with Publisher(trained.model, trained.bucket) as publisher:
        if rank == 0:
            trained.bucket.before = gate
        publisher.publish(1)
        threading.Timer(0.5, gate.open.set).start()
        limit, found = (0.0, "within 0 s") if rank == 0 else (None, "within the timeout of another rank")
        refused(lambda: publisher.publish(2, wait=True, timeout=limit), PublishTimeoutError, found)
        publisher.flush()
        trained.publish(publisher)
    trained.check()


def test_calls_are_counted_alike(nursery: Nursery, tmp_path: Path) -> None:
    said = nursery.run(2, of_calls_that_are_not_due, folder=str(tmp_path / "run"))
    assert said == [[None, 1, None, 2], [1, None, 2]]


class Pair(nn.Module):
    """One parameter that all ranks share, and one that is put on a mesh of its own."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        self.first = nn.Parameter(distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)]))
        self.mesh = mesh

    def put(self, tensor: DTensor) -> nn.Module:
        self.second = nn.Parameter(tensor)
        return self


def holes_and_overlaps(rank: int, size: int, folder: str) -> None:
    values = torch.arange(8.0).reshape(4, 2)
    pair = Pair()
    # A mesh without rank 0: nobody answers for it.
    others = DeviceMesh("cpu", list(range(1, size)))
    hole = pair.put(distribute_tensor(values, others, [Shard(0)]))
    message = "the ranks hold 0 of the 8 elements of tensor 'second' (no rank has any); make the same model"
    refused(lambda: Publisher(hole, folder), ModelError, message)
    # Rank 0 takes it for replicated, the others for sharded.
    local, place = (values, Replicate()) if rank == 0 else (values[2 * rank :][:2], Shard(0))
    given: Any = {"run_check": False, "shape": values.shape, "stride": values.stride()}
    twice = pair.put(DTensor.from_local(local, pair.mesh, [place], **given))
    message = (
        "rank 0: second, rank 1: second[2:4,0:2] share elements of tensor 'second'; of its 8 elements the ranks hold 12"
    )
    refused(lambda: Publisher(twice, folder), ModelError, message)
    assert not Path(folder, "run.json").exists()
    # What rank 0 lacks would keep the base's values for ever.
    base, message, stage = Path(f"{folder}-base"), "has other tensors than that of rank 0", Pair()
    if rank == 0:
        write_checkpoint(base, {"first": torch.zeros(3, 2), "second": values})
    else:
        stage.second = nn.Parameter(values)
    distributed.barrier()
    refused(lambda: Publisher(stage, folder, base=base), ModelError, message)
    assert not Path(folder, "run.json").exists()
    Publisher(pair.put(distribute_tensor(values, pair.mesh, [Shard(0)])), folder).close()
    # A run that is there is not taken over either.
    refused(lambda: Publisher(stage, folder), ModelError, message)
    hole = pair.put(distribute_tensor(values, others, [Shard(0)]))
    refused(lambda: Publisher(hole, folder), ModelError, "the ranks hold 0 of the 8 elements of tensor 'second'")


@pytest.mark.parametrize(
    ("work", "guarded"),
    [
        *((work, True) for work in (failures, uncertain, former, operations)), (failures, False), (operations, False),
        *(pytest.param(work, False, marks=pytest.mark.slow) for work in (uncertain, former)),
    ],
)  # fmt: skip
def test_ranks_do_alike(work: Any, guarded: bool, nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, work, folder=str(tmp_path / "run"), guarded=guarded)


@pytest.mark.parametrize(
    ("work", "size"),
    [
        (of_calls, 2), (of_making, 2), (of_timeouts, 2), (wrong_bases, 2), (holes_and_overlaps, 2),
        (out_of_step, 2), (leaving, 2), (one_is_late, 3), (world_made_anew, 2),
    ],
)  # fmt: skip
def test_one_rank_that_is_given_or_does_something_else(work: Any, size: int, nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(size, work, folder=str(tmp_path / "run"))


@pytest.mark.parametrize(("rank", "warns"), [("3", True), ("0", False), ("x", False), (None, False)])
def test_a_rank_that_makes_a_publisher_alone_is_warned(
    rank: str | None, warns: bool, bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Ranks that each make a publisher of their own take one run over from each other."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    Publisher(trainer.live, bucket).close()
    found = [message for message in caplog.messages if "makes a publisher alone" in message]
    assert len(found) == warns
    assert all("this is rank 3" in each and "Make the publisher on rank 0 only" in each for each in found)
