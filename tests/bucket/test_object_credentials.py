"""Where credentials for object stores come from, when they are renewed, and what happens without them."""

import errno
import json
import os
import pwd
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest

from tests.support.answers import Answer, Answers, Asked, in_pieces, silent
from tests.support.clouds import KEYS, SECRET, far_from_clouds, opened
from tests.support.stores import s3_server
from vllm_delta_sync.bucket import obstore_clients
from vllm_delta_sync.errors import AccessError, StoreError, UnavailableError, UsageError


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    far_from_clouds(monkeypatch, tmp_path)


def key_of(asked: Asked) -> str:
    """Which access key signed a request."""
    return asked.headers.get("authorization", "Credential=none/").partition("Credential=")[2].partition("/")[0]


class Role:
    """Gives short-lived credentials as a container's agent does, and is the store that knows which are good."""

    def __init__(self, server: Answers, seconds: float) -> None:
        self.seconds = seconds
        self.given, self.good = 0, ""
        server.reply = self.answer

    def answer(self, asked: Asked) -> Answer:
        if asked.path == "/role":
            self.given += 1
            self.good = f"KEY{self.given}"
            until = datetime.now(UTC) + timedelta(seconds=self.seconds)
            given = {"AccessKeyId": self.good, "SecretAccessKey": "s", "Token": "t", "Expiration": until.isoformat()}
            return Answer(200, json.dumps(given).encode())
        if key_of(asked) != self.good:
            return Answer(400, b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>")
        return in_pieces(b"what is there", asked)


@pytest.fixture
def contained(answers: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a container whose agent is at loopback."""
    (tmp_path / "token").write_text("of-the-container")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{answers.url}/role")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))


@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize("home", ["none", "of another user"])
def test_role_needs_no_home(home: str, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a user that its image does not know."""

    def unknown(user: int) -> NoReturn:
        raise KeyError(f"uid not found: {user}")

    def not_entered(path: object, **options: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    Role(answers, seconds=3600)
    with monkeypatch.context() as there:
        if home == "none":
            there.delenv("HOME")
            there.setattr(pwd, "getpwuid", unknown)
        else:
            there.setattr(os, "stat", not_entered)
        bucket = opened("s3://bucket/run", answers.url)
    assert bucket.get("key") == b"what is there"


@pytest.mark.usefixtures("contained")
def test_credentials_of_a_role_are_renewed(answers: Answers) -> None:
    Role(answers, seconds=60)
    bucket = opened("s3://bucket/run", answers.url)
    for _ in range(4):
        # Those that run out within five minutes are renewed before each use, at most every 100 ms.
        time.sleep(0.15)
        assert bucket.get("key") == b"what is there"
    signed = [key_of(asked) for asked in answers.asked if asked.path != "/role"]
    assert signed == ["KEY1", "KEY2", "KEY3", "KEY4"]
    assert {asked.headers["authorization"] for asked in answers.asked if asked.path == "/role"} == {"of-the-container"}


def test_credentials_that_ran_out_are_an_access_error(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    Role(answers, seconds=60)
    with pytest.raises(AccessError, match="get new credentials") as caught:
        opened("s3://bucket/run", answers.url).get("key")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(("status", "expected"), [(404, AccessError), (403, AccessError), (500, UnavailableError)])
@pytest.mark.usefixtures("contained")
def test_a_role_that_gives_none(status: int, expected: type[StoreError], answers: Answers) -> None:
    answers.reply = lambda asked: Answer(status)
    with pytest.raises(expected, match="credentials") as caught:
        opened("s3://bucket/run", answers.url).get("key")
    assert type(caught.value) is expected
    assert {asked.path for asked in answers.asked} == {"/role"}


def test_a_role_without_a_token_file_is_left_to_boto3(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{answers.url}/role")
    Role(answers, seconds=3600)
    assert opened("s3://bucket/run", answers.url).get("key") == b"what is there"
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match="AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        opened("s3://bucket/run", answers.url)


@pytest.mark.parametrize(("scheme", "how"), [("s3", "silent"), ("gs", "closed"), ("az", "closed")])
def test_no_credentials_at_all(scheme: str, how: str, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    remedy = {"s3": "AWS_ACCESS_KEY_ID", "gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_STORAGE_ACCOUNT_KEY"}
    with silent() as nobody:
        if how == "silent":
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", nobody)
            monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"{nobody}/metadata/identity/oauth2/token")
            for name in ("HTTP_PROXY", "http_proxy"):
                monkeypatch.setenv(name, nobody)
        bucket = opened(f"{scheme}://bucket/run", answers.url, deadline=1)
        began = time.monotonic()
        for call in (lambda: bucket.get("key"), lambda: bucket.put("key", b"x", if_absent=True)):
            with pytest.raises(AccessError, match=remedy[scheme]):
                call()
        assert time.monotonic() - began < 120
    assert answers.asked == []


def test_metadata_that_answer_with_a_failure_are_asked_again(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request of a machine with a role: its service exists, and is only busy."""
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", answers.url)
    answers.reply = lambda asked: Answer(503)
    with pytest.raises(StoreError, match="credentials") as caught:
        opened("s3://bucket/run", answers.url).get("key")
    assert type(caught.value) is UnavailableError


def test_a_profile_is_read_by_boto3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = s3_server()
    url = f"{server.create_bucket('unit-profile')}/run"
    file = tmp_path / "credentials"
    file.write_text(
        f"[trainer]\naws_access_key_id={server.access_key}\naws_secret_access_key={server.secret_key}\n"
        "[default]\naws_access_key_id=other\naws_secret_access_key=other\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "trainer")
    bucket = opened(url, server.endpoint)
    bucket.put("key", b"x")
    assert bucket.get("key") == b"x"
    monkeypatch.delenv("AWS_PROFILE")
    with pytest.raises(AccessError, match="InvalidAccessKeyId"):
        opened(url, server.endpoint).put("key", b"x")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UsageError, match="nobody"):
        opened(url)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match="pip install boto3"):
        opened(url)


def test_file_that_is_in_the_middle_of_a_change_ends_nothing(
    answers: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What follows a run for days goes on after errors of the store, and ends after those of how it was called."""
    monkeypatch.setattr(obstore_clients, "RENEW_SECONDS", 0.0)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "trainer")
    file.write_text("[trainer]\naws_access_key_id=KEY0\naws_secret_access_key=s\n")
    role = Role(answers, seconds=60)
    role.good = "KEY1"
    bucket = opened("s3://bucket/run", answers.url)
    with pytest.raises(AccessError, match="expired"):
        bucket.get("key")
    file.write_text("")
    with pytest.raises(AccessError, match="trainer"):
        bucket.get("key")
    file.write_text("[trainer]\naws_access_key_id=KEY1\naws_secret_access_key=s\n")
    assert bucket.get("key") == b"what is there"
