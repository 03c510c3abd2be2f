"""Peers in front of a bucket: each object crosses the link once, and whatever a peer does, objects are right."""

import http.client
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.answers import closed_port
from tests.support.ipv6 import needs_ipv6
from tests.support.samples import ref_of
from tests.support.usage import counted
from vllm_delta_sync.admin_token import VARIABLE, AdminToken
from vllm_delta_sync.bucket import StoreOptions, open_bucket, peer, ranged
from vllm_delta_sync.bucket.base import report_bytes
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call
from vllm_delta_sync.bucket.middleware.mirror import MirrorBucket, PeerSource
from vllm_delta_sync.bucket.middleware.usage import StoreUsage
from vllm_delta_sync.bucket.peer import CALLER_HEADER, OBJECTS_PATH, PeerBucket
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.cache.folder import CacheFolder
from vllm_delta_sync.cache.object_server import ObjectServer
from vllm_delta_sync.cache.peer_server import PeerServer
from vllm_delta_sync.errors import DigestError, NotFoundError, SettingsError, UnavailableError, UsageError
from vllm_delta_sync.format.manifest import ObjectRef

TEXT = "0123456789abcdef-a-token"
TOKEN = AdminToken.of(TEXT, "test")
PIECE = 10_000
LIMIT = 1 << 30


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged, "PIECE_BYTES", PIECE)
    monkeypatch.setattr("vllm_delta_sync.cache.object_cache.RESUMED_BYTES", PIECE)
    monkeypatch.setenv(VARIABLE, TEXT)


class Link(BucketMiddleware):
    """The bucket behind a slow link: notes the bytes of objects that crossed it; a read begins when ``open`` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LocalBucket(folder))
        self.read = 0
        self.open = threading.Event()
        self.open.set()
        self._lock = threading.Lock()

    def _around(self, call: Call, run: Callable[[], object]) -> object:  # type: ignore[override]
        if call.direction == "down":
            assert self.open.wait(60)
        found = run()
        with self._lock:
            self.read += len(found) if isinstance(found, bytes) else 0
        return found


class Site:
    """A bucket behind a link, and as many peers beside it as a test asks for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.link = Link(folder / "bucket")

    def put(self, size: int) -> tuple[ObjectRef, bytes]:
        data = os.urandom(size)
        ref = ref_of(data)
        self.link.put(ref.key, data)
        return ref, data

    def serve(self, name: str, token: AdminToken | None = TOKEN) -> PeerServer:
        objects = ObjectServer(self.folder / name, LIMIT, lambda: self.link, token)
        server = PeerServer("127.0.0.1", 0, objects)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        self._stack.callback(server.server_close)
        self._stack.callback(server.shutdown)
        return server

    def reader(self, *urls: str, patience: float = 5.0, longest: float = 30.0) -> tuple[MirrorBucket, StoreUsage]:
        usage = StoreUsage()
        peers = [PeerBucket(url, TOKEN.for_peers()) for url in urls]
        return MirrorBucket(self.link, [PeerSource(each, longest, usage, patience=patience) for each in peers]), usage


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


def ask(server: PeerServer, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def bearer(token: str = "") -> str:
    return f"Bearer {token or TOKEN.for_peers()}"


@pytest.mark.parametrize("size", [1, PIECE - 1, 7 * PIECE + 5])
def test_eight_readers_that_ask_at_once_fetch_an_object_once(site: Site, size: int) -> None:
    ref, data = site.put(size)
    server = site.serve("mirror")
    site.link.open.clear()
    readers = [site.reader(server.url) for _ in range(8)]

    def read(number: int) -> bytes:
        return ObjectCache(site.folder / f"reader-{number}", LIMIT).get(ref, readers[number][0])

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(read, number) for number in range(8)]
        site.link.open.set()
        assert [call.result() for call in calls] == [data] * 8
    assert site.link.read == size
    assert [usage.snapshot()["peer_bytes"] for _, usage in readers] == [size] * 8
    assert all(usage.snapshot()["peer_failures"] == 0 for _, usage in readers)


def test_same_list_everywhere_makes_nobody_wait_for_itself_or_in_a_circle(site: Site) -> None:
    ref, data = site.put(3 * PIECE)
    servers = [site.serve(f"server-{number}") for number in range(3)]
    readers = [site.reader(*(server.url for server in servers)) for _ in servers]
    caches = [ObjectCache(site.folder / f"server-{number}", LIMIT) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(cache.get, ref, bucket) for cache, (bucket, _) in zip(caches, readers, strict=True)]
        assert [call.result() for call in calls] == [data] * 3
    assert site.link.read == len(data)
    assert all(usage.snapshot()["peer_failures"] == 0 for _, usage in readers)


def test_peer_serves_the_pieces_of_an_object_as_they_arrive(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, data = site.put(4 * PIECE)
    held = threading.Event()
    inner = site.link._inner.get_range

    def slow(key: str, start: int, length: int) -> bytes:
        if start >= PIECE:
            assert held.wait(60)
        return inner(key, start, length)

    monkeypatch.setattr(site.link._inner, "get_range", slow)
    server = site.serve("mirror")
    bucket = PeerBucket(server.url, TOKEN.for_peers())
    found = b""
    while not found:
        try:
            found = bucket.get_range(ref.key, 0, PIECE)
        except peer.BeingFetched:
            continue
    assert found == data[:PIECE], "the rest has not arrived"
    before, (other, _) = server.objects.progress("0" * 64), site.put(PIECE - 1)
    assert ask(server, OBJECTS_PATH + other.sha256, Authorization=bearer())[0] == 200
    assert before == server.objects.progress("0" * 64), "the first object has not moved"
    held.set()
    while server.objects.progress("0" * 64) == before:
        time.sleep(0.01)
    assert len(before) <= 100, "readers compare no more"


def test_peer_whose_link_is_slow_is_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes arrive all the time, but the first piece is not complete for longer than a reader waits for nothing."""
    ref, data = site.put(2 * PIECE)
    inner = site.link._inner.get_range

    def slow(key: str, start: int, length: int) -> bytes:
        for _ in range(20):
            time.sleep(0.1)
            report_bytes(length // 20)
        return inner(key, start, length)

    monkeypatch.setattr(site.link._inner, "get_range", slow)
    monkeypatch.setattr("vllm_delta_sync.cache.object_server.WAIT_SECONDS", 0.1)
    monkeypatch.setattr("vllm_delta_sync.cache.object_cache.TOUCH_SECONDS", 0.05)
    bucket, usage = site.reader(site.serve("mirror").url, patience=1.0)
    assert cached(site, ref, bucket) == data
    assert (site.link.read, usage.snapshot()["peer_failures"]) == (len(data), 0)


FAULTS: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped byte": lambda data: answer(data[:-1] + bytes([data[-1] ^ 1])),
    "another object": lambda data: answer(data[::-1]),
    "shorter": lambda data: answer(data[:-1]),
    "longer": lambda data: answer(data + b"more"),
    "claims to be huge": lambda data: b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n" + data,
    "no length": lambda data: b"HTTP/1.1 200 OK\r\n\r\n" + data,
    "killed half way": lambda data: answer(data)[: -len(data) // 2],
    "killed at once": lambda data: b"",
    "no HTTP": lambda data: b"SSH-2.0-OpenSSH\r\n",
    "refuses": lambda data: b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n",
    "fails": lambda data: b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
    "sends elsewhere": lambda data: b"HTTP/1.1 302 No\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "fetches forever": lambda data: b"HTTP/1.1 202 No\r\nContent-Length: 0\r\n\r\n",
    "stalls": lambda data: None,
}


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 206 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class Hostile:
    """A peer that answers each request with given bytes; None: with nothing, and the connection stays open."""

    def __init__(self, stack: ExitStack, respond: Callable[[socket.socket], object]) -> None:
        self.asked = 0
        self.socket = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._respond, self._open = respond, stack
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self._open.callback(connection.close)
            self.asked += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while not connection.recv(65536).endswith(b"\r\n\r\n"):
                pass
            self._respond(connection)
        except OSError:
            pass


def whole(site: Site, ref: ObjectRef, bucket: MirrorBucket) -> bytes:
    return bucket.get(ref.key, max_bytes=ref.bytes)


def cached(site: Site, ref: ObjectRef, bucket: MirrorBucket) -> bytes:
    return ObjectCache(site.folder / "reader", LIMIT).get(ref, bucket)


def check_given_up(
    site: Site,
    read: Callable[[Site, ObjectRef, MirrorBucket], bytes],
    hostile: Hostile,
    ref: ObjectRef,
    data: bytes,
    caplog: pytest.LogCaptureFixture,
    longest: float = 0.5,
) -> None:
    bucket, usage = site.reader(hostile.url, patience=0.3, longest=longest)
    assert read(site, ref, bucket) == data
    assert site.link.read == len(data), "from the bucket, once"
    assert usage.snapshot()["peer_failures"] >= 1
    assert sum(f"peer {hostile.url}" in record.getMessage() for record in caplog.records) == 1
    assert TEXT not in caplog.text
    assert TOKEN.for_peers() not in caplog.text
    # Left out from now on: others are read from the bucket at once.
    asked = hostile.asked
    other, more = site.put(2 * PIECE + 1)
    assert read(site, other, bucket) == more
    assert hostile.asked == asked


@pytest.mark.parametrize("read", [whole, cached])
@pytest.mark.parametrize("fault", FAULTS)
def test_peer_that_lies_stalls_or_dies_is_left_out(
    site: Site,
    fault: str,
    read: Callable[[Site, ObjectRef, MirrorBucket], bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "SILENT_SECONDS", 0.3)
    ref, data = site.put(PIECE - 1)

    def respond(connection: socket.socket) -> None:
        sent = FAULTS[fault](data)
        if sent is not None:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_RDWR)

    with ExitStack() as stack:
        check_given_up(site, read, Hostile(stack, respond), ref, data, caplog)


def test_two_that_name_each_other_do_not_feed_each_other(site: Site) -> None:
    """Each holds its cache's lock, and waits for the other; nothing arrives, so both soon ask the bucket."""
    ref, data = site.put(3 * PIECE)
    servers = [site.serve(f"server-{number}") for number in range(2)]
    readers = [site.reader(servers[1 - number].url, patience=0.5, longest=60)[0] for number in range(2)]
    caches = [ObjectCache(site.folder / f"server-{number}", LIMIT) for number in range(2)]
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(cache.get, ref, bucket) for cache, bucket in zip(caches, readers, strict=True)]
        assert [call.result() for call in calls] == [data] * 2
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("part", ["headers", "interim answers", "body", "progress"])
def test_peer_that_drips_costs_one_timeout(
    site: Site, part: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the abandoned call ends: otherwise a thread and a connection would stay behind each time."""
    monkeypatch.setattr(peer, "SILENT_SECONDS", 0.5)
    before = set(threading.enumerate())
    ref, data = site.put(PIECE - 1)
    left = threading.Event()
    count = iter(range(1000))

    def respond(connection: socket.socket) -> None:
        if part == "progress":
            head = f"HTTP/1.1 202 No\r\nX-Delta-Sync-Progress: {next(count)}\r\nContent-Length: 0\r\n\r\n"
            left.wait(0.05)
            connection.sendall(head.encode())
            connection.close()
            return
        drips = [bytes([byte]) for byte in answer(data)]
        if part == "headers":
            drips = [b"HTTP/1.1 200 OK\r\nX: ", *[b"x"] * 500]
        elif part == "interim answers":
            drips = [b"HTTP/1.1 100 Continue\r\n\r\n"] * 500
        for drip in drips:
            connection.sendall(drip)
            if left.wait(0.05):
                return

    with ExitStack() as stack:
        stack.callback(left.set)
        check_given_up(site, whole, Hostile(stack, respond), ref, data, caplog)
        calls = [each for each in threading.enumerate() if each not in before and each.name == "delta-sync-call"]
        for call in calls:
            call.join(5)
        assert not any(call.is_alive() for call in calls)


def test_absent_peer_and_one_without_the_object(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    ref, data = site.put(PIECE - 1)
    gone, server = f"http://127.0.0.1:{closed_port()}", site.serve("mirror")
    bucket, usage = site.reader(gone, server.url)
    assert cached(site, ref, bucket) == data
    assert usage.snapshot()["peer_bytes"] == len(data), "the next peer has it"
    assert usage.snapshot()["peer_failures"] == 1
    assert [gone in record.getMessage() for record in caplog.records] == [True]
    # One that the peer's bucket does not have is no failure of the peer.
    other, more = Site(site.folder / "elsewhere", ExitStack()).put(PIECE - 1)
    assert ask(server, OBJECTS_PATH + other.sha256, Authorization=bearer())[0] == 404
    bucket, usage = site.reader(server.url)
    assert site.link.read == len(data)
    LocalBucket(site.folder / "bucket").put(other.key, more)
    assert cached(site, other, bucket) == more
    assert usage.snapshot()["peer_failures"] == 0


def test_object_larger_than_the_cache_is_named(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Its readers take it from the bucket, and without a line on the peer no one would know why."""
    ref, _ = site.put(PIECE)
    objects = ObjectServer(site.folder / "small", PIECE - 1, lambda: site.link, TOKEN)
    with pytest.raises(NotFoundError, match="cannot hold"):
        objects.find(ref.sha256, None)
    assert "cannot hold; see cache_bytes; this is logged once" in caplog.text


def test_only_holders_of_the_token_get_objects_and_nothing_else(site: Site) -> None:
    ref, data = site.put(5 * PIECE)
    site.link.put("run.json", b"{}")
    server, path = site.serve("mirror"), OBJECTS_PATH + ref.sha256
    for given in ("", "Bearer", "Bearer wrong", bearer(TEXT), f"Basic {TOKEN.for_peers()}"):
        assert ask(server, path, Authorization=given)[0] == 401
    assert ask(server, path)[0] == 401
    assert site.link.read == 0
    good = {"Authorization": bearer()}
    assert ask(server, path, **good) == (200, data)
    assert ask(server, path, **good, Range=f"bytes=3-{PIECE}") == (206, data[3 : PIECE + 1])
    for bad in ("bytes=0-", "bytes=-5", "bytes=5-3", "bytes=0-1,3-4", f"bytes=0-{len(data)}", "bytes=0-" + "9" * 30):
        assert ask(server, path, **good, Range=bad)[0] == 400
    elsewhere = ("/", OBJECTS_PATH, "/run.json", path + "/", path.upper(), OBJECTS_PATH + "../run.json", path + "?x=1")
    for other in elsewhere:
        assert ask(server, other, **good)[0] == 404
    identity = CacheFolder(site.folder / "mirror", 0).identity()
    assert ask(server, path, **good, **{CALLER_HEADER.replace("-", "_"): identity})[0] == 421
    assert ask(site.serve("closed", None), path, **good)[0] == 401


def test_damaged_file_in_the_cache_of_a_peer_is_replaced(site: Site) -> None:
    ref, data = site.put(PIECE - 1)
    (site.folder / "mirror").mkdir(mode=0o700)
    (site.folder / "mirror" / ref.sha256).write_bytes(data[::-1])
    assert ask(site.serve("mirror"), OBJECTS_PATH + ref.sha256, Authorization=bearer()) == (200, data)


def test_object_that_is_damaged_in_the_bucket_is_refused_with_peers_too(site: Site) -> None:
    ref, data = site.put(3 * PIECE)
    site.link.put(ref.key, data[::-1])
    bucket, _ = site.reader(site.serve("mirror").url)
    with pytest.raises(DigestError):
        cached(site, ref, bucket)


def test_setting_names_peers_and_needs_the_token(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, data = site.put(PIECE - 1)
    server = site.serve("mirror")
    options = StoreOptions(peer=f"http://127.0.0.1:1, {server.url}/")
    with open_bucket(site.folder / "bucket", options) as bucket, counted("received_bytes", "peer_bytes") as used:
        assert bucket.get(ref.key, max_bytes=ref.bytes) == data
        assert used() == [0, len(data)]
        bucket.put("HEAD.json", b"1")
        assert bucket.get("HEAD.json") == b"1"
        assert used() == [1, len(data)]
    for url in (
        "ftp://host",
        "host:80",
        "http://",
        "http://user@host",
        "http://host?x",
        "http://host:port",
        "http://a..b",
        f"http://{64 * 'a'}",
        "http://a b:80",
    ):
        with pytest.raises(UsageError, match="peer"):
            open_bucket(site.folder / "bucket", StoreOptions(peer=url))
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(SettingsError, match="DELTA_SYNC_ADMIN_TOKEN"):
        open_bucket(site.folder / "bucket", options)


@needs_ipv6
def test_an_ipv6_address_without_a_port_means_the_usual_one() -> None:
    with pytest.raises(UnavailableError, match="refused"):
        PeerBucket("https://[::1]", TOKEN.for_peers()).get(f"objects/{'0' * 64}.safetensors")
