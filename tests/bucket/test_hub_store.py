"""The loopback Hub: the real clients get back what they gave, and every fault does what its name says."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from tests.support.hub_store import TOKEN, Hub, serving, serving_here
from tests.support.hub_store.store import Store

BUCKET = "team/run"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
CLIENT_SECONDS = 300

PREAMBLE = """
import json, os, sys
from pathlib import Path
from huggingface_hub import HfApi
from hf_xet import XetFileInfo, XetSession
api, folder, bucket = HfApi(), Path(sys.argv[1]), "team/run"
def stream(path, start, end):
    info = next(iter(api.get_bucket_paths_info(bucket, [path])))
    group = XetSession().new_download_stream_group(
        token_refresh_url=f"{api.endpoint}/api/buckets/{bucket}/xet-read-token",
        token_refresh_headers={"authorization": "Bearer " + os.environ["HF_TOKEN"]})
    return b"".join(map(bytes, group.download_stream(XetFileInfo(info.xet_hash, info.size), start, end)))
"""


def run_client(hub: Hub, folder: Path, script: str, **environment: str) -> Any:
    """Run the real client in its own process; what the script printed as JSON."""
    settings = {**os.environ, **hub.environment, "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "2", **environment}
    command = [sys.executable, "-c", PREAMBLE + script, str(folder)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=CLIENT_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout or "null")


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def ask(
    hub: Hub, path: str, method: str = "GET", body: bytes | None = None, follow: bool = True, **headers: str
) -> tuple[int, bytes, Any]:
    """Status, body and headers. Raises OSError: no whole answer."""
    request = urllib.request.Request(path if "://" in path else hub.endpoint + path, body, method=method)
    for name, value in {**BEARER, **headers}.items():
        request.add_header(name, value)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *([] if follow else [_Stay]))
    try:
        with opener.open(request, timeout=CLIENT_SECONDS) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def s3(hub: Hub, **changes: Any) -> S3Store:
    options: dict[str, Any] = {
        "endpoint": f"{hub.endpoint}/s3/team",
        "access_key_id": hub.options()["s3_key"],
        "secret_access_key": "any",
        "region": "us-east-1",
        "client_options": {"allow_http": True},
        **changes,
    }
    return S3Store("run", **options)


def put(hub: Hub, key: str, data: bytes) -> None:
    obstore.put(s3(hub), key, data)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serving_here(tmp_path / "hub", read_token="hf_reader") as served:
        served.create_bucket(BUCKET)
        served.forget_requests()
        yield served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Hub]:
    with serving(tmp_path / "hub") as found:
        found.create_bucket(BUCKET)
        yield found


def write_samples(folder: Path) -> dict[str, bytes]:
    samples = {
        "empty": b"",
        "one": b"x",
        "some": os.urandom(200_000),
        "random": os.urandom(8_000_000),
        "text": b"the same line again\n" * 300_000,
        "floats": b"".join(os.urandom(2) + b"\x80\x3f" for _ in range(500_000)) + b"end",
    }
    for name, data in samples.items():
        (folder / name).write_bytes(data)
    return samples


def test_real_client_gets_back_what_it_uploaded(served: Hub, tmp_path: Path) -> None:
    samples = write_samples(tmp_path)
    script = """
names = ["empty", "one", "some", "random", "text", "floats"]
api.batch_bucket_files(bucket, add=[(folder / name, f"deep/{name}.bin") for name in names])
api.batch_bucket_files(bucket, add=[(b"in memory", "note.json"), (b"", "nothing")])
api.download_bucket_files(bucket, [(f"deep/{name}.bin", folder / "got" / name) for name in names])
random = (folder / "random").read_bytes()
spans = [(0, 1), (1, 77), (65535, 3_000_001), (7_999_990, 8_000_000)]
assert all(stream("deep/random.bin", a, b) == random[a:b] for a, b in spans)
assert api.get_bucket_file_metadata(bucket, "deep/some.bin").size == 200_000
info = next(iter(api.get_bucket_paths_info(bucket, ["note.json", "absent"])))
print(json.dumps({"note": [info.path, info.size], "tree": [item.path for item in api.list_bucket_tree(bucket)]}))
"""
    told = run_client(served, tmp_path, script)
    assert told == {"note": ["note.json", 9], "tree": ["deep", "note.json", "nothing"]}
    for name, data in samples.items():
        assert (tmp_path / "got" / name).read_bytes() == data
        where = f"/buckets/{BUCKET}/resolve/deep/{name}.bin"
        assert ask(served, where)[1] == data
        for start, end in ((0, 0), (1, 7), (65_535, 65_537), (123_456, 1_999_999)):
            if end < len(data):
                status, part, headers = ask(served, where, Range=f"bytes={start}-{end}")
                assert (status, part) == (206, data[start : end + 1])
                assert headers["Content-Range"] == f"bytes {start}-{end}/{len(data)}"


def test_upload_of_what_is_there_sends_no_xorb(served: Hub, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(os.urandom(3_000_000))
    script = "api.batch_bucket_files(bucket, add=[(folder / 'data', sys.argv[1][-1] + 'again')])"
    run_client(served, tmp_path, script)
    assert len(served.requests("/v1/xorbs", "POST")) == 1
    served.forget_requests()
    run_client(served, tmp_path, script, HF_HOME=str(tmp_path / "another-home"))
    assert not served.requests("/v1/xorbs", "POST")


def test_real_client_copies_and_deletes(served: Hub, tmp_path: Path) -> None:
    script = """
api.create_bucket("team/other")
api.batch_bucket_files(bucket, add=[(b"first", "a"), (b"second", "b")])
info = next(iter(api.get_bucket_paths_info(bucket, ["a"])))
api.batch_bucket_files("team/other", copy=[("bucket", bucket, info.xet_hash, "copied")])
api.batch_bucket_files(bucket, delete=["a"])
api.download_bucket_files("team/other", [("copied", folder / "copied")])
print(json.dumps([[file.path for file in api.list_bucket_tree(bucket)], (folder / "copied").read_text()]))
"""
    assert run_client(served, tmp_path, script) == [["b"], "first"]


def test_flipped_upload_is_refused_and_flipped_download_is_not_noticed(served: Hub, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(os.urandom(500_000))
    served.fault("flip", "/v1/xorbs", upload=True, at=1000)
    upload = "api.batch_bucket_files(bucket, add=[(folder / 'data', 'data')])"
    script = f"""
try:
    {upload}
except ConnectionError as error:
    print(json.dumps(str(error)))
"""
    assert "400 Bad Request" in run_client(served, tmp_path, script)
    run_client(served, tmp_path, upload)
    served.fault("flip", "/cdn/xorb", at=100_000)
    run_client(served, tmp_path, "api.download_bucket_files(bucket, [('data', folder / 'got')])")
    got, data = (tmp_path / "got").read_bytes(), (tmp_path / "data").read_bytes()
    assert sum(left != right for left, right in zip(got, data, strict=True)) == 1


def test_gateway_shows_the_same_files(served: Hub, tmp_path: Path) -> None:
    data = os.urandom(9_000_000)
    put(served, "by-s3/large", data)
    run_client(served, tmp_path, "api.download_bucket_files(bucket, [('by-s3/large', folder / 'got')])")
    assert (tmp_path / "got").read_bytes() == data
    run_client(served, tmp_path, "api.batch_bucket_files(bucket, add=[(b'by hub', 'by-hub')])")
    assert bytes(obstore.get(s3(served), "by-hub").bytes()) == b"by hub"
    assert bytes(obstore.get_range(s3(served), "by-s3/large", start=70_001, end=8_000_000)) == data[70_001:8_000_000]


@pytest.mark.parametrize("redirect", [True, False])
def test_gateway_creates_once_among_many(hub: Hub, redirect: bool) -> None:
    hub.change(s3_redirect=redirect)

    def create(number: int) -> bool:
        try:
            obstore.put(s3(hub), "head", str(number).encode(), mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(create, range(16)))
    assert won.count(True) == 1
    assert bytes(obstore.get(s3(hub), "head").bytes()) == str(won.index(True)).encode()


def test_gateway_lists_in_pages_and_deletes(hub: Hub) -> None:
    names = ["a/1", "a/2", "a/b/3", "a&b", "c", "d/é"]
    for name in names:
        put(hub, name, name.encode())
    hub.change(page=2)
    assert sorted(item["path"] for items in obstore.list(s3(hub)) for item in items) == sorted(names)
    shown = obstore.list_with_delimiter(s3(hub), "a")
    assert (shown["common_prefixes"], [item["path"] for item in shown["objects"]]) == (["a/b"], ["a/1", "a/2"])
    obstore.delete(s3(hub), names[:4])
    assert [item["path"] for items in obstore.list(s3(hub)) for item in items] == ["c", "d/é"]
    with pytest.raises(FileNotFoundError):
        obstore.head(s3(hub), "c/none")
    with pytest.raises(obstore.exceptions.PermissionDeniedError):
        obstore.put(s3(hub, access_key_id=hub.options()["s3_read_key"]), "x", b"x")


def test_tree_pages_prefixes_and_folders(hub: Hub) -> None:
    for name in ("logs/1", "logs/deep/2", "logs/deep/3", "logs.json", "logs_old/4", "z"):
        put(hub, name, b"x")
    hub.change(page=2)

    def listed(where: str) -> list[str]:
        found, url = [], f"/api/buckets/{BUCKET}/tree{where}"
        while url:
            status, body, headers = ask(hub, url)
            assert status == 200
            assert len(json.loads(body)) <= 2
            found += [item["path"] + ("/" if item["type"] == "directory" else "") for item in json.loads(body)]
            url = headers["Link"].split(">")[0][1:] if headers["Link"] else ""
        return found

    assert listed("") == ["logs.json", "logs/", "logs_old/", "z"]
    assert listed("/logs") == ["logs.json", "logs/1", "logs/deep/", "logs_old/"]
    assert listed("/logs%2F?recursive=true") == ["logs/1", "logs/deep/2", "logs/deep/3"]


def test_rights(hub: Hub) -> None:
    put(hub, "file", b"data")
    tree, batch = f"/api/buckets/{BUCKET}/tree", f"/api/buckets/{BUCKET}/batch"
    assert ask(hub, tree, Authorization="Bearer wrong")[0] == 401
    assert ask(hub, tree, Authorization="")[0] == 401
    assert ask(hub, tree, Authorization="Bearer hf_reader")[0] == 200
    assert ask(hub, batch, "POST", b"", Authorization="Bearer hf_reader")[0] == 403
    assert ask(hub, f"/api/buckets/{BUCKET}/xet-write-token", Authorization="Bearer hf_reader")[0] == 403
    status, _, headers = ask(hub, "/api/buckets/team/none/tree")
    assert (status, headers["X-Error-Code"]) == (404, "RepoNotFound")
    status, _, headers = ask(hub, f"/buckets/{BUCKET}/resolve/none")
    assert (status, headers["X-Error-Code"]) == (404, "EntryNotFound")


def test_tokens_and_addresses_of_the_content_store_expire(hub: Hub) -> None:
    put(hub, "file", b"data")
    name = json.loads(ask(hub, f"/api/buckets/{BUCKET}/tree")[1])[0]["xetHash"]

    def reconstruct(right: str = "read") -> tuple[int, bytes, Any]:
        told = json.loads(ask(hub, f"/api/buckets/{BUCKET}/xet-{right}-token")[1])
        return ask(hub, f"{told['casUrl']}/v1/reconstructions/{name}", Authorization=f"Bearer {told['accessToken']}")

    part = json.loads(reconstruct()[1])["fetch_info"].popitem()[1][0]
    signed = f"bytes={part['url_range']['start']}-{part['url_range']['end']}"
    assert ask(hub, part["url"], Range=signed)[0] == 206
    assert ask(hub, part["url"], Range="bytes=0-1")[0] == 403
    hub.expire_tokens()
    assert ask(hub, part["url"], Range=signed)[0] == 403
    assert reconstruct("write")[0] == 200
    hub.change(xet_seconds=-1)
    assert reconstruct()[0] == 401


def test_bucket_made_again_is_another(hub: Hub) -> None:
    put(hub, "file", b"data")
    file = json.loads(ask(hub, f"/api/buckets/{BUCKET}/tree")[1])[0]
    inner = json.loads(ask(hub, f"/api/buckets/{BUCKET}")[1])["_id"]
    told = json.loads(ask(hub, f"/api/buckets/{BUCKET}/xet-read-token")[1])
    hub.delete_bucket(BUCKET)
    hub.create_bucket(BUCKET)
    assert json.loads(ask(hub, f"/api/buckets/{BUCKET}/tree")[1]) == []
    assert json.loads(ask(hub, f"/api/buckets/{BUCKET}")[1])["_id"] != inner
    where = f"{told['casUrl']}/v1/reconstructions/{file['xetHash']}"
    assert ask(hub, where, Authorization=f"Bearer {told['accessToken']}")[0] == 401
    line = json.dumps({"type": "addFile", "path": "file", "xetHash": file["xetHash"], "mtime": 1}).encode()
    status, body, _ = ask(hub, f"/api/buckets/{BUCKET}/batch", "POST", line)
    assert (status, json.loads(body)["failed"][0]["path"]) == (422, "file")


def test_quota(hub: Hub) -> None:
    hub.change(quota=1000)
    put(hub, "most", bytes(900))
    with pytest.raises(obstore.exceptions.PermissionDeniedError, match="QuotaExceeded"):
        put(hub, "more", bytes(101))
    put(hub, "rest", bytes(100))
    assert ask(hub, f"/api/buckets/{BUCKET}/xet-write-token")[0] == 403
    name = next(one["xetHash"] for one in json.loads(ask(hub, f"/api/buckets/{BUCKET}/tree")[1]) if one["size"] == 900)
    line = json.dumps({"type": "addFile", "path": "again", "xetHash": name, "mtime": 1}).encode()
    gone = json.dumps({"type": "deleteFile", "path": "rest"}).encode()
    status, body, _ = ask(hub, f"/api/buckets/{BUCKET}/batch", "POST", line + b"\n" + gone)
    assert (status, json.loads(body)["succeeded"]) == (200, 1)
    assert "quota" in json.loads(body)["failed"][0]["error"]


def test_state_is_in_the_folder(tmp_path: Path) -> None:
    data = os.urandom(300_000)
    with serving_here(tmp_path) as hub:
        hub.create_bucket(BUCKET)
        put(hub, "file", data)
    with serving_here(tmp_path) as hub:
        assert ask(hub, f"/buckets/{BUCKET}/resolve/file")[1] == data


def test_status_fault_counts(hub: Hub) -> None:
    where = f"/api/buckets/{BUCKET}"
    hub.fault("status", "/team/run$", method="GET", code=429, times=2, after=1, headers={"Retry-After": "7"})
    codes = [ask(hub, where) for _ in range(4)]
    assert [code for code, _, _ in codes] == [200, 429, 429, 200]
    assert codes[1][2]["Retry-After"] == "7"
    assert [one["status"] for one in hub.requests(where)] == [200, 429, 429, 200]
    assert hub.faults()[0]["times"] == 0


def test_faults_of_the_body(hub: Hub) -> None:
    data = os.urandom(500_000)
    put(hub, "file", data)
    where = f"/buckets/{BUCKET}/resolve/file"
    hub.fault("flip", "/cdn/file", at=300_000)
    got = ask(hub, where)[1]
    assert [at for at in range(len(data)) if got[at] != data[at]] == [300_000]
    hub.fault("cut", "/cdn/file", at=123_456)
    with pytest.raises(Exception, match="123456 bytes read"):
        ask(hub, where)
    assert ask(hub, where)[1] == data


def test_drop_does_nothing_and_lose_does_all(hub: Hub) -> None:
    put(hub, "file", b"data")
    where = f"/api/buckets/{BUCKET}/batch"
    gone = json.dumps({"type": "deleteFile", "path": "file"}).encode()
    for kind, left in (("drop", 1), ("lose", 0)):
        hub.fault(kind, "/batch")
        with pytest.raises(OSError):
            ask(hub, where, "POST", gone)
        assert json.loads(ask(hub, f"/api/buckets/{BUCKET}")[1])["totalFiles"] == left


@pytest.mark.parametrize("at", [None, 2])
def test_stall_lasts_its_time_or_until_faults_are_cleared(hub: Hub, at: int | None) -> None:
    where = f"/api/buckets/{BUCKET}"
    hub.fault("stall", where, seconds=1, at=at)
    began = time.monotonic()
    assert ask(hub, where)[0] == 200
    assert 1 <= time.monotonic() - began < CLIENT_SECONDS
    hub.fault("stall", where, seconds=600, at=at)
    threading.Timer(0.2, hub.clear_faults).start()
    assert ask(hub, where)[0] == 200


def test_wrong_orders_are_refused(hub: Hub) -> None:
    assert ask(hub, "/_faults", "POST", b'{"kind": "explode"}')[0] == 400
    assert ask(hub, "/_options", "POST", b'{"colour": 1}')[0] == 400


def test_uploads_that_lie_are_refused(hub: Hub, tmp_path: Path) -> None:
    told = json.loads(ask(hub, f"/api/buckets/{BUCKET}/xet-write-token")[1])
    bearer = f"Bearer {told['accessToken']}"
    for body in (b"", b"\0\1", bytes(8) + b"tail", b"\0\3\0\0\0\3\0\0abc"):
        assert ask(hub, f"{told['casUrl']}/v1/xorbs/default/{'ab' * 32}", "POST", body, Authorization=bearer)[0] == 400
    assert ask(hub, f"{told['casUrl']}/v1/shards", "POST", b"no shard", Authorization=bearer)[0] == 400
    assert not list((Store(tmp_path / "hub").folder / "incoming").iterdir())
