"""What a store's refusals become: one error of the project's each, which says what to do."""

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.answers import Answer, Answers, Asked, closed_port, in_pieces, silent, untrusted
from tests.support.clouds import ANYBODY, KEYS, SECRET, far_from_clouds, opened
from vllm_delta_sync.bucket import Bucket, StoreOptions
from vllm_delta_sync.bucket.middleware.retry import RetryingBucket
from vllm_delta_sync.bucket.middleware.usage import StoreUsage
from vllm_delta_sync.bucket.obstore_clients import PART_BYTES
from vllm_delta_sync.bucket.obstore_errors import FailedRequest, translate_error
from vllm_delta_sync.errors import (
    AccessError,
    ConflictError,
    DeltaSyncError,
    NotFoundError,
    StoreError,
    UnavailableError,
)

URL = "s3://bucket/run"
UPLOAD_BEGUN = b"<InitiateMultipartUploadResult><UploadId>one</UploadId></InitiateMultipartUploadResult>"
DETAIL = "<AuthenticationErrorDetail>{}</AuthenticationErrorDetail>"
GOOGLE = "Generic GCS error: Error performing token request: Error performing POST https://accounts.google.com/token"
AWS = "Generic S3 error: Error performing POST REDACTED"
REVOKED = (
    AccessError,
    "were refused, the answer was 400 Bad Request (Token has been revoked.); renew them, or set GOOGLE",
)
EXPIRED = AccessError, "were refused, the answer was 400 Bad Request (ExpiredTokenException: over); renew them"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    far_from_clouds(monkeypatch, tmp_path_factory.getbasetemp())
    for name, value in {**ANYBODY, **KEYS}.items():
        if name != "AWS_SKIP_SIGNATURE":
            monkeypatch.setenv(name, value)


def refusing(status: int, code: str = "") -> Callable[[Asked], Answer]:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as said</Message></Error>" if code else ""
    return lambda asked: Answer(status, body.encode())


def calls(bucket: Bucket) -> dict[str, Callable[[], object]]:
    return {
        "get": lambda: bucket.get("a/key"),
        "get_range": lambda: bucket.get_range("a/key", 0, 5),
        "put": lambda: bucket.put("a/key", b"x"),
        "create": lambda: bucket.put("a/key", b"x", if_absent=True),
        "delete": lambda: bucket.delete("a/key"),
        "list": lambda: list(bucket.list("a/")),
        # Last: an answer to it has no body, so there is no code in it.
        "stat": lambda: bucket.stat("a/key"),
    }


@pytest.mark.parametrize(
    ("status", "code", "expected", "remedy"),
    [
        (400, "Foo", StoreError, "check the bucket URL"),
        (400, "ExpiredToken", AccessError, "new credentials"),
        (400, "AuthorizationHeaderMalformed", StoreError, "AWS_REGION"),
        (400, "RequestTimeout", UnavailableError, "try again"),
        (401, "", AccessError, "check"),
        (403, "AccessDenied", AccessError, "s3:PutObject"),
        (403, "RequestTimeTooSkewed", AccessError, "clock"),
        (403, "InvalidObjectState", StoreError, "lifecycle rule"),
        (408, "", UnavailableError, "try again"),
        (425, "", UnavailableError, "try again"),
        (429, "", UnavailableError, "try again"),
        (500, "InternalError", UnavailableError, "try again"),
        (501, "NotImplemented", StoreError, "If-None-Match"),
        (502, "", UnavailableError, "try again"),
        (503, "SlowDown", UnavailableError, "try again"),
        (504, "", UnavailableError, "try again"),
        (507, "", StoreError, "free some space"),
    ],
)
def test_refusals(status: int, code: str, expected: type[DeltaSyncError], remedy: str, answers: Answers) -> None:
    answers.reply = refusing(status, code)
    for name, call in calls(opened(URL, answers.url)).items():
        with pytest.raises(StoreError) as caught:
            call()
        message = caught.value.message
        if name != "stat" or not code:
            assert type(caught.value) is expected, name
            assert remedy in message, name
        assert URL in message
        assert "a/" in message
        assert SECRET not in message
        assert "\n" not in message
        assert len(message) < 500


@pytest.mark.parametrize("status", [403, 407, 503])
def test_proxy_that_may_have_answered_is_named(status: int, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is set for the world outside, and knows no store of this site."""
    monkeypatch.setenv("HTTP_PROXY", answers.url)
    monkeypatch.setenv("http_proxy", answers.url)
    answers.reply = lambda asked: Answer(status, b"<html>blocked</html>")
    with pytest.raises(StoreError, match=r"a proxy may have been asked \(HTTP_PROXY, HTTPS_PROXY; NO_PROXY "):
        opened(URL, "http://store.example:9000").get("a/key")
    answers.reply = refusing(status, "AccessDenied")
    with pytest.raises(StoreError) as caught:
        opened(URL, answers.url).get("a/key")
    assert "PROXY" not in caught.value.message, "it is the store that answers so"
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name)
    answers.reply = refusing(status)
    with pytest.raises(StoreError) as caught:
        opened(URL, answers.url).get("a/key")
    assert "PROXY" not in caught.value.message


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run"])
def test_refusal_of_a_request_whose_answer_has_no_body(url: str, answers: Answers) -> None:
    """S3 refuses expired credentials with status 400, and its answer to HEAD has no code."""
    answers.reply = refusing(400)
    with pytest.raises(StoreError, match="expired, or set AWS_REGION" if url[0] == "s" else "bucket URL") as caught:
        opened(url, answers.url).stat("key")
    assert isinstance(caught.value, AccessError) == (url[0] == "s")


@pytest.mark.parametrize(
    ("detail", "remedy"),
    [
        ("Signature not valid in the specified time frame: Start [a] - Expiry [b] - Current [c]", "new credentials"),
        ("Request date header too old: 'Mon, 23 Nov 2026 02:46:43 GMT'", "set the clock"),
        ("The MAC signature found in the HTTP request 'A2Fz' is not the same as", "Storage Blob Data Contributor"),
    ],
)
def test_azure_says_in_a_detail_what_is_wrong(detail: str, remedy: str, answers: Answers) -> None:
    body = f"<Error><Code>AuthenticationFailed</Code><Message>Make sure that</Message>{DETAIL.format(detail)}</Error>"
    answers.reply = lambda asked: Answer(403, body.encode())
    with pytest.raises(AccessError, match=remedy) as caught:
        opened("az://bucket/run", answers.url).get("key")
    assert detail.partition("'")[0].strip() in caught.value.message
    assert "A2Fz" not in caught.value.message


@pytest.mark.parametrize(
    ("scheme", "request_", "status", "body", "expected", "remedy"),
    [
        ("gs", GOOGLE, 400, '{"error": "invalid_grant", "error_description": "Token has been revoked."}', *REVOKED),
        ("s3", AWS, 400, "<Error><Code>ExpiredTokenException</Code><Message>over</Message></Error>", *EXPIRED),
        ("s3", AWS, 400, "<Error><Code>Throttling</Code></Error>", UnavailableError, "could not be renewed"),
        ("gs", GOOGLE, 503, "", UnavailableError, "could not be renewed"),
    ],
)
def test_service_that_refuses_to_give_credentials(
    scheme: str, request_: str, status: int, body: str, expected: type[StoreError], remedy: str
) -> None:
    """As obstore 0.12.1 says it of services that a test cannot stand in for."""
    answered = f"{request_} in 60ms - Server returned non-2xx status code: {status} Bad Request: {body}"
    found = translate_error(ValueError(answered), FailedRequest("read key 'a'", "a", f"{scheme}://b/run", scheme))
    assert type(found) is expected
    assert remedy in found.message


def test_host_without_an_address_is_named() -> None:
    """As after a typing error in an account or a region. This is how obstore 0.12.1 says it."""
    error = ValueError(
        "Generic MicrosoftAzure error: Error performing GET https://acount.blob.core.windows.net/c/run/k in 4ms - HTTP "
        'error: error sending request\n\nDebug source:\nkind: Connect, ConnectError("dns error", Custom { "failed'
    )
    found = translate_error(error, FailedRequest("read key 'k'", "k", "az://c/run", "az"))
    assert type(found) is UnavailableError
    assert (
        "acount.blob.core.windows.net has no address; try again, and check the network, store_endpoint" in found.message
    )


@pytest.mark.parametrize(
    ("scheme", "remedy"), [("gs", "Storage Object Admin"), ("az", "Storage Blob Data Contributor")]
)
def test_refusals_by_other_clouds(scheme: str, remedy: str, answers: Answers) -> None:
    bucket = opened(f"{scheme}://bucket/run", answers.url)
    answers.reply = refusing(403, "AuthorizationFailure")
    with pytest.raises(AccessError, match=remedy):
        bucket.get("key")
    answers.reply = refusing(503, "ServerBusy")
    with pytest.raises(UnavailableError):
        bucket.get("key")
    if scheme == "az":
        answers.reply = refusing(409, "BlobArchived")
        with pytest.raises(StoreError, match="lifecycle rule"):
            bucket.get("key")
    answers.reply = refusing(404, "ContainerNotFound")
    with pytest.raises(NotFoundError, match="does not exist"):
        bucket.get("key")
    assert list(bucket.list()) == []
    answers.reply = refusing(*((409, "BlobAlreadyExists") if scheme == "az" else (412, "PreconditionFailed")))
    with pytest.raises(ConflictError, match=r"key.*exists already"):
        bucket.put("key", b"x", if_absent=True)
    condition = {"az": ("if-none-match", "*"), "gs": ("x-goog-if-generation-match", "0")}[scheme]
    assert condition in answers.asked[-1].headers.items()


def test_a_failed_request_is_sent_once(answers: Answers) -> None:
    bucket = opened(URL, answers.url)
    answers.reply = refusing(503)
    for name, call in calls(bucket).items():
        answers.asked.clear()
        with pytest.raises(UnavailableError):
            call()
        # A put looks the key up first.
        sent = Counter(asked.method for asked in answers.asked)
        assert set(sent.values()) == {1}, name
        assert set(sent) <= {"HEAD", "PUT"} or len(sent) == 1, name


PART = Answer(200, b"", {"ETag": '"e"'})


def upload(answers: Answers, folder: Path, *completions: Answer, parts: tuple[Answer, ...] = (PART,)) -> None:
    """Put a file in two parts. The last answer of each kind is given again and again."""
    left = {"PUT": [*parts], "POST": [*completions], "DELETE": [Answer(204)]}

    def reply(asked: Asked) -> Answer:
        if asked.path.endswith("?uploads="):
            return Answer(200, UPLOAD_BEGUN)
        given = left.get(asked.method, [Answer(404)])
        return given.pop(0) if len(given) > 1 else given[0]

    (folder / "source").write_bytes(bytes(2 * PART_BYTES))
    answers.reply = reply
    opened(URL, answers.url).put("key", folder / "source")


def test_a_part_of_an_upload_is_sent_again(answers: Answers, tmp_path: Path) -> None:
    done = Answer(200, b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")
    upload(answers, tmp_path, done, parts=(Answer(503), Answer(503), PART))
    assert sum(asked.method == "PUT" for asked in answers.asked) == 4


def test_a_completion_whose_answer_was_lost_is_tried_again(answers: Answers, tmp_path: Path) -> None:
    """obstore asks to complete the upload again, and there is none by then. No bucket has to be created for that."""
    with pytest.raises(UnavailableError, match="NoSuchUpload"):
        upload(answers, tmp_path, Answer(503), Answer(404, b"<Error><Code>NoSuchUpload</Code></Error>"))
    assert sum(asked.method == "POST" for asked in answers.asked) == 1 + 2


def test_a_completion_that_succeeds_with_an_error_is_tried_again(answers: Answers, tmp_path: Path) -> None:
    """S3 sends the status before it has joined the parts, and may fail at that. Its client asks a few times at once."""
    error = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
    with pytest.raises(UnavailableError, match=r"answered InternalError: We encountered an internal error\."):
        upload(answers, tmp_path, Answer(200, error))


def test_two_writers_at_one_moment_are_no_conflict_yet(answers: Answers) -> None:
    """S3 says so when it cannot tell yet who was first: the object may end up not being there."""
    answers.reply = refusing(409, "ConditionalRequestConflict")
    with pytest.raises(UnavailableError):
        opened(URL, answers.url).put("key", b"x", if_absent=True)


def test_nobody_there_and_nobody_answering() -> None:
    with silent() as nobody:
        for endpoint, cause in ((f"http://127.0.0.1:{closed_port()}", "no connection"), (nobody, "no answer in time")):
            # Its name is in what the client says.
            made = calls(opened("s3://certificates/run", endpoint, deadline=1))
            for name in ("get", "create", "list"):
                with pytest.raises(UnavailableError, match=cause):
                    made[name]()


def test_certificate_that_is_not_trusted_is_named(tmp_path: Path) -> None:
    with untrusted(tmp_path) as url, pytest.raises(StoreError, match="private CA, set SSL_CERT_FILE") as caught:
        opened(URL, url, deadline=5).get("key")
    assert type(caught.value) is StoreError


def test_a_transfer_that_is_cut_fails_whole(answers: Answers) -> None:
    data = bytes(range(256)) * 20_000
    left = [1]

    def reply(asked: Asked) -> Answer:
        whole = in_pieces(data, asked)
        if not left[0]:
            return whole
        left[0] -= 1
        return Answer(whole.status, whole.body, {**whole.headers, "Content-Length": str(len(whole.body))}, cut=70_000)

    answers.reply = reply
    bucket = opened(URL, answers.url)
    for call in (lambda: bucket.get("key"), lambda: bucket.get_range("key", 5, 1 << 20)):
        left[0] = 1
        with pytest.raises(UnavailableError):
            call()
    left[0] = 1
    tried = RetryingBucket(bucket, StoreOptions(), StoreUsage())
    assert tried.get("key") == data


TOKEN = "ya29.a-token-of-somebody"
SIGNATURE = "SASsignature%3D"


# What answers must not become: credentials in a traceback, or somebody else's object where nobody asked


@pytest.fixture
def signed(environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With credentials for each kind of store."""
    far_from_clouds(monkeypatch, tmp_path)
    given = {
        "GOOGLE_BEARER_TOKEN": TOKEN,
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_TOKEN": f"sv=2020&sig={SIGNATURE}&se=2030",
    }
    for name, value in {**KEYS, **given}.items():
        monkeypatch.setenv(name, value)


def repeated(asked: Asked) -> Answer:
    """A refusal by something in between, with all that it was asked."""
    return Answer(403, f"refused: {asked.method} {asked.path} {asked.headers}".encode())


@pytest.mark.usefixtures("signed")
@pytest.mark.parametrize("url", ["gs://bucket/run", "az://bucket/run"])
@pytest.mark.parametrize("action", ["get", "put", "list"])
def test_what_a_store_repeats_of_a_request_is_in_no_traceback(url: str, action: str, answers: Answers) -> None:
    answers.reply = repeated
    bucket = opened(url, answers.url)
    with pytest.raises(StoreError) as caught:
        calls(bucket)[action]()
    text = "".join(traceback.format_exception(caught.value))
    assert "refused:" in text
    assert TOKEN not in text
    assert SIGNATURE not in text


@pytest.mark.usefixtures("signed")
@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "az://bucket/run"])
def test_409_is_no_conflict_for_a_put_that_overwrites(url: str, answers: Answers) -> None:
    body = b"<?xml version='1.0'?><Error><Code>LeaseIdMissing</Code><Message>there is a heartbeat</Message></Error>"
    answers.reply = lambda asked: Answer(409 if asked.method == "PUT" else 404, body)
    bucket = opened(url, answers.url)
    with pytest.raises(StoreError, match=r"409.*LeaseIdMissing"):
        bucket.put("HEAD.json", b"")
    with pytest.raises(ConflictError):
        bucket.put("versions/1", b"", if_absent=True)
