"""The Hub's bucket with the real client against a loopback Hub: what the contract suite asks of no store.

And create-if-absent, as far as the Hub's interface goes.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from unittest import mock

import hf_xet  # type: ignore[import-untyped]
import huggingface_hub
import pytest

from tests.support.answers import Answer, Answers, untrusted
from tests.support.hub_buckets import URL, opened
from tests.support.hub_store import Hub
from tests.support.running import eventually
from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.bucket import base as bucket_base
from vllm_delta_sync.bucket.hub.bucket import HubBucket
from vllm_delta_sync.errors import (
    AccessError,
    ConflictError,
    DeltaSyncError,
    NotFoundError,
    StoreError,
    UnavailableError,
    UsageError,
)
from vllm_delta_sync.urls import parse_store_url


@pytest.fixture
def bucket(hub: Hub) -> HubBucket:
    return opened()


def asked(hub: Hub) -> list[tuple[str, int]]:
    return [(f"{one['method']} {one['path'].split('/')[-1][:16]}", one["status"]) for one in hub.requests()]


# Places and credentials


@pytest.mark.parametrize(
    "url", ["hf://buckets", "hf://buckets/team", "hf://datasets/team/weights", "hf://team/weights"]
)
def test_a_url_that_names_no_bucket(url: str) -> None:
    with pytest.raises(UsageError, match="hf://buckets/NAMESPACE/BUCKET/run"):
        HubBucket(parse_store_url(url), StoreOptions())


def test_the_token_is_looked_up_for_each_request_and_never_shown(
    hub: Hub, bucket: HubBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("a", b"x")
    calls: list[Callable[[], object]] = [
        lambda: bucket.put("b", b"y"),
        lambda: bucket.put("c", b"y", if_absent=True),
        lambda: bucket.get("a"),
        lambda: bucket.get_range("a", 0, 1),
        lambda: bucket.stat("a"),
        lambda: list(bucket.list()),
        lambda: bucket.delete("a"),
    ]
    for token, who in (("hf_not_the_right_one", "this token"), ("", "a request without a token")):
        monkeypatch.setenv("HF_TOKEN", token)
        for call in calls:
            with pytest.raises(AccessError, match=rf"the Hub refuses {who} \(401.*HF_TOKEN.*hf auth login") as caught:
                call()
            assert "hf_not" not in str(caught.value)
    assert hub.token is not None
    monkeypatch.setenv("HF_TOKEN", hub.token)
    for call in calls:
        call()
    assert bucket.url == URL


def test_a_token_that_was_renewed_in_its_file_is_taken_up(
    hub: Hub, bucket: HubBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("hf_ended")
    with pytest.raises(AccessError):
        bucket.put("a", b"x")
    (tmp_path / "token").write_text(str(hub.token))
    bucket.put("a", b"x")
    assert bucket.get("a") == b"x"


# What is asked of the Hub


def test_small_reads_are_one_request_and_what_it_leads_to(hub: Hub, bucket: HubBucket) -> None:
    bucket.put("HEAD.json", b"{}")
    hub.forget_requests()
    assert bucket.get("HEAD.json") == b"{}"
    assert [status for _, status in asked(hub)] == [302, 200]
    hub.forget_requests()
    assert bucket.get_range("HEAD.json", 1, 1) == b"}"
    assert [status for _, status in asked(hub)] == [302, 206]
    hub.forget_requests()
    assert bucket.stat("HEAD.json").bytes == 2
    assert asked(hub) == [("POST paths-info", 200)]
    hub.forget_requests()
    with pytest.raises(NotFoundError):
        bucket.get("none")
    assert asked(hub) == [("GET none", 404)]


def test_a_listing_of_many_pages_is_in_order_and_of_this_run(hub: Hub, bucket: HubBucket) -> None:
    from huggingface_hub import HfApi

    paths = ["run2/a", "run-x/a", "run.json", "a", "run/spa ce", "run/ü", "run/z/0", "run/z-0", "run/z", "run/a/b/c"]
    HfApi(endpoint=hub.endpoint, token=hub.token).batch_bucket_files(
        "team/weights", add=[(path.encode(), path) for path in paths]
    )
    hub.change(page=2)
    hub.forget_requests()
    assert [(info.key, info.bytes) for info in bucket.list()] == [("a/b/c", 9), ("z", 5), ("z-0", 7), ("z/0", 7)]
    assert len(hub.requests("/tree")) > 2
    assert [info.key for info in bucket.list("z")] == ["z", "z-0", "z/0"]
    assert [info.key for info in bucket.list("z/")] == ["z/0"]
    assert [info.key for info in opened("hf://buckets/team/weights").list("run")] == [
        *("run-x/a", "run.json", "run/a/b/c", "run/z", "run/z-0", "run/z/0", "run2/a")
    ]


def test_bytes_are_told_as_they_move(bucket: HubBucket) -> None:
    data = os.urandom(3_000_000)
    calls: dict[Callable[[], object], int] = {
        lambda: bucket.put("a", data): len(data),
        lambda: bucket.get("a"): len(data),
        lambda: bucket.get_range("a", 10, 2_000_000): 2_000_000,
        lambda: bucket.stat("a"): 0,
    }
    for call, expected in calls.items():
        counts: list[int] = []
        with bucket_base.observed_by(counts.append):
            call()
        assert sum(counts) == expected


def test_a_watcher_that_refuses_ends_the_transfer(bucket: HubBucket) -> None:
    refuse = mock.Mock(side_effect=UnavailableError("given up meanwhile"))
    bucket.put("a", os.urandom(3_000_000))
    with bucket_base.observed_by(refuse):
        with pytest.raises(UnavailableError, match="given up meanwhile"):
            bucket.put("b", os.urandom(3_000_000))
        with pytest.raises(UnavailableError, match="given up meanwhile"):
            bucket.get("a")
    assert [info.key for info in bucket.list()] == ["a"]


def test_every_error_is_one_of_the_projects(hub: Hub, bucket: HubBucket) -> None:
    """Answers that no Hub gives."""
    opened().put("a", b"x")
    calls: list[Callable[[], object]] = [
        lambda: bucket.put("a", b"x"),
        lambda: bucket.get("a"),
        lambda: bucket.stat("a"),
        lambda: list(bucket.list()),
        lambda: bucket.delete("a"),
    ]
    hub.fault("flip", "paths-info", at=0, times=None)
    with pytest.raises(StoreError, match=r"not JSON.*HF_ENDPOINT"):
        bucket.stat("a")
    hub.clear_faults()
    for code in (300, 400, 404, 405, 409, 411, 418, 451):
        hub.fault("status", "", code=code, times=None)
        for call in calls:
            with pytest.raises(StoreError, match=str(code)) as caught:
                call()
            assert isinstance(caught.value, DeltaSyncError)
        hub.clear_faults()
    assert bucket.get("a") == b"x"


def test_whole_file_for_a_range_is_refused_by_name(answers: Answers) -> None:
    """Each piece of a large object would take the whole object."""
    answers.reply = lambda asked: Answer(200, b"0123456789")
    bucket = HubBucket(parse_store_url(URL), StoreOptions(store_endpoint=answers.url))
    with pytest.raises(StoreError, match="or a proxy before it, sends the whole file for bytes from 3"):
        bucket.get_range("a", 3, 2)


def test_certificate_that_is_not_trusted_is_named_at_once(tmp_path: Path) -> None:
    """As where a company's proxy opens the connections of its network."""
    with untrusted(tmp_path) as url:
        bucket = HubBucket(parse_store_url(URL), StoreOptions(store_endpoint=url))
        with pytest.raises(StoreError, match=r"certificate verify failed.*SSL_CERT_FILE") as caught:
            bucket.get("a")
    assert type(caught.value) is StoreError


@pytest.mark.parametrize("client", ["hf_xet", "huggingface_hub"])
@pytest.mark.parametrize("file", ["missing", "not certificates"])
def test_machine_without_certificates_is_named_at_once(
    client: str, file: str, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a small container is. The Hub's own client brings its certificates, unless SSL_CERT_FILE is set."""
    path = tmp_path / "ca.pem"
    if file != "missing":
        path.write_text("no certificate")
    huggingface_hub.close_session()
    if client == "hf_xet":
        huggingface_hub.get_session()
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    # Sessions of hf_xet are kept by their times.
    bucket = HubBucket(parse_store_url(URL), StoreOptions(store_deadline=47.25 if file == "missing" else 47.5))
    with pytest.raises(StoreError, match="install ca-certificates, or set SSL_CERT_FILE") as caught:
        bucket.put("a", b"x")
    assert type(caught.value) is StoreError


def test_an_overtaken_writer_is_told(hub: Hub, bucket: HubBucket) -> None:
    assert not bucket.supports_conditional_put
    # One has looked, and its write comes late: after the other's write, and before that one looks again.
    hub.fault("stall", "/batch", seconds=600)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(opened(store_deadline=600).put, "a", b"slow", if_absent=True)
        eventually(lambda: bool(hub.requests("/batch")))
        hub.fault("stall", "paths-info", after=1, seconds=600)
        quick = pool.submit(opened(store_deadline=600).put, "a", b"quick", if_absent=True)
        eventually(lambda: any(one["fault"] for one in hub.requests("paths-info")))
        hub.clear_faults("/batch")
        slow.result()
        hub.clear_faults()
        with pytest.raises(ConflictError, match="another writer was first"):
            quick.result()
    assert bucket.get("a") == b"slow"


def test_first_uploads_at_once_share_one_session(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks in memory are bounded for each session."""
    make, made, used = hf_xet.XetSession, Barrier(2), []

    class Session:
        def __init__(self, config: object) -> None:
            self._inner = make(config)
            with suppress(BrokenBarrierError):
                made.wait(5)

        def new_upload_commit(self, **arguments: object) -> object:
            used.append(self)
            return self._inner.new_upload_commit(**arguments)

    monkeypatch.setattr(hf_xet, "XetSession", Session)
    # Sessions are kept by their times.
    bucket = HubBucket(parse_store_url(URL), StoreOptions(store_deadline=48.25))
    with ThreadPoolExecutor() as pool:
        list(pool.map(bucket.put, ("a", "b"), (b"x", b"y")))
    assert len(used) == 2
    assert used[0] is used[1]
