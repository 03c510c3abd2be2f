"""The stores of the tests themselves: real clients get back what they gave, and faults do what their names say.

What they do towards our own buckets is in ``contract/`` and in the suites of each store.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError
from obstore.store import S3Store

from tests.support import s3_store
from tests.support.hub_store import TOKEN, Hub, serving_here
from tests.support.stores import s3_server

BUCKET = "team/run"
MB = 1 << 20
CLIENT_SECONDS = 300
HUB_CLIENT = """
import json, os, sys
from pathlib import Path
from huggingface_hub import HfApi
api, folder, bucket = HfApi(), Path(sys.argv[1]), "team/run"
names = ["empty", "one", "random", "text"]
api.batch_bucket_files(bucket, add=[(folder / name, f"deep/{name}.bin") for name in names] + [(b"in memory", "note")])
api.download_bucket_files(bucket, [(f"deep/{name}.bin", folder / "got" / name) for name in names])
info = next(iter(api.get_bucket_paths_info(bucket, ["note", "absent"])))
api.create_bucket("team/other")
api.batch_bucket_files("team/other", copy=[("bucket", bucket, info.xet_hash, "copied")])
api.download_bucket_files("team/other", [("copied", folder / "copied")])
api.batch_bucket_files(bucket, delete=["note"])
print(json.dumps([info.path, info.size, [item.path for item in api.list_bucket_tree(bucket)]]))
"""


def ask(hub: Hub, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
    """Status, body and headers. Raises OSError: no whole answer."""
    request = urllib.request.Request(path if "://" in path else hub.endpoint + path, body, method=method)
    for name, value in {"Authorization": f"Bearer {TOKEN}", **headers}.items():
        request.add_header(name, value)
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=CLIENT_SECONDS) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def gateway(hub: Hub, **changes: Any) -> S3Store:
    options: dict[str, Any] = {
        "endpoint": f"{hub.endpoint}/s3/team",
        "access_key_id": hub.options()["s3_key"],
        "secret_access_key": "any",
        "region": "us-east-1",
        "client_options": {"allow_http": True},
        **changes,
    }
    return S3Store("run", **options)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serving_here(tmp_path / "hub", read_token="hf_reader") as served:
        served.create_bucket(BUCKET)
        obstore.put(gateway(served), "file", b"data")
        served.forget_requests()
        yield served


def test_the_hubs_client_gets_back_what_it_uploaded(hub: Hub, tmp_path: Path) -> None:
    samples = {"empty": b"", "one": b"x", "random": os.urandom(2_000_000), "text": b"the same line again\n" * 100_000}
    for name, data in samples.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", HUB_CLIENT, str(tmp_path)]
    environment = os.environ | hub.environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CLIENT_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == ["note", 9, ["deep", "file"]]
    assert (tmp_path / "copied").read_bytes() == b"in memory"
    for name, data in samples.items():
        assert (tmp_path / "got" / name).read_bytes() == data
        where = f"/buckets/{BUCKET}/resolve/deep/{name}.bin"
        assert ask(hub, where)[1] == data
        if len(data) > 1000:
            status, part, headers = ask(hub, where, Range="bytes=65535-123456")
            assert (status, part) == (206, data[65535:123457])
            assert headers["Content-Range"] == f"bytes 65535-123456/{len(data)}"
    # The gateway shows the same files.
    assert (
        bytes(obstore.get_range(gateway(hub), "deep/random.bin", start=70_001, end=80_000))
        == (samples["random"][70_001:80_000])
    )


@pytest.mark.parametrize("store", ["s3", "gateway", "gateway that redirects"])
def test_of_many_threads_one_creates_an_object(store: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.change(s3_redirect=store.endswith("redirects"))
    # Of S3 larger ones too: moto puts them into a file between looking and writing, long enough to lose a race.
    client = s3(monkeypatch) if store == "s3" else gateway(hub)
    for size in (100, 6 * MB) if store == "s3" else (100,):
        together = threading.Barrier(8)

        def create(number: int, size: int = size, together: threading.Barrier = together) -> bool:
            together.wait()
            try:
                obstore.put(client, f"head-{size}", bytes([number]) * size, mode="create")
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert won.count(True) == 1
        assert bytes(obstore.get_range(client, f"head-{size}", start=0, length=1)) == bytes([won.index(True)])


def test_listings_of_the_hub_come_in_pages(hub: Hub) -> None:
    names = ["file", "logs/1", "logs/deep/2", "logs.json", "a&b", "d/é"]
    for name in names[1:]:
        obstore.put(gateway(hub), name, b"x")
    hub.change(page=2)
    assert sorted(item["path"] for items in obstore.list(gateway(hub)) for item in items) == sorted(names)
    found, url = [], f"/api/buckets/{BUCKET}/tree/logs%2F?recursive=true"
    while url:
        _, body, headers = ask(hub, url)
        assert len(json.loads(body)) <= 2
        found += [item["path"] for item in json.loads(body)]
        url = headers["Link"].split(">")[0][1:] if headers["Link"] else ""
    assert found == ["logs/1", "logs/deep/2"]


def test_rights_and_quota_of_the_hub(hub: Hub) -> None:
    tree, batch = f"/api/buckets/{BUCKET}/tree", f"/api/buckets/{BUCKET}/batch"
    assert [ask(hub, tree, Authorization=f"Bearer {token}")[0] for token in ("wrong", "hf_reader")] == [401, 200]
    assert ask(hub, batch, "POST", b"", Authorization="Bearer hf_reader")[0] == 403
    for where, code in (("/api/buckets/team/none/tree", "Repo"), (f"/buckets/{BUCKET}/resolve/none", "Entry")):
        status, _, headers = ask(hub, where)
        assert (status, headers["X-Error-Code"]) == (404, f"{code}NotFound")
    told = json.loads(ask(hub, f"/api/buckets/{BUCKET}/xet-write-token")[1])
    for path in (f"xorbs/default/{'ab' * 32}", "shards"):
        bearer = f"Bearer {told['accessToken']}"
        assert ask(hub, f"{told['casUrl']}/v1/{path}", "POST", b"\0\1", Authorization=bearer)[0] == 400
    hub.change(quota=1000)
    with pytest.raises(PermissionDeniedError, match="QuotaExceeded"):
        obstore.put(gateway(hub), "more", bytes(1001))
    # A bucket that is made again is another one.
    hub.delete_bucket(BUCKET)
    hub.create_bucket(BUCKET)
    name = json.loads(ask(hub, f"/api/buckets/{BUCKET}")[1])["_id"]
    assert json.loads(ask(hub, tree)[1]) == []
    assert name


def test_tokens_and_addresses_of_the_content_store_expire(hub: Hub) -> None:
    name = json.loads(ask(hub, f"/api/buckets/{BUCKET}/tree")[1])[0]["xetHash"]

    def reconstruct() -> tuple[int, bytes, Any]:
        told = json.loads(ask(hub, f"/api/buckets/{BUCKET}/xet-read-token")[1])
        return ask(hub, f"{told['casUrl']}/v1/reconstructions/{name}", Authorization=f"Bearer {told['accessToken']}")

    part = json.loads(reconstruct()[1])["fetch_info"].popitem()[1][0]
    signed = f"bytes={part['url_range']['start']}-{part['url_range']['end']}"
    assert ask(hub, part["url"], Range=signed)[0] == 206
    hub.expire_tokens()
    assert ask(hub, part["url"], Range=signed)[0] == 403
    hub.change(xet_seconds=-1)
    assert reconstruct()[0] == 401


def test_faults_of_the_hub(hub: Hub) -> None:
    where, file = f"/api/buckets/{BUCKET}", f"/buckets/{BUCKET}/resolve/file"
    hub.fault("status", "/team/run$", method="GET", code=429, times=2, after=1, headers={"Retry-After": "7"})
    answers = [ask(hub, where) for _ in range(4)]
    assert [one["status"] for one in hub.requests(where)] == [code for code, _, _ in answers] == [200, 429, 429, 200]
    assert answers[1][2]["Retry-After"] == "7"
    hub.fault("flip", "/cdn/file", at=3)
    got = ask(hub, file)[1]
    assert [at for at in range(4) if got[at] != b"data"[at]] == [3]
    hub.fault("cut", "/cdn/file", at=2)
    with pytest.raises(Exception, match="2 bytes read"):
        ask(hub, file)
    for at in (None, 2):
        hub.fault("stall", where, seconds=600, at=at)
        threading.Timer(0.2, hub.clear_faults).start()
        assert ask(hub, where)[0] == 200
    gone = json.dumps({"type": "deleteFile", "path": "file"}).encode()
    for kind, left in (("drop", 1), ("lose", 0)):
        hub.fault(kind, "/batch")
        with pytest.raises(OSError):
            ask(hub, f"{where}/batch", "POST", gone)
        assert json.loads(ask(hub, where)[1])["totalFiles"] == left
    assert ask(hub, "/_faults", "POST", b'{"kind": "explode"}')[0] == 400


# S3


def s3(patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A client of an empty bucket of the S3 server; its environment, too."""
    server = s3_server()
    for name, value in server.environment.items():
        patch.setenv(name, value)
    bucket = f"loopback-{os.getpid()}-{os.urandom(4).hex()}"
    server.create_bucket(bucket)
    return S3Store(bucket, retry_config={"max_retries": 0}, **options)


def test_an_object_of_s3_is_read_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, by ranges, and while another takes its place."""
    store, data = s3(monkeypatch), os.urandom(11 * MB)
    obstore.put(store, "anchor", data, use_multipart=True, chunk_size=5 * MB, max_concurrency=4)
    assert bytes(obstore.get_range(store, "anchor", start=5 * MB - 3, length=MB)) == data[5 * MB - 3 : 6 * MB - 3]
    assert bytes(obstore.get_range(store, "anchor", start=len(data) - 4, length=9)) == data[-4:]
    with pytest.raises(GenericError, match="416"):
        obstore.get_range(store, "anchor", start=len(data), length=5)
    stream = iter(obstore.get(store, "anchor").stream(min_chunk_size=MB))
    read = [bytes(next(stream))]
    obstore.put(store, "anchor", b"b")
    assert b"".join([*read, *map(bytes, stream)]) == data
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(PermissionDeniedError):
        obstore.put(s3_client_of(store), "head", b"one")


def s3_client_of(store: Any) -> Any:
    """Another client of the same bucket, by the environment as it is now."""
    return S3Store(store.config["bucket"], retry_config={"max_retries": 0})


@pytest.mark.parametrize("sent", [b"0123456780", b"01234"])
def test_a_body_that_was_changed_or_cut_is_not_stored(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    meant, server = b"0123456789", s3_server()
    store = s3(monkeypatch)
    port = int(server.endpoint.rpartition(":")[2])
    with socket.create_server((s3_store.HOST, 0)) as listener, ThreadPoolExecutor(1) as pool:
        via = f"http://{s3_store.HOST}:{listener.getsockname()[1]}"
        client = S3Store(store.config["bucket"], endpoint=via, retry_config={"max_retries": 0})
        put = pool.submit(obstore.put, client, "head", meant)
        with listener.accept()[0] as near, socket.create_connection((s3_store.HOST, port)) as far:
            request = b""
            while not request.endswith(meant):
                request += near.recv(65536)
            far.sendall(request.removesuffix(meant) + sent)
            far.shutdown(socket.SHUT_WR)
            near.sendall(b"".join(iter(lambda: far.recv(65536), b"")))
        with pytest.raises(GenericError, match="400"):
            put.result(CLIENT_SECONDS)
    assert [entry for page in obstore.list(store) for entry in page] == []


def test_the_server_does_not_outlive_who_started_it() -> None:
    code = "import os; from tests.support.s3_store import serving\nwith serving() as server: os._exit(0)"
    # The server inherits this stderr, which therefore ends when both have.
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=CLIENT_SECONDS)
    assert (done.returncode, done.stderr) == (0, b"")
