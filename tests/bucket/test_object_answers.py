"""What a store's answers must not become: credentials in a traceback, or somebody else's object where nobody asked."""

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.answers import Answer, Answers, Asked, answering
from tests.support.clouds import KEYS, far_from_clouds, opened
from vllm_delta_sync.errors import ConflictError, StoreError

TOKEN = "ya29.a-token-of-somebody"
SIGNATURE = "SASsignature%3D"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    far_from_clouds(monkeypatch, tmp_path)
    given = {
        "GOOGLE_BEARER_TOKEN": TOKEN,
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_TOKEN": f"sv=2020&sig={SIGNATURE}&se=2030",
    }
    for name, value in {**KEYS, **given}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def answers() -> Iterator[Answers]:
    with answering() as server:
        yield server


def repeated(asked: Asked) -> Answer:
    """A refusal by something in between, with all that it was asked."""
    return Answer(403, f"refused: {asked.method} {asked.path} {asked.headers}".encode())


@pytest.mark.parametrize("url", ["gs://bucket/run", "az://bucket/run"])
@pytest.mark.parametrize("action", ["get", "put", "list"])
def test_what_a_store_repeats_of_a_request_is_in_no_traceback(url: str, action: str, answers: Answers) -> None:
    answers.reply = repeated
    bucket = opened(url, answers.url)
    with pytest.raises(StoreError) as caught:
        {"get": lambda: bucket.get("a"), "put": lambda: bucket.put("a", b""), "list": lambda: list(bucket.list())}[
            action
        ]()
    text = "".join(traceback.format_exception(caught.value))
    assert "refused:" in text
    assert TOKEN not in text
    assert SIGNATURE not in text


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "az://bucket/run"])
def test_409_is_no_conflict_for_a_put_that_overwrites(url: str, answers: Answers) -> None:
    body = b"<?xml version='1.0'?><Error><Code>LeaseIdMissing</Code><Message>there is a lease</Message></Error>"
    answers.reply = lambda asked: Answer(409 if asked.method == "PUT" else 404, body)
    bucket = opened(url, answers.url)
    with pytest.raises(StoreError, match=r"409.*LeaseIdMissing"):
        bucket.put("HEAD.json", b"")
    with pytest.raises(ConflictError):
        bucket.put("versions/1", b"", if_absent=True)
