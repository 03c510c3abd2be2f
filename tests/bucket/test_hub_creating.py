"""Create-if-absent on the Hub: as far as its own interface goes, and through its S3 gateway."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.hub_buckets import opened
from tests.support.hub_store import Hub
from vllm_delta_sync.bucket.hub import HubBucket
from vllm_delta_sync.bucket.hub_gateway import ENDPOINT, KEY_ID, SECRET
from vllm_delta_sync.errors import AccessError, ConflictError, StoreError, UnavailableError, UsageError


@pytest.fixture
def bucket(hub: Hub) -> HubBucket:
    return opened()


def test_an_overtaken_writer_is_told(hub: Hub, bucket: HubBucket) -> None:
    assert not bucket.exclusive
    # One has looked, and its write comes late: after the other's write, and before that one looks again.
    hub.fault("stall", "/batch", seconds=600)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(opened(store_deadline=600).put, "a", b"slow", if_absent=True)
        while not hub.requests("/batch"):
            time.sleep(0.01)
        hub.fault("stall", "paths-info", after=1, seconds=600)
        quick = pool.submit(opened(store_deadline=600).put, "a", b"quick", if_absent=True)
        while not any(one["fault"] for one in hub.requests("paths-info")):
            time.sleep(0.01)
        hub.clear_faults("/batch")
        slow.result()
        hub.clear_faults()
        with pytest.raises(ConflictError, match="another writer was first"):
            quick.result()
    assert bucket.get("a") == b"slow"


def test_what_is_there_is_not_uploaded_against(hub: Hub, bucket: HubBucket) -> None:
    bucket.put("a", b"x")
    hub.forget_requests()
    with pytest.raises(ConflictError):
        bucket.put("a", bytes(9 << 20), if_absent=True)
    assert [one["path"].split("/")[-1] for one in hub.requests()] == ["paths-info"]


@pytest.fixture
def gateway(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv(KEY_ID, str(hub.options()["s3_key"]))
    monkeypatch.setenv(SECRET, "any")
    monkeypatch.setenv(ENDPOINT, f"{hub.endpoint}/s3")
    # Another account's, which has nothing to do with it.
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    return hub


def test_with_the_gateway_one_of_16_creates(gateway: Hub, tmp_path: Path) -> None:
    bucket = opened()
    assert bucket.exclusive
    for turn in range(5):
        barrier = threading.Barrier(16)
        outcomes: list[str] = []

        def create(number: int, turn: int = turn, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                bucket.put(f"versions/{turn}", b"%d" % number, if_absent=True)
                outcomes.append(f"won {number}")  # noqa: B023 - joined within the turn
            except ConflictError:
                outcomes.append("lost")  # noqa: B023

        threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert Counter(outcomes)["lost"] == 15
        assert f"won {bucket.get(f'versions/{turn}').decode()}" in outcomes
    bucket.get_file("versions/0", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == bucket.get("versions/0")
    assert [info.key for info in bucket.list("versions/")] == [f"versions/{turn}" for turn in range(5)]


def test_only_creating_goes_through_the_gateway(gateway: Hub, tmp_path: Path) -> None:
    bucket = opened()
    source = tmp_path / "source"
    source.write_bytes(b"from a file")
    bucket.put("a", source, if_absent=True)
    assert bucket.get("a") == b"from a file"
    bucket.put("a", b"y")
    bucket.delete("a")
    assert [one["method"] for one in gateway.requests("^/s3/")] == ["PUT"]
    with pytest.raises(UsageError, match="missing"):
        bucket.put("a", tmp_path / "missing", if_absent=True)


def test_failures_of_the_gateway(gateway: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = opened()
    gateway.fault("status", "^/s3/", code=503)
    with pytest.raises(UnavailableError, match="503"):
        bucket.put("a", b"x", if_absent=True)
    gateway.change(quota=3)
    with pytest.raises(StoreError, match=r"quota.*delta-sync gc") as caught:
        bucket.put("a", b"1234", if_absent=True)
    assert type(caught.value) is StoreError
    with pytest.raises(StoreError, match="no such bucket"):
        opened("hf://buckets/team/none/run").put("a", b"x", if_absent=True)
    monkeypatch.setenv(KEY_ID, "HFAKNOBODYS")
    with pytest.raises(AccessError, match=f"S3 gateway.*{KEY_ID} and {SECRET}, or unset both"):
        opened().put("a", b"x", if_absent=True)
    assert list(bucket.list()) == []


def test_half_of_what_the_gateway_needs(gateway: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT)
    with pytest.raises(UsageError, match=f"set {ENDPOINT} to its S3 gateway"):
        opened()
    monkeypatch.delenv(SECRET)
    with pytest.raises(UsageError, match="only one is set"):
        opened()
    monkeypatch.delenv(KEY_ID)
    assert not opened().exclusive
