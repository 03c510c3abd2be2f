"""Objects too small for a model are refused before any of them is uploaded."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.publishers import Hooked
from trainer_side import Publisher
from vllm_delta_sync.errors import LimitError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.safetensors_file import shard_tables
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Changes, Full

TOO_MANY = limits.MAX_OBJECTS_PER_VERSION + 1
MESSAGE = (
    rf"shard_bytes is 1: .* {TOO_MANY} objects, .* 65536 .*MAX_OBJECTS_PER_VERSION.*; set shard_bytes to \d+ or more"
)


def no_object(key: str) -> None:
    assert not key.startswith("objects/"), "something was uploaded"


@pytest.fixture
def live() -> dict[str, torch.Tensor]:
    """A model of more tensors than a version may have objects."""
    return {f"{number:06d}": torch.zeros(2) for number in range(TOO_MANY)}


@pytest.mark.slow
def test_a_full_snapshot_of_too_many_objects(bucket: Hooked, live: dict[str, torch.Tensor]) -> None:
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
    """The size that an error advises."""
    with pytest.raises(LimitError) as error:
        cut()
    return int(error.value.message.split("set shard_bytes to ")[1].split()[0])
