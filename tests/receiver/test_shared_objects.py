"""The route that serves a server's cached objects to other servers, on a real socket as vLLM runs it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.samples import ref_of
from tests.support.services import wait_until
from tests.support.usage import counted
from tests.support.web import TOKEN, Site, listening
from vllm_delta_sync.admin_token import VARIABLE, AdminToken
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket.peer import CALLER_HEADER, OBJECTS_PATH, PROGRESS_HEADER
from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.cache.folder import CacheFolder
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.api import shared_objects
from vllm_delta_sync.format.manifest import ObjectRef

PEER = {"Authorization": f"Bearer {AdminToken.of(TOKEN, 'test').for_peers()}"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv(VARIABLE, TOKEN)
    site = Site(tmp_path, cache_dir=tmp_path / "cache")
    site.set_token()
    site.publish(1)
    yield site
    site.end()


def newest(site: Site) -> ObjectRef:
    with open_run(site.settings.bucket) as run:
        return run.head().objects[0]


def test_reader_takes_objects_from_a_server_and_documents_from_the_bucket(site: Site, tmp_path: Path) -> None:
    ref = newest(site)
    with listening(site.app) as port:
        options = StoreOptions(peer=f"http://127.0.0.1:{port}")
        names = ("peer_bytes", "received_bytes", "peer_failures")
        with open_bucket(site.settings.bucket, options) as bucket, counted(*names) as used:
            data = fetch_object(bucket, ref)
            assert used() == [ref.bytes, 0, 0]
        assert (tmp_path / "cache" / ref.sha256).read_bytes() == data, "in the cache of the node"
        with open_run(site.settings.bucket, store=options) as run:
            assert run.head().version == 1


def test_who_gets_an_object(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = newest(site)
    with listening(site.app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        path = OBJECTS_PATH + ref.sha256
        answer = client.get(path, headers=PEER)
        assert (answer.status_code, len(answer.content)) == (200, ref.bytes)
        part = client.get(path, headers={**PEER, "Range": "bytes=2-9"})
        assert (part.status_code, part.content) == (206, answer.content[2:10])
        assert part.headers["content-range"] == f"bytes 2-9/{ref.bytes}"
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": "Bearer x"}):
            refused = client.get(path, headers=headers)
            assert (refused.status_code, refused.json()["error"]["kind"]) == (401, "forbidden")
        assert client.get(path, headers={**PEER, "Range": "bytes=0-1,4-5"}).status_code == 400
        assert client.get(OBJECTS_PATH + "0" * 64, headers=PEER).status_code == 404
        for other in ("run.json", "0" * 63, ref.sha256.upper()):
            assert client.get(OBJECTS_PATH + other, headers=PEER).status_code in (400, 404, 422)
        own = CacheFolder(Path(str(site.settings.cache_dir)), 0).identity()
        assert client.get(path, headers={**PEER, CALLER_HEADER: own}).status_code == 421
        monkeypatch.setattr(shared_objects, "MAX_REQUESTS", 0)
        assert client.get(path, headers=PEER).status_code == 202, "too many at once: come again"
        monkeypatch.undo()
        site.app.state.delta_sync_token = None
        assert client.get(path, headers=PEER).status_code == 403
        assert site.app.state.delta_sync_objects.busy == 0


def test_busy_server_shows_that_it_sends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait for their turn give up a server that does nothing, not one whose answers take long."""
    data = bytes(40_000_000)
    ref = ref_of(data)
    with open_bucket(site.settings.bucket, StoreOptions()) as bucket:
        bucket.put(ref.key, data)
    monkeypatch.setattr(shared_objects, "MAX_REQUESTS", 1)
    path = OBJECTS_PATH + ref.sha256
    with listening(site.app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=PEER) as client:
        wait_until(lambda: client.get(path, headers={"Range": "bytes=0-0"}).status_code == 206)
        wait_until(lambda: site.app.state.delta_sync_objects.busy == 0)
        with client.stream("GET", path) as slow:
            assert slow.status_code == 200
            before = client.get(path).headers[PROGRESS_HEADER]
            for _ in slow.iter_raw():
                if client.get(path).headers[PROGRESS_HEADER] != before:
                    break
            assert site.app.state.delta_sync_objects.busy == 1, "it has not ended"


def test_server_without_a_cache_has_no_object(site: Site) -> None:
    ref = newest(site)
    settings = site.settings.model_copy(update={"cache_bytes": 0})
    site.app.state.delta_sync_objects = shared_objects.SharedObjects(settings)
    with listening(site.app) as port:
        answer = httpx.get(f"http://127.0.0.1:{port}{OBJECTS_PATH}{ref.sha256}", headers=PEER)
    assert (answer.status_code, answer.json()["error"]["kind"]) == (404, "not_found")
