"""A large delta is parted into objects that go up side by side, and reads back as one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.architectures import Plain, adamw, train
from tests.support.publishing import assert_holds, snapshot
from tests.support.samples import changes_between, every_dtype_table, nudge, random_bits
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.maintenance.compact import compact
from vllm_delta_sync.tensors.changes import Changes


def _by_tensor(changes: Changes) -> dict[int, Any]:
    found: dict[int, Any] = {full.id: ("full", full.bits.tobytes()) for full in changes.full}
    for group in changes.sparse:
        for tensor, positions, data in group.tensors():
            found[tensor] = (group.dtype, group.relative, positions.tobytes(), data.tobytes())
    return found


def _bytes_of(changes: Changes) -> int:
    sparse = sum(group.positions.nbytes + group.data.nbytes for group in changes.sparse)
    return sparse + sum(full.bits.nbytes for full in changes.full)


@given(seed=st.integers(0, 2**32), most=st.integers(1, 20_000), share=st.sampled_from([0.01, 0.3, 0.95]))
def test_parts_are_the_whole(seed: int, most: int, share: float) -> None:
    table, random = every_dtype_table(), np.random.default_rng(seed)
    old = random_bits(table, random)
    changes = changes_between(table, old, nudge(old, random, share))
    parts = changes.parts(most)
    together: dict[int, Any] = {}
    ids: list[int] = []
    for part in parts:
        assert _bytes_of(part) <= most or len(_by_tensor(part)) == 1
        assert set(part.fingerprints) == set(_by_tensor(part)) or len(parts) == 1
        together |= _by_tensor(part)
        ids += sorted(_by_tensor(part))
    assert together == _by_tensor(changes)
    assert ids == sorted(ids)
    assert sum((part.fingerprint for part in parts[1:]), parts[0].fingerprint) == changes.fingerprint


@pytest.mark.parametrize("codec", ["plain", "tiled", "raw"])
def test_a_run_of_parted_deltas(tmp_path: Any, codec: Any) -> None:
    url, model = str(tmp_path / "run"), Plain()
    optimizer = adamw(model)
    names = [name for name in model.state_dict() if name != "head.weight"]
    history = [snapshot({name: model.state_dict()[name] for name in names})]
    with Publisher(model, url, codec=codec, shard_bytes=1) as publisher:
        for step in range(1, 5):
            train(model, optimizer)
            publisher.publish(step=step, wait=True)
            history.append(snapshot({name: model.state_dict()[name] for name in names}))
    run = open_run(url)
    assert all(len(run.manifest(version).objects) > 1 for version in range(1, 5))
    compact(run)
    assert run.verify().versions == 5
    for version, expected in enumerate(history):
        assert_holds(run, version, expected)
