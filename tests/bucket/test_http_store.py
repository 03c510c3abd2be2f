"""A web server as a mirror."""

import pytest

from tests.support.answers import Answer, Answers, in_pieces
from vllm_delta_sync.bucket.base import observed_by
from vllm_delta_sync.bucket.obstore_bucket import HttpBucket
from vllm_delta_sync.errors import AccessError, LimitError, NotFoundError, StoreError, UnavailableError, UsageError
from vllm_delta_sync.settings import StoreOptions

DATA = bytes(range(256)) * 10_000
OPTIONS = StoreOptions(store_deadline=60)


@pytest.fixture
def mirror(answers: Answers) -> HttpBucket:
    answers.reply = lambda asked: in_pieces(DATA, asked) if asked.path == "/runs/one/objects/a" else Answer(404)
    return HttpBucket(f"{answers.url}/runs/one/", OPTIONS)


def test_it_is_read(mirror: HttpBucket, answers: Answers) -> None:
    heard: list[int] = []
    with observed_by(heard.append):
        assert mirror.get("objects/a") == DATA
    assert sum(heard) == len(DATA)
    assert mirror.stat("objects/a").bytes == len(DATA)
    assert mirror.stat("objects/a").modified == 1795315603.0
    for start, length in ((0, 10), (100, 1000), (len(DATA) - 5, 10), (len(DATA), 1), (1 << 40, 1 << 62), (7, 0)):
        assert mirror.get_range("objects/a", start, length) == DATA[start : start + length]
    assert {asked.method for asked in answers.asked} == {"GET", "HEAD"}
    with pytest.raises(LimitError):
        mirror.get("objects/a", max_bytes=len(DATA) - 1)


def test_what_is_not_there(mirror: HttpBucket) -> None:
    for call in (
        lambda: mirror.get("objects/b"),
        lambda: mirror.get_range("objects/b", 0, 1),
        lambda: mirror.get_range("objects/b", 0, 0),
        lambda: mirror.stat("objects/b"),
    ):
        with pytest.raises(NotFoundError, match="objects/b"):
            call()
    with pytest.raises(UsageError):
        mirror.get("../b")


def test_it_is_only_read(mirror: HttpBucket, answers: Answers) -> None:
    for call in (
        lambda: mirror.put("objects/a", b"x"),
        lambda: mirror.put("objects/a", b"x", if_absent=True),
        lambda: mirror.delete("objects/a"),
        lambda: mirror.list(),
    ):
        with pytest.raises(UsageError, match="read-only"):
            call()
    assert answers.asked == []


@pytest.mark.parametrize(
    ("status", "expected"), [(401, AccessError), (403, AccessError), (405, StoreError), (502, UnavailableError)]
)
def test_what_it_answers_instead(status: int, expected: type[StoreError], mirror: HttpBucket, answers: Answers) -> None:
    answers.reply = lambda asked: Answer(status, b"<html>a page of its own</html>")
    for call in (lambda: mirror.get("objects/a"), lambda: mirror.stat("objects/a")):
        with pytest.raises(StoreError) as caught:
            call()
        assert type(caught.value) is expected


def test_a_server_that_knows_no_ranges(mirror: HttpBucket, answers: Answers) -> None:
    answers.reply = lambda asked: Answer(200, DATA)
    assert mirror.get("objects/a") == DATA
    with pytest.raises(StoreError, match=r"[Rr]ange"):
        mirror.get_range("objects/a", 1, 5)
