"""The page of a server: what it shows, who may read it, and that viewers cost neither the bucket nor a pause."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.held_calls import HeldCalls
from tests.support.services import wait_until
from tests.support.web import ELSEWHERE, Site
from vllm_delta_sync.dashboard import page
from vllm_delta_sync.dashboard.page_reader import PageReader
from vllm_delta_sync.engine.api.live_page import LivePage
from vllm_delta_sync.errors import BusyError

SECONDS = 120


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path, state_dir=tmp_path / "state", poll_seconds=0.1, receiver_id="rollout-1")
    yield found
    found.end()


def overview(site: Site, whole: bool = True) -> Any:
    """The document, once the bucket is read."""
    found: list[Any] = []

    def is_read() -> bool:
        reply = site.client().get("/delta_sync/overview")
        assert reply.status_code == 200, reply.text
        found.append(reply.json())
        return found[-1]["run"] is not None or not whole

    wait_until(is_read)
    return found[-1]


def test_page_and_document_of_a_server(site: Site) -> None:
    site.serve()
    site.publish(7)
    assert site.client().get("/delta_sync/wait", params={"version": 1, "timeout": SECONDS}).status_code == 200
    shown = site.client(ELSEWHERE).get("/delta_sync/")
    assert (shown.status_code, shown.content) == (200, page.live_page())
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert shown.headers["content-security-policy"] == page.policy()
    assert (shown.headers["cache-control"], shown.headers["x-content-type-options"]) == ("no-store", "nosniff")
    moved = site.client().get("/delta_sync", follow_redirects=False)
    assert (moved.status_code, moved.headers["location"].endswith("/delta_sync/")) == (307, True)
    found = overview(site)
    status = site.client().get("/delta_sync/status").json()
    server = found["servers"][0]
    assert (server["served"]["version"], server["lag"], server["state"]) == (1, 0, "idle")
    assert server["recent"][-1]["pause"] == status["timings_ms"]["pause"]
    assert (found["source"], found["run"]["id"], found["run"]["head"]["step"]) == ("server", status["run"], 7)
    assert found["headline"] == {"level": "good", "text": "Version 1 is served, the newest"}
    assert [row["receiver"] for row in found["run"]["receivers"]] == ["rollout-1"]
    assert site.client().get("/delta_sync/overview?adapter=none").status_code == 404


def test_document_has_no_address_and_no_figures_from_objects(site: Site) -> None:
    """Anyone who reaches the port may read it, as the status."""
    site.serve()
    found = overview(site)
    assert (found["run"]["url"], found["run"]["heat"]) == (None, None)
    assert site.settings.bucket not in json.dumps(found)


@contextmanager
def counting(site: Site) -> Iterator[list[str]]:
    """Names of the threads that read the bucket for the page."""
    reads: list[str] = []
    read = PageReader.read

    def counted(self: PageReader) -> Any:
        reads.append(threading.current_thread().name)
        return read(self)

    with mock.patch.object(PageReader, "read", counted):
        site.app.state.delta_sync_pages = {None: LivePage(site.settings)}
        yield reads


def test_no_read_begins_during_a_pause_and_the_page_answers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.serve()
    pauses = HeldCalls(monkeypatch, site.port, "pause")
    with counting(site) as reads, ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(site.publish, 1)
        assert pauses.reached.wait(SECONDS)
        found = [overview(site, whole=False) for _ in range(3)]
        assert reads == []
        pauses.open.set()
        publishing.result(SECONDS)
        assert overview(site)["run"]["head"]["version"] == 1
        assert len(reads) >= 1
    assert {document["servers"][0]["state"] for document in found} == {"committing"}
    assert found[0]["run"] is None


def test_a_status_that_cannot_be_had_is_shown(site: Site) -> None:
    """A follower of several API servers, while none leads."""
    live = LivePage(site.settings)
    absent = BusyError("this server has no API server leader at the moment; retry")
    found = json.loads(live.answer(mock.Mock(side_effect=absent)))
    assert found["problems"][0]["kind"] == "busy"
    assert found["headline"]["level"] == "error"


def test_a_bucket_that_cannot_be_read_leaves_the_rest(site: Site, tmp_path: Path) -> None:
    site.serve()
    moved = site.settings.model_copy(update={"bucket": str(tmp_path / "nowhere")})
    site.app.state.delta_sync_pages = {None: LivePage(moved)}
    wait_until(lambda: overview(site, whole=False)["problems"])
    found = overview(site, whole=False)
    problem = found["problems"][0]
    assert (problem["where"], problem["kind"], found["run"]) == ("the bucket", "not_found", None)
    assert found["headline"] == {"level": "error", "text": "Version 0 is served, the newest"}
