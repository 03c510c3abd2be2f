"""A request, or the bucket's data, names a URL of somebody's choice: nothing is fetched from there."""

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.chains import Chain
from tests.support.web import Site
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.engine.lineage import line
from vllm_delta_sync.wire.canonical import dump_canonical


@contextmanager
def trap() -> Iterator[str]:
    """The host and port of a listener to which nobody may connect."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def bodies(url: str) -> list[Any]:
    return [
        {"version": url},
        {"version": f"tag:{url}"},
        {"version": {"url": url}},
        {"version": 0, "bucket": url},
        {"version": 0, "url": url},
        {"version": 0, "target": url},
        {"version": 0, "mirror": url},
        {"version": 0, "base": {"location": url}},
        url,
        [url],
    ]


@pytest.mark.parametrize("scheme", ["http", "https", "s3", "hf", "file", "ftp", "gopher"])
def test_url_in_a_request(tmp_path: Path, scheme: str) -> None:
    site = Site(tmp_path)
    with trap() as place:
        url = f"{scheme}://{place}/run"
        client = site.client()
        for path in ("sync", "rollback"):
            for body in bodies(url):
                assert client.post(f"/delta_sync/{path}", json=body).status_code == 400
        assert client.get("/delta_sync/wait", params={"version": url}).status_code == 400
        assert client.get("/delta_sync/status", params={"bucket": url, "url": url}).status_code == 200
    assert not site.was_changed()
    site.end()


def test_url_beside_a_request_changes_nothing(tmp_path: Path) -> None:
    """Parameters and headers that other programs read."""
    site = Site(tmp_path)
    site.serve()
    with trap() as place:
        url = f"http://{place}/run"
        answer = site.client().post(
            f"/delta_sync/sync?bucket={url}&url={url}",
            json={},
            headers={"Referer": url, "X-Delta-Sync-Bucket": url, "X-Original-URL": url, "X-Rewrite-URL": "/x"},
        )
        assert answer.status_code == 200
    site.end()


@pytest.mark.parametrize(
    "scheme", ["http", "https", "s3", "hf", "gs", "az", "file", "memory", "ftp", "HTTP", "file+http"]
)
def test_bucket_to_follow_that_is_not_beside_the_configured_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Not opened, not even to look whether it is a run."""
    site = Site(tmp_path)
    site.serve()
    opened: list[str] = []
    monkeypatch.setattr("vllm_delta_sync.chain.open_run", lambda url, *rest: opened.append(url))
    monkeypatch.setattr("vllm_delta_sync.engine.history.open_run", lambda url, *rest: opened.append(url))
    parent = tmp_path.as_posix()
    with trap() as place:
        for url in (
            f"{scheme}://{place}/run",
            f"{scheme}://key:hidden@{place}/run",
            f"{scheme}://{place}{parent}/other",
            f"{scheme}:{parent}/other/../run",
            f"{scheme}://{place}",
        ):
            answer = site.client().post("/delta_sync/target", json={"target": "head", "bucket": url})
            assert answer.status_code == 400, url
            assert place not in answer.text
        for body in (
            {"target": f"{scheme}://{place}/run"},
            {"target": f"tag:{scheme}://{place}/run"},
            {"target": "head", "url": f"{scheme}://{place}/run"},
            {"target": "head", "bucket": {"url": f"{scheme}://{place}/run"}},
            {"target": "head", "bucket": ""},
        ):
            assert site.client().post("/delta_sync/target", json=body).status_code == 400
    assert opened == []
    assert site.service.receiver.status()["last_error"] is None
    site.end()


def test_bucket_to_follow_that_is_above_below_or_hidden(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.serve()
    for url in (
        "/etc",
        "/",
        f"{tmp_path}/run/../other",
        f"{tmp_path}/run/objects",
        f"{tmp_path}/.run",
        f"{tmp_path}//x",
    ):
        answer = site.client().post("/delta_sync/target", json={"target": "head", "bucket": url})
        assert answer.status_code == 400, url
        assert answer.json()["error"]["kind"] == "usage"
    # Beside it, and not there.
    answer = site.client().post("/delta_sync/target", json={"target": "head", "bucket": f"{tmp_path}/other"})
    assert answer.status_code == 404
    site.end()


@pytest.mark.parametrize("scheme", ["http", "https", "s3", "hf", "HTTP", "file+http"])
def test_branch_that_says_its_source_is_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scheme: str
) -> None:
    """Only a URL of the configured bucket's own kind is opened."""
    source = Chain(tmp_path, base=False)
    source.grow(2)
    branch = source.branch("branch", 1, seed=1)
    first = branch.folder / "versions" / "0000000000.json"
    with trap() as place:
        document = json.loads(first.read_bytes())
        document["base"]["location"] = f"{scheme}://key:hidden@{place}/run?sig=hidden"
        first.write_bytes(dump_canonical(document))
        with caplog.at_level(logging.DEBUG):
            assert [point.version for point in line(open_run(branch.url), 0)] == [0]
    assert "from the store 'file' no other one is opened" in caplog.text
    assert place in caplog.text
    assert "hidden" not in caplog.text


def test_branch_in_another_directory(tmp_path: Path) -> None:
    source = Chain(tmp_path, base=False)
    source.grow(2)
    branch = source.branch("branch", 1, seed=1)
    for run in (open_run(branch.url), open_run(f"file://{branch.folder}")):
        assert [point.version for point in line(run, 0)] == [0, 1]
