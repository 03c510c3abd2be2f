"""Leases: what is believed of them, and for how long."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.collecting import Grown, MemoryBucket
from vllm_delta_sync.chain import leases
from vllm_delta_sync.chain.leases import read_leases
from vllm_delta_sync.errors import StoreError, UsageError
from vllm_delta_sync.upkeep.leases import write_lease
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import limits
from vllm_delta_sync.wire.documents import Lease


@pytest.fixture
def grown(tmp_path: Path) -> Grown:
    return Grown(MemoryBucket(), tmp_path, 1)


def test_a_lease_is_written_and_replaced(grown: Grown) -> None:
    run = grown.run_
    write_lease(run, "a", None)
    write_lease(run, "a", 3, target=5, pins=[1, 2], seconds=60)
    (lease,) = read_leases(run).live(grown.memory.clock)
    assert (lease.receiver, lease.served, lease.target, lease.pins, lease.seconds) == ("a", 3, 5, [1, 2], 60)


def test_time_counts_from_when_the_store_has_it(grown: Grown) -> None:
    run = grown.run_
    lease = write_lease(run, "a", 3, seconds=60)
    put = grown.memory.clock
    # What it says of itself counts for nothing.
    late = lease.model_copy(update={"created_at": "2999-01-01T00:00:00Z"})
    grown.memory.held[side.lease_key("a")] = (late.to_bytes(), put)
    assert len(read_leases(run).live(put + 59)) == 1
    assert read_leases(run).live(put + 60) == []
    assert len(read_leases(run).held) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds": 0},
        {"seconds": limits.MAX_LEASE_SECONDS + 1},
        {"served": -1},
        {"pins": list(range(limits.MAX_LEASE_PINS + 1))},
        {"receiver_id": "a/b"},
        {"receiver_id": ""},
        {"receiver_id": "a" * 101},
    ],
)
def test_bounds(grown: Grown, fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        write_lease(grown.run_, **{"receiver_id": "a", "served": 1, **fields})
    assert not list(grown.memory.list(side.LEASES_PREFIX))


def test_what_is_not_believed(grown: Grown) -> None:
    run = grown.run_
    good = write_lease(run, "good", 1)
    documents = {
        "huge": b" " * (limits.MAX_SIDE_BYTES + 1),
        "broken": b"{",
        "foreign": good.model_copy(update={"run": "0" * 32, "receiver": "foreign"}).to_bytes(),
        "renamed": good.to_bytes(),
        "endless": good.to_bytes().replace(b'"seconds":600', b'"seconds":99999999'),
        "newer": good.to_bytes().replace(b'"requires":[]', b'"requires":["telepathy"]'),
    }
    for name, data in documents.items():
        grown.memory.put(side.lease_key(name), data)
    found = read_leases(run)
    assert [item.lease for item in found.held] == [Lease.from_bytes(good.to_bytes())]
    assert len(found.ignored) == len(documents)
    assert [lease.receiver for lease in found.live(grown.memory.clock)] == ["good"]


def test_a_flood_is_read_up_to_a_bound(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_LEASES", 5)
    for number in range(8):
        write_lease(grown.run_, f"r{number}", number)
    found = read_leases(grown.run_)
    assert {item.lease.served for item in found.held} == {3, 4, 5, 6, 7}, "the newest"
    assert found.ignored == ["more than 5 leases: the older ones were not read"]


def test_a_store_that_fails_is_not_an_empty_one(grown: Grown, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lease(grown.run_, "a", 1)
    run = grown.run_

    def fail(key: str, *, max_bytes: int | None = None) -> bytes:
        raise StoreError("gone")

    monkeypatch.setattr(grown.memory, "get", fail)
    with pytest.raises(StoreError):
        read_leases(run)
