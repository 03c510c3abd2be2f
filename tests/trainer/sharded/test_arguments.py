"""What one rank is given otherwise than the others is refused on all of them; asserts are made in the ranks."""

from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.trainer.sharded.nursery import Nursery
from tests.trainer.sharded.test_agreement import Trained, refused
from tests.trainer.sharded.training import make
from trainer_side import Publisher
from trainer_side.sharded import ranks
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import PublishError, SettingsError, UsageError
from vllm_delta_sync.wire.limits import MAX_SIDECAR_BYTES


def of_calls(rank: int, size: int, folder: str) -> None:
    trained = Trained(rank, folder)
    odd = rank == 1
    with Publisher(trained.model, trained.bucket) as publisher:
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
        ("every", 2, 1), ("codec", "raw", "packed"), ("compression", "none", "zstd"), ("shard_bytes", 300, 200),
    ):  # fmt: skip
        given: Any = {name: here if rank == 1 else there}
        message = f"{name} is {here!r} on rank 1, and {there!r} on rank 0"
        refused(lambda: Publisher(model, bucket, **given), UsageError, message)  # noqa: B023 - called here
    whose = "" if rank == 1 else "rank 1: "
    refused(lambda: Publisher(model, bucket, every=1 - rank), UsageError, f"{whose}every is 0; give")
    if rank == 0:
        Path(folder).mkdir(exist_ok=True)
        from safetensors.torch import save_file

        save_file(make("mixed").state_dict(), f"{folder}/model.safetensors")
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
        publisher.close()
    else:
        refused(lambda: publisher.publish(1), PublishError, "rank 1 did not answer rank 0 (it has ended")
        publisher.close()
    distributed.barrier()
    ranks.CALL_SECONDS = 2.0
    if rank == 0:
        refused(lambda: Publisher(trained.model, trained.bucket), PublishError, "not all ranks have come together in 2")


@pytest.mark.parametrize("work", [of_calls, of_making])
def test_one_rank_that_is_given_something_else(work: Any, nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, work, folder=str(tmp_path / "run"))


def test_calls_are_counted_alike(nursery: Nursery, tmp_path: Path) -> None:
    said = nursery.run(2, of_calls_that_are_not_due, folder=str(tmp_path / "run"))
    assert said == [[None, 1, None, 2], [1, None, 2]]


def test_a_rank_that_leaves_or_never_comes(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, leaving, folder=str(tmp_path / "run"))
