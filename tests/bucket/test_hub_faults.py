"""Faults of the Hub and its content store: each ends in success, or in one clear error within the deadline."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_buckets import ID, URL, opened
from tests.support.hub_store import Hub
from tests.support.samples import ref_of
from vllm_delta_sync.bucket import Bucket, StoreOptions, open_bucket
from vllm_delta_sync.bucket.base import create_if_absent
from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.errors import AccessError, ConflictError, DeadlineError, DigestError, NotFoundError, StoreError

PATIENCE_SECONDS = 60.0
"""Of a try, where no deadline is under test: on a busy machine a try may take seconds."""
SHORT_SECONDS = 0.3
HANG_SECONDS = 600
DATA = os.urandom(400_000)
FOREVER: dict[str, Any] = {"times": None}


@pytest.fixture
def bucket(hub: Hub) -> Iterator[Bucket]:
    """Holds ``there`` and ``small.json``, and has asked nothing itself yet."""
    opened().put("there", DATA)
    opened().put("small.json", b"{}")
    with open_bucket(URL, StoreOptions(store_deadline=PATIENCE_SECONDS)) as fresh:
        yield fresh


class Persistent(StoreOptions):
    """Gives each try up soon, and never the request."""

    store_deadline: float = 1.0

    @property
    def retry_seconds(self) -> float:
        return HANG_SECONDS


def new(folder: Path) -> bytes:
    """A content that no store has seen before this test: known ones are not sent again."""
    path = folder / "source"
    if not path.exists():
        path.write_bytes(os.urandom(400_000))
    return path.read_bytes()


def put(bucket: Bucket, folder: Path) -> None:
    bucket.put("new", new(folder))


def put_file(bucket: Bucket, folder: Path) -> None:
    new(folder)
    bucket.put("new", folder / "source")


def create(bucket: Bucket, folder: Path) -> None:
    bucket.put("new", new(folder), if_absent=True)


def get(bucket: Bucket, folder: Path) -> None:
    assert bucket.get("there") == DATA


def get_range(bucket: Bucket, folder: Path) -> None:
    assert bucket.get_range("there", 1000, 300_000) == DATA[1000:301_000]


def stat(bucket: Bucket, folder: Path) -> None:
    assert bucket.stat("there").bytes == len(DATA)


def listing(bucket: Bucket, folder: Path) -> None:
    assert {"small.json", "there"} <= {info.key for info in bucket.list()}


def delete(bucket: Bucket, folder: Path) -> None:
    bucket.delete("small.json")


Call = Callable[[Bucket, Path], None]
WRITES: tuple[Call, ...] = (put, put_file, create)
REQUESTS: list[tuple[Call, str]] = [
    *((put, path) for path in ("xet-write-token", "/v1/xorbs", "/shards", "/batch")),
    (put_file, "/v1/xorbs"),
    *((create, path) for path in ("/paths-info", "/batch")),
    *((call, path) for call in (get, get_range) for path in ("/resolve/", "/cdn/file")),
    (stat, "/paths-info"),
    (listing, "/tree"),
    (delete, "/batch"),
]
FAULTS: list[tuple[str, dict[str, Any]]] = [
    *(("status", {"code": 503}), ("status", {"code": 429})),
    *(("cut", {}), ("drop", {}), ("lose", {})),
]
STALL: tuple[str, dict[str, Any]] = ("stall", {"seconds": HANG_SECONDS})
REFUSALS: list[tuple[int, type[StoreError], str]] = [
    (400, StoreError, "HF_ENDPOINT|check the store"),
    (401, AccessError, "HF_TOKEN"),
    (403, AccessError, f"right to {ID}"),
    (402, StoreError, "no room"),
    (507, StoreError, "no room"),
]
# Each request meets one fault and one refusal, and each of those several requests.
PASSING = [(request, FAULTS[number % 5]) for number, request in enumerate(REQUESTS)]
PASSING += [((put, "/batch"), STALL), ((get, "/cdn/file"), STALL)]
# An address of the content store that it refuses was signed too long ago: another one is asked for.
REFUSED = [
    (request, REFUSALS[number % (5 if request[0] in WRITES else 3)])
    for number, request in enumerate(REQUESTS)
    if request[1] != "/cdn/file"
]


def named(parts: tuple[Any, ...]) -> str:
    """Of a request, a fault or a refusal."""
    first, second = parts[:2]
    if isinstance(first, int):
        return str(first)
    return f"{first.__name__}-{second}" if callable(first) else "-".join([first, *map(str, second.values())])


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(("request_", "fault"), PASSING, ids=named)
def test_what_passes_is_overcome(
    hub: Hub, bucket: Bucket, tmp_path: Path, request_: tuple[Call, str], fault: tuple[str, dict[str, Any]]
) -> None:
    (call, path), (kind, rule) = request_, fault
    hub.fault(kind, path, times=1 if kind == "stall" else 4, **rule)
    with open_bucket(URL, Persistent()) if kind == "stall" else nullcontext(bucket) as used:
        call(used, tmp_path)
    assert any(one["fault"] for one in hub.requests())
    # The stall is not over: the try was.
    assert kind != "stall" or hub.faults()
    hub.clear_faults()
    if call in WRITES:
        assert bucket.get("new") == new(tmp_path)
    if call is delete:
        with pytest.raises(NotFoundError):
            bucket.stat("small.json")


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ((put, "/v1/xorbs"), "stall"),
        ((create, "/batch"), "drop"),
        ((get, "/cdn/file"), "status"),
        ((stat, "/paths-info"), "stall"),
    ],
    ids=lambda part: part if isinstance(part, str) else named(part),
)
def test_what_stays_is_one_error_within_the_deadline(
    hub: Hub, bucket: Bucket, tmp_path: Path, request_: tuple[Call, str], kind: str
) -> None:
    call, path = request_
    hub.fault(kind, path, times=None, seconds=HANG_SECONDS)
    begun = time.monotonic()
    with (
        open_bucket(URL, StoreOptions(store_deadline=SHORT_SECONDS)) as hasty,
        pytest.raises(DeadlineError, match=r"(write|read|look up) key '(new|there)'.*given up after \d+ tr"),
    ):
        call(hasty, tmp_path)
    assert time.monotonic() - begun < HANG_SECONDS / 2
    hub.clear_faults()
    assert "new" not in [info.key for info in bucket.list()]
    call(bucket, tmp_path)


@pytest.mark.parametrize(("request_", "refusal"), REFUSED, ids=named)
def test_a_refusal_is_not_repeated(
    hub: Hub,
    bucket: Bucket,
    tmp_path: Path,
    request_: tuple[Call, str],
    refusal: tuple[int, type[StoreError], str],
) -> None:
    (call, path), (code, error, remedy) = request_, refusal
    hub.fault("status", path, code=code, **FOREVER)
    with pytest.raises(error, match=remedy) as caught:
        call(bucket, tmp_path)
    assert type(caught.value) is error
    assert len([one for one in hub.requests() if one["fault"]]) <= 8


def test_a_flipped_byte_is_found_by_the_digest_alone(hub: Hub, bucket: Bucket) -> None:
    ref = ref_of(DATA)
    bucket.put(ref.key, DATA)
    hub.fault("flip", "/cdn/file")
    with pytest.raises(DigestError):
        fetch_object(bucket, ref)
    assert fetch_object(bucket, ref) == DATA


@pytest.mark.parametrize("call", [put, get])
def test_tokens_and_addresses_that_ran_out_are_renewed(hub: Hub, bucket: Bucket, tmp_path: Path, call: Call) -> None:
    for turn in range(2):
        call(bucket, tmp_path)
        hub.expire_tokens()
        if turn:
            hub.change(xet_seconds=30)
    try:
        call(bucket, tmp_path)
    finally:
        hub.change(xet_seconds=3600)


def test_a_bucket_that_goes_and_comes_again(hub: Hub, bucket: Bucket, tmp_path: Path) -> None:
    get(bucket, tmp_path)
    hub.delete_bucket(ID)
    hub.forget_requests()
    try:
        for write in WRITES:
            with pytest.raises(StoreError, match=rf"no bucket {ID}.*hf buckets create {ID}"):
                write(bucket, tmp_path)
        for read in (get, get_range, stat):
            with pytest.raises(NotFoundError, match=f"no bucket {ID}"):
                read(bucket, tmp_path)
        assert list(bucket.list()) == []
        delete(bucket, tmp_path)
        # It is not made by anybody but the user.
        assert hub.requests(rf"/api/buckets/{ID}$") == []
    finally:
        hub.create_bucket(ID)
    assert list(bucket.list()) == []
    create(bucket, tmp_path)
    bucket.put("there", DATA)
    for call in (get, get_range, stat):
        call(bucket, tmp_path)
    assert bucket.get("new") == new(tmp_path)


def test_no_room_and_room_again(hub: Hub, bucket: Bucket, tmp_path: Path) -> None:
    hub.change(quota=600_000)
    for call in WRITES:
        with pytest.raises(StoreError, match="no room") as caught:
            call(bucket, tmp_path)
        assert type(caught.value) is StoreError
    get(bucket, tmp_path)
    hub.change(quota=0)
    create(bucket, tmp_path)


def test_an_answer_that_was_lost_after_creating_is_read_back(hub: Hub, tmp_path: Path) -> None:
    with open_bucket(URL, StoreOptions(store_deadline=PATIENCE_SECONDS)) as bucket:
        hub.fault("lose", "/batch")
        assert create_if_absent(bucket, "new", new(tmp_path))
        assert bucket.get("new") == new(tmp_path)
        assert not create_if_absent(bucket, "new", DATA)
        with pytest.raises(ConflictError):
            bucket.put("new", DATA, if_absent=True)
