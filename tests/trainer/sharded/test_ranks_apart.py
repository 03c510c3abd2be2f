"""Ranks that each make a publisher of their own take one run over from each other, and the log says how to avoid it."""

import pytest

from tests.support.publishers import Hooked, Trainer
from trainer_side import Publisher


@pytest.mark.parametrize(("rank", "warns"), [("3", True), ("0", False), ("x", False), (None, False)])
def test_a_rank_that_makes_a_publisher_alone_is_warned(
    rank: str | None, warns: bool, bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    Publisher(trainer.live, bucket).close()
    found = [record.getMessage() for record in caplog.records if "makes a publisher alone" in record.getMessage()]
    assert len(found) == warns
    assert all("this is rank 3" in each and "Make the publisher on rank 0 only" in each for each in found)
