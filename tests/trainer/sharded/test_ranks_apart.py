"""Ranks that each make a publisher of their own take one run over from each other, and the errors say why."""

import logging
from pathlib import Path
from typing import Any

import pytest
from torch import distributed, nn

from tests.support.publishers import Hooked, Trainer
from tests.trainer.sharded.nursery import Nursery
from trainer_side import Publisher
from vllm_delta_sync.errors import ConflictError


def publish_from_each_rank(rank: int, size: int, url: str, then: str) -> Any:
    """A publisher of a plain module on every rank, one after the other → what the first rank's next call raises."""
    model = nn.Linear(8, 8)
    made = None
    for turn in range(size):
        if turn == rank:
            made = Publisher(model, url)
        distributed.barrier()
    assert made is not None
    said = None
    if rank == 0:
        with pytest.raises(ConflictError) as raised:
            made.publish(1, wait=True).metrics() if then == "publish" else made.anchor()
        with pytest.raises(ConflictError) as again:
            made.publish(2)
        assert again.value.message == raised.value.message
        with pytest.raises(ConflictError) as refused:
            Publisher(model, url, resume=False)
        said = [raised.value.message, refused.value.message]
    distributed.barrier()
    try:
        made.close()
    except ConflictError:
        assert rank == 0
    return said


@pytest.mark.parametrize("then", ["publish", "anchor"])
def test_ranks_that_each_make_a_publisher_are_told_so(then: str, nursery: Nursery, tmp_path: Path) -> None:
    said, other = nursery.run(2, publish_from_each_rank, url=str(tmp_path / "run"), then=then)
    assert other is None
    for message, why in zip(said, ("another publisher has taken over", "holds a run already"), strict=True):
        assert why in message
        assert "initialized with world size 2 and this is rank 0: if every rank makes a publisher" in message
        assert "Make the publisher on rank 0 only" in message
    assert "initialized with world size 2 and this is rank 1, which makes a publisher alone" in nursery.logs()


def test_ranks_before_init_process_group_are_told_too(
    bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    first = Publisher(trainer.live, bucket)
    assert "makes a publisher alone" not in caplog.text
    monkeypatch.setenv("RANK", "3")
    Publisher(trainer.live, bucket).close()
    [warned] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "WORLD_SIZE is 4 in the environment, torch.distributed is not initialized, and this is rank 3" in warned
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        ConflictError, match=r"taken over .* WORLD_SIZE is 4 .* and this is rank 0: if every rank makes"
    ):
        first.publish(1, wait=True).metrics()
    with pytest.raises(ConflictError):
        first.close()


@pytest.mark.parametrize("place", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_a_process_without_other_ranks_hears_nothing_of_them(
    place: dict[str, str], bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with Publisher(trainer.live, bucket), pytest.raises(ConflictError) as refused:
        Publisher(trainer.live, bucket, resume=False)
    assert "rank" not in refused.value.message
