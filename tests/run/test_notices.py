"""Notices over real sockets: lost, repeated, out of order, of versions that never were. They are only hints."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.machine.tensors import ServedModel, copy_bits, equal, first_tensors, gather, train
from tests.support.modules import ModulePort
from tests.support.running import eventually
from trainer_side import Publisher
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.notice import Notice, NoticePublisher
from vllm_delta_sync.settings import Settings


@pytest.fixture
def notices() -> Iterator[NoticePublisher]:
    publisher = NoticePublisher("tcp://127.0.0.1:*")
    yield publisher
    publisher.close()


def test_only_the_bucket_is_believed(tmp_path: Path, notices: NoticePublisher) -> None:
    """The publisher sends none itself; each version is announced by notices that are mostly wrong."""
    tensors = first_tensors(1)
    model = ServedModel(0, 1)
    model.load_weights(tensors.items())
    url = str(tmp_path / "run")
    with Publisher(list(tensors.items()), url) as publisher:
        settings = Settings(bucket=url, notice=notices.address, poll_seconds=3600)
        service = ReceiverService(ModulePort(model), settings)
        service.start()
        eventually(lambda: service.receiver.served_version == 0)
        served = []
        for step in range(1, 8):
            train(tensors, "sparse", step)
            publisher.publish(step, wait=True)
            publisher.flush()

            def tell(version: int, run: str = publisher.run) -> None:
                notices.send(Notice(run, version, "0" * 64))

            def announced(step: int = step) -> bool:
                for version in (step - 1, 0, 10**9 + step, step, step):
                    tell(version)
                tell(step, "0" * 32)
                served.append(service.receiver.served_version or 0)
                return served[-1] == step

            eventually(announced)
            assert equal(gather([model]), copy_bits(tensors))
        assert served == sorted(served)
        service.stop()
        service.join(120)
