"""The stores of the tests themselves: real clients get back what they gave, and faults do what their names say.

What they do towards our own buckets is in ``contract/`` and in the suites of each store.
"""

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from tests.support.hub_store import TOKEN, Hub, serving_here

BUCKET = "team/run"
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


def gateway(hub: Hub) -> S3Store:
    return S3Store(
        "run",
        endpoint=f"{hub.endpoint}/s3/team",
        access_key_id=hub.options()["s3_key"],
        secret_access_key="any",
        region="us-east-1",
        client_options={"allow_http": True},
    )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serving_here(tmp_path / "hub") as served:
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


def test_the_server_does_not_outlive_who_started_it() -> None:
    code = "import os; from tests.support.s3_store import serving\nwith serving() as server: os._exit(0)"
    # The server inherits this stderr, which therefore ends when both have.
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=CLIENT_SECONDS)
    assert (done.returncode, done.stderr) == (0, b"")
