"""Credentials in texts: what is taken out, and what is left for people to read."""

import ast
import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import StoreError, UsageError
from vllm_delta_sync.logs import REMOVED, guarded_logger, public_url, redact


@pytest.mark.parametrize(
    "text",
    [
        "cannot read s3://key:hidden@store.example/run: 403",
        "bucket URL 's3://AKIAABCDEFGHIJKLMNOP:hid/den+hidden@store.example/run' is refused",
        "s3://user:p@ss:hidden@store.example/run",
        "s3://user:hid'den@store.example/run",
        "https://store.example/a?X-Amz-Signature=hidden&X-Amz-Date=1",
        "https://store.example/a?sv=1&sig=hidden%3D",
        "GET https://store.example/a#access_token=hidden",
        "failed: X-Amz-Signature=hidden12 is too old",
        "x-amz-security-token: hidden123",
        "{'aws_secret_access_key': 'hidden123'}",
        '{"password": "hidden123"}',
        "Authorization: Bearer hidden123",
        "authorization='Basic hidden123'",
        "token=hidden123, next",
        "DELTA_SYNC_ADMIN_TOKEN=hidden123",
        "AWS_SESSION_TOKEN=hidden123",
        "MY_PASSWORD: 'hidden'",
        "azure AccountKey=hidden123==;",
        "X-Api-Key: hidden",
        "x-auth-token:hidden",
        "registry_key='hidden'",
        "Authorization: Token hidden",
        "Authorization: hidden123",
        "authorization: AWS4-HMAC-SHA256 Credential=hidden/2026, Signature=hidden",
        "password: hidden",
        "  passwd:hidden",
        "token: hidden123",
        "client-secret: hidden",
        "https://store.example/a;token=hidden",
        "gh ghp_hiddenhiddenhiddenhidden",
        "github_pat_11hidden_hiddenhiddenhidden and hf_hiddenhiddenhiddenhidden",
        "[('Authorization', 'Basic hidden123'), (b'x-api-key', b'hidden123')]",
        "Set-Cookie: sid=hidden123; Path=/",
        "publish --admin-token hidden123 s3://bucket/run",
        'password=\'two hidden words\' and "secret": "two hidden words"',
        "<Code>ExpiredToken</Code><Token-0>hidden123</Token-0><SecretAccessKey>hidden123</SecretAccessKey>",
        "<SignatureProvided>hidden123</SignatureProvided>",
        "gs: ya29.hiddenhiddenhiddenhidden and AIzahiddenhiddenhiddenhiddenhiddenhidden",
        "xet: eyJhiddenhiddenhidden.hiddenhidden.hiddenhidden has expired",
        "-----BEGIN PRIVATE KEY-----\nhidden\n-----END PRIVATE KEY-----\n",
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nhidden cut off",
    ],
)
def test_taken_out(text: str) -> None:
    shown = redact(text)
    for part in ("hid", "hidden", "den"):
        assert part not in shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "bucket URL 's3://bucket/run@2024' has the unknown scheme 's3'",
        "http://127.0.0.1:8000/a is not a bucket",
        "hf://buckets/name/bucket/run@main",
        "tensor 'model.token:embedding.weight' has another shape",
        "signature: of key 5a1c is wrong",
        "the admin token is missing or wrong; send Authorization: Bearer TOKEN",
        "version 7 has 5 = 2 + 3 objects; ask who@example.com",
        "file:///data/run, and /data/run?x=1",
        "signing_key '/data/trainer.key': it holds no private key",
        "signing_key: /data/trainer.key, notice_key='/data/notice.key', notice_server_key=/data/server.key",
        "versions/0000000004.json is signed by key ab12cd34ab12cd34, which is not trusted",
        "key: ab12cd34ab12cd34, trusted_keys=/data/a.pub,/data/b.pub",
        "public_key=ab12cd34ab12cd34 of monkey=business",
        "the token: whoever has it may do this",
        "delta-sync publish --signing-key /data/trainer.key --admin-token-file /data/token --trusted-keys /data/a.pub",
        "<Code>NoSuchKey</Code><Key>run/head.json</Key>",
    ],
)
def test_left(text: str) -> None:
    assert redact(text) == text


def messages() -> Iterator[str]:
    """Every text in our sources that is raised or logged, with likely values in it."""
    root = Path(__file__).parents[2]
    for file in [*(root / "vllm_delta_sync").rglob("*.py"), *(root / "trainer_side").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            logs = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger.")
            makes = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("Error", "Refused", "Request"))
            for part in ast.walk(node) if logs or makes or isinstance(node, ast.Raise) else ():
                if isinstance(part, ast.JoinedStr):
                    for value in ("ab12cd34ab12cd34", "'/data/some/trainer.key'", "1234567"):
                        pieces = [piece.value if isinstance(piece, ast.Constant) else value for piece in part.values]
                        yield "".join(map(str, pieces))
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_messages_of_ours_are_left() -> None:
    found = list(messages())
    assert len(found) > 1500
    assert [text for text in found if redact(text) != text] == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@store.example:9000/run?sig=1#x", "s3://store.example:9000/run"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("/data/what?is#this", "/data/what?is#this"),
        ("file:///data/run", "file:///data/run"),
        ("relative/run", "relative/run"),
    ],
)
def test_public_url(url: str, shown: str) -> None:
    assert public_url(url) == shown


def test_every_error_of_ours() -> None:
    error = StoreError("https://key:hidden@store.example/a?sig=hidden")
    assert "hidden" not in str(error) + repr(error) + error.message
    assert error.message == f"https://store.example/a?{REMOVED}"
    assert UsageError().message == "usage"


def test_what_is_logged() -> None:
    """Arguments, and the tracebacks of other people's errors."""
    logger = guarded_logger("tests.redaction")
    assert guarded_logger("tests.redaction") is logger
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        logger.error("%s and %d", "s3://key:hidden@store.example/run", 5)
        try:
            raise ValueError("GET https://store.example/?sig=hidden")
        except ValueError:
            logger.exception("failed")
    finally:
        logger.removeHandler(handler)
    shown = stream.getvalue()
    assert "s3://store.example/run and 5" in shown
    assert "ValueError: GET https://store.example/" in shown
    assert "hidden" not in shown
    assert len(logger.filters) == 1


@pytest.mark.parametrize(
    "part",
    [
        *("a", "a://", "a://b:c", "token", "x:/?", "bearer ", "secret", "=", "'", "@", "-----", "a-key:", "_key"),
        *("token: ", "authorization: a ", "gh", "--token ", "cookie: ", "token>", "token', '", "eyJ", "eyJaaaaaaaaaa."),
        *("ya29.", "token-"),
    ],
)
def test_hostile_text_costs_little(part: str) -> None:
    text = part * (50_000 // len(part)) + "://"
    began = time.process_time()
    redact(text)
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "url", ["s3://key:hidden@bucket/run", "hf://buckets/a/b?token=hidden", "gs://bucket/run#hidden"]
)
def test_bucket_url_that_holds_credentials(url: str) -> None:
    """What is shown and written into branches may not."""
    with pytest.raises(UsageError, match="give credentials in the environment") as caught:
        open_bucket(url)
    assert "hidden" not in caught.value.message
