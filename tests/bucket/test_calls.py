"""Many calls at once: order, errors, interrupts, and the end of the program."""

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.support.running import interruptible, run_python
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import StoreError

UNCLOSED = """
import sys
import torch
from trainer_side import Publisher
live = {f"w{number}": torch.zeros(100_000) for number in range(4)}
publisher = Publisher(live, sys.argv[1], shard_bytes=int(sys.argv[2]))
for tensor in live.values():
    tensor.add_(torch.rand_like(tensor))
publisher.publish(step=1)
"""


def test_an_error_comes_when_nothing_is_under_way_any_more() -> None:
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def call(item: int) -> None:
        if item == 0:
            assert begun.wait(60)
            go_on.set()
            raise StoreError("no")
        begun.set()
        assert go_on.wait(60)
        over.set()

    with pytest.raises(StoreError, match="no"):
        list(in_parallel(call, range(2)))
    assert over.is_set()


def test_an_interrupt_does_not_wait_for_a_store_that_hangs() -> None:
    hangs, over = threading.Event(), threading.Event()
    begun = threading.Barrier(3)

    def call(item: int) -> None:
        begun.wait()
        hangs.wait(120)
        over.set()

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with interruptible(), pytest.raises(KeyboardInterrupt):
        list(in_parallel(call, range(2)))
    assert not over.is_set()
    hangs.set()


@pytest.mark.parametrize("shard_bytes", [250_000, 10_000_000], ids=["in parts", "whole"])
def test_a_version_goes_out_at_the_end_of_a_program_that_closes_nothing(tmp_path: Path, shard_bytes: int) -> None:
    url = str(tmp_path / "run")
    run_python("-c", UNCLOSED, url, str(shard_bytes))
    run = open_run(url)
    report = run.verify()
    assert (report.head, report.replayed) == (1, True)
    assert (len(run.head().objects) > 1) == (shard_bytes == 250_000)
