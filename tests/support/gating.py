"""What the tests of the gate share."""

import pytest

from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import GateError, PublishError


def refused(publisher: Publisher, step: int = 1) -> str:
    """Publishing now is refused; why."""
    before = publisher.version
    publisher.publish(step, wait=True)
    with pytest.raises(GateError) as caught:
        publisher.flush()
    assert publisher.version == before
    assert isinstance(caught.value, PublishError)
    assert caught.value.kind == "gate"
    return caught.value.message


def marks(bucket: Bucket) -> list[int | None]:
    """For each version: the sound one before it if it is quarantined, else itself."""
    return [manifest.sound for manifest in open_run(bucket.url).log()]
