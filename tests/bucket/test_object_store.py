"""Object stores beyond the contract: endpoints, parts, listings, clean-up."""

import os
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.answers import Answer, Answers, closed_port, in_pieces
from tests.support.clouds import ANYBODY, KEYS, far_from_clouds, opened
from tests.support.running import run_python
from tests.support.stores import s3_server
from vllm_delta_sync.bucket import StoreOptions, open_beside, open_bucket
from vllm_delta_sync.bucket.base import observed_by
from vllm_delta_sync.bucket.factory import OpenedBucket
from vllm_delta_sync.bucket.obstore_bucket import ObjectStoreBucket
from vllm_delta_sync.bucket.obstore_clients import CREATE_BYTES, PART_BYTES
from vllm_delta_sync.errors import NotFoundError, StoreError, UnavailableError, UsageError


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    far_from_clouds(monkeypatch, tmp_path)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ObjectStoreBucket:
    """A bucket of the real client and server. Plain HTTP is allowed by the endpoint alone."""
    server = s3_server()
    for name, value in server.environment.items():
        if name != "AWS_ALLOW_HTTP":
            monkeypatch.setenv(name, value)
    return opened(server.create_bucket(f"unit-{os.getpid()}-{abs(hash(request.node.name))}") + "/run")


# Opening


def test_what_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"az://container/run.*Account"):
        opened("az://container/run")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    with pytest.raises(UsageError, match=r"/nowhere/key\.json"):
        opened("gs://bucket/run")
    # As in a small container.
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="no CA certificates are here; install ca-certificates, or set SSL_CERT_FILE"):
        opened("s3://bucket/run")


@pytest.mark.parametrize(
    ("scheme", "name", "value", "said"),
    [
        ("s3", "AWS_ENDPOINT_URL", "localhost:9000", "no address of a store; write http://host:port"),
        ("s3", "AWS_ENDPOINT_URL_S3", "", "no address of a store"),
        ("s3", "AWS_ENDPOINT_URL", "me:secret@localhost:9000", "is 'localhost:9000', which"),
        ("s3", "AWS_ENDPOINT_URL", "http://localhost:99999", "no address of a store"),
        ("gs", "GOOGLE_BASE_URL", "http://localhost:9000\r", "no address of a store"),
        ("az", "AZURE_STORAGE_ENDPOINT", "localhost:9000", "no address of a store"),
        ("s3", "AWS_ACCESS_KEY_ID", "key\r", "control character"),
        ("s3", "AWS_SESSION_TOKEN", "token\n", "control character"),
        ("s3", "AWS_REGION", "us-east-1\r", "control character"),
        ("az", "AZURE_STORAGE_ACCOUNT_NAME", "account\r", "control character"),
        ("s3", "AWS_ACCESS_KEY_ID", "", "is empty; unset it"),
    ],
)
def test_variables_that_the_client_would_panic_on_are_named(
    scheme: str, name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known, key in {**KEYS, **ANYBODY, name: value}.items():
        monkeypatch.setenv(known, key)
    monkeypatch.delenv("AWS_SKIP_SIGNATURE")
    with pytest.raises(UsageError, match=rf"{name}\b.*{said}"):
        opened(f"{scheme}://bucket/run")


def test_panic_of_the_client_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    bucket = opened("s3://bucket/run", "http://%zz:9000")
    for call in (lambda: bucket.get("key"), lambda: bucket.put("key", b"x"), lambda: list(bucket.list())):
        with pytest.raises(StoreError, match=r"InvalidAuthority.*check store_endpoint"):
            call()
    with pytest.raises(UsageError, match="store_endpoint is 'http://localhost:x', which is no address"):
        opened("s3://bucket/run", "http://localhost:x")


def test_without_the_library() -> None:
    code = (
        "import sys; sys.modules['obstore'] = sys.modules['obstore.exceptions'] = None\n"
        "from vllm_delta_sync.bucket import open_bucket\n"
        "from vllm_delta_sync.errors import UsageError\n"
        "try: open_bucket('s3://bucket/run')\n"
        "except UsageError as error: print(error.message)\n"
    )
    assert "pip install" in run_python("-c", code).stdout


def test_the_option_comes_before_the_environment(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port()}")
    for name, value in ANYBODY.items():
        monkeypatch.setenv(name, value)
    answers.reply = lambda asked: in_pieces(b"here", asked)
    for url in ("s3://bucket/run", "gs://bucket/run", "az://bucket/run"):
        assert opened(url, answers.url).get("key") == b"here"
        assert unquote(answers.asked[-1].path).endswith("/bucket/run/key")
        assert answers.asked[-1].headers["user-agent"].startswith("vllm-delta-sync/")
        with pytest.raises(UnavailableError, match="no connection"):
            opened(url).get("key")


@pytest.mark.parametrize(("scheme", "variable"), [("s3", "AWS_ENDPOINT_URL"), ("az", "AZURE_STORAGE_ENDPOINT")])
def test_slash_at_the_end_of_an_endpoint_does_not_matter(
    scheme: str, variable: str, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ANYBODY.items():
        monkeypatch.setenv(name, value)
    answers.reply = lambda asked: in_pieces(b"here", asked)
    address = f"{answers.url}/devstoreaccount1/"
    opened(f"{scheme}://bucket/run", address).get("key")
    monkeypatch.setenv(variable, address)
    opened(f"{scheme}://bucket/run").get("key")
    assert {asked.path for asked in answers.asked} == {"/devstoreaccount1/bucket/run/key"}


def test_an_endpoint_goes_for_one_kind_of_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    given = StoreOptions(store_endpoint="http://127.0.0.1:7")
    for url, other, kept in (
        ("s3://a/run", "s3://b/run", True),
        ("hf://buckets/a/b/run", "HF://buckets/a/c/run", True),
        ("hf://buckets/a/b/run", "s3://a/run", False),
        ("s3://a/run", "hf://buckets/a/b/run", False),
    ):
        with open_bucket(url, given) as bucket, open_beside(bucket, other) as beside:
            assert isinstance(beside, OpenedBucket)
            assert beside.options.store_endpoint == (given.store_endpoint if kept else None)


# Moving bytes


class Heard:
    """Adds up; ``limit``: fails when there was more."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.sum, self.limit, self.threads = 0, limit, set[int]()

    def __call__(self, count: int) -> None:
        self.sum += count
        self.threads.add(threading.get_ident())
        if self.sum > self.limit:
            raise KeyError("the watcher has had enough")


@pytest.mark.parametrize("url", ["memory://unit-flow/run", None])
def test_bytes_are_told_of_in_the_thread_of_the_call(url: str | None, s3: ObjectStoreBucket, tmp_path: Path) -> None:
    bucket = s3 if url is None else opened(url)
    source = tmp_path / "source"
    size = 2 * PART_BYTES + 12345
    source.write_bytes(os.urandom(size))
    for call in (
        lambda: bucket.put("key", source),
        lambda: bucket.put("copy", source.read_bytes()),
        lambda: bucket.put("new", source, if_absent=True),
        lambda: bucket.get("key"),
        lambda: bucket.get_range("key", 0, 1 << 40),
    ):
        with observed_by(heard := Heard()):
            call()
        assert (heard.sum, heard.threads) == (size, {threading.get_ident()})
    assert source.read_bytes() == bucket.get("copy") == bucket.get("new")


def test_an_upload_that_breaks_off_leaves_nothing(s3: ObjectStoreBucket, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(5 * PART_BYTES))
    with observed_by(Heard(limit=3 * PART_BYTES)), pytest.raises(KeyError, match="has had enough"):
        s3.put("objects/a", source)
    assert list(s3.list()) == []
    name = s3.url.removeprefix("s3://").partition("/")[0]
    assert b"<Upload>" not in s3_server().request("GET", f"/{name}?uploads=")


@pytest.mark.parametrize("size", [1000, CREATE_BYTES + 5])
def test_a_pipe_can_be_put(size: int, tmp_path: Path) -> None:
    bucket = opened("memory://unit-pipe/run")
    data = os.urandom(size)
    for number, if_absent in enumerate((False, True)):
        pipe = tmp_path / f"pipe{number}"
        os.mkfifo(pipe)
        feeder = threading.Thread(target=pipe.write_bytes, args=(data,))
        feeder.start()
        bucket.put(f"{size}/{number}", pipe, if_absent=if_absent)
        feeder.join()
        assert bucket.get(f"{size}/{number}") == data


# Listing


def test_foreign_objects_are_left_out(s3: ObjectStoreBucket) -> None:
    name = s3.url.removeprefix("s3://").partition("/")[0]
    for path in ("run/dir/", "run/a%20b", "run/%C3%BC", "elsewhere/c", "running", "run-2/d"):
        s3_server().request("PUT", f"/{name}/{path}")
    for key in ("dir-a", "dir/b", "empty"):
        s3.put(key, b"" if key == "empty" else b"x")
    assert [info.key for info in s3.list()] == ["dir-a", "dir/b", "empty"]
    assert [info.key for info in s3.list("di")] == ["dir-a", "dir/b"]
    whole = opened(f"s3://{name}")
    assert [info.key for info in whole.list("r")] == ["run-2/d", "run/dir-a", "run/dir/b", "run/empty", "running"]


def test_a_listing_takes_no_more_than_it_needs(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    def page(*keys: str, more: str = "") -> Answer:
        found = "".join(
            f"<Contents><Key>{key}</Key><Size>1</Size><LastModified>2026-11-22T02:46:43.000Z</LastModified></Contents>"
            for key in keys
        )
        truncated = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{more}</NextContinuationToken>"
        return Answer(200, f"<ListBucketResult>{truncated if more else ''}{found}</ListBucketResult>".encode())

    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    rest = [f"run/v/c{number:04}" for number in range(997)]
    answers.reply = lambda asked: page("run/v/a", "run/v/b1", "run/v/b2", *rest, more="on")
    bucket = opened("s3://bucket/run", answers.url)
    assert [info.key for info in bucket.list("v/b")] == ["v/b1", "v/b2"]
    assert len(answers.asked) == 1
    assert "start-after=run%2Fv%2Fazzzzzzzz" in answers.asked[0].path
    answers.reply = lambda asked: page("run/b", "run/a")
    with pytest.raises(StoreError, match="keys in order"):
        list(bucket.list())
    assert [info.key for info in opened("s3://bucket--use1-az4--x-s3/run", answers.url).list()] == ["a", "b"]


def test_a_bucket_that_is_not_there(s3: ObjectStoreBucket, tmp_path: Path) -> None:
    bucket = opened("s3://no-such-bucket/run")
    with pytest.raises(NotFoundError, match="no-such-bucket/run does not exist"):
        bucket.get("key")
    with pytest.raises(NotFoundError):
        bucket.get_range("key", 0, 1)
    with pytest.raises(NotFoundError):
        bucket.stat("key")
    assert list(bucket.list()) == []
    bucket.delete("key")
    (tmp_path / "large").write_bytes(bytes(PART_BYTES + 1))
    for put in (
        lambda: bucket.put("key", b"x"),
        lambda: bucket.put("key", b"x", if_absent=True),
        lambda: bucket.put("key", tmp_path / "large"),
    ):
        with pytest.raises(StoreError, match="create it") as caught:
            put()
        assert type(caught.value) is StoreError
