"""Secrets are planted, and looked for in everything that is shown, logged or written."""

import contextlib
import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.security.canaries import Canaries
from tests.support.web import Site
from trainer_side import Publisher
from vllm_delta_sync import admin_token, cli
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.entrypoints import serve_command
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.notice import curve
from vllm_delta_sync.settings import load_settings
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust import keys as key_files

COMMANDS = sorted(cli.build_parser().commands)


@pytest.fixture
def canaries(tmp_path: Path) -> Canaries:
    return Canaries(tmp_path / "secrets")


def test_they_are_found_where_they_are(canaries: Canaries) -> None:
    for secret in canaries.texts.values():
        assert canaries.in_text(f"x{secret}y")
        assert canaries.in_text(json.dumps({"a": secret}))
        assert canaries.in_text(repr({"a": secret}))
    assert "signing key, PEM without its head" in canaries.in_bytes(canaries.signing_key.read_bytes())
    assert canaries.in_bytes(canaries.raw) == ["signing key, bytes"]
    assert canaries.in_text(canaries.url)


def receiving(canaries: Canaries) -> dict[str, Any]:
    """Settings of a receiver that uses every secret it can."""
    return {
        "trusted_keys": f"{canaries.signing_key}.pub",
        "state_dir": canaries.signing_key.parent / "state",
        "notice_key": canaries.notice_key,
        "notice_server_key": Path(f"{canaries.server_key}.pub"),
        "admin_token_file": canaries.token_file,
    }


def publishing(canaries: Canaries) -> dict[str, Any]:
    return {
        "signing_key": canaries.signing_key,
        "notice_key": canaries.server_key,
        "notice_allowed": Path(f"{canaries.notice_key}.pub"),
    }


def test_publisher_and_receiver(tmp_path: Path, canaries: Canaries, caplog: pytest.LogCaptureFixture) -> None:
    """A signed run with encrypted notices, at the most talkative level: log, status, answers, repr, and the bucket."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.WARNING, "numba")
    (tmp_path / "site").mkdir()
    site = Site(tmp_path / "site", publishing(canaries), poll_seconds=0.1, **receiving(canaries))
    try:
        site.app.state.delta_sync_token = site.settings.admin_token({})
        site.serve()
        site.publish(1)
        client = site.client()
        right = {"Authorization": "Bearer " + canaries.token_file.read_text().strip()}
        answers = [
            client.get("/delta_sync/wait", params={"version": 1, "timeout": 120}),
            client.get("/delta_sync/status"),
            client.get("/openapi.json"),
            client.post("/delta_sync/hold", headers=right),
            client.post("/delta_sync/hold", headers={"Authorization": right["Authorization"] + "x"}),
            client.post("/delta_sync/sync", headers=right, json={"version": 9}),
            client.post("/delta_sync/sync", headers=right, json={canaries.url: canaries.token}),
            client.post("/delta_sync/verify", headers=right),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 401, 404, 400, 200]
        for answer in answers:
            assert canaries.in_text(answer.text + str(answer.headers)) == []
        shown = [
            repr(thing)
            for thing in (
                site.publisher,
                vars(site.publisher),
                site.settings,
                site.settings.admin_token({}),
                site.service,
                vars(site.service),
                site.app.state._state,
                Keyring.load(None, canaries.signing_key),
                curve.load_secret(canaries.notice_key),
            )
        ]
        assert canaries.in_text("\n".join(shown)) == []
    finally:
        site.end()
    assert canaries.in_text(caplog.text) == []
    own = canaries.signing_key.parent
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != own]
    assert len(written) > 5
    for path in written:
        assert canaries.in_bytes(path.read_bytes()) == [], path


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(
    tmp_path: Path,
    canaries: Canaries,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    as_json: bool,
) -> None:
    """Every command, asked for a bucket whose URL holds secrets, with the others in its environment."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv(admin_token.VARIABLE, canaries.token)
    monkeypatch.setenv("DELTA_SYNC_BUCKET", canaries.url)
    url = canaries.url
    lines = [["--help"], [], ["--bucket", url], [url, "--bucket", url], [f"--bucket={url}", f"--nonsense={url}"]]
    lines += [["--bucket", url, "--trusted-keys", str(canaries.signing_key)]]
    if command == "serve":
        lines = [[*line, "--dry-run"] for line in (["model"], ["model", "--bucket", url], ["--help"])]
    for line in lines:
        # --help ends the program.
        with contextlib.suppress(SystemExit):
            cli.run([*command.split(), *line, *(["--json"] if as_json else [])])
    out, err = capsys.readouterr()
    assert canaries.in_text(out + err) == []
    assert out or err


def test_tracebacks(canaries: Canaries) -> None:
    """What somebody sees who uses our parts and catches nothing."""
    secret_file = str(canaries.signing_key)
    calls: list[Callable[[], Any]] = [
        lambda: open_run(canaries.url),
        lambda: open_bucket(canaries.url),
        lambda: Publisher([], bucket=canaries.url),
        lambda: load_settings({"target": f"x {canaries.url}"}, {"DELTA_SYNC_BUCKET": canaries.url}),
        lambda: load_settings(environment={"DELTA_SYNC_BUCKET": canaries.url, admin_token.VARIABLE: canaries.token}),
        lambda: load_settings({"bucket": "/x", "notice": canaries.url}, {}),
        lambda: load_settings({"bucket": "/x", "poll_seconds": canaries.url}, {}),
        lambda: load_settings({"bucket": "/x", "token": canaries.token}, {}),
        lambda: load_settings({"bucket": "/x", "admin_token_file": str(canaries.token_file)}, {}).admin_token(
            {admin_token.VARIABLE: canaries.token}
        ),
        lambda: serve_command.serve_command("model", {"bucket": "/x", "notice": canaries.url}, []),
        # Secrets in the wrong place.
        lambda: Keyring.load(secret_file),
        lambda: Keyring.load(str(canaries.notice_key)),
        lambda: Keyring.load(str(canaries.token_file)),
        lambda: Keyring.load(None, canaries.notice_key),
        lambda: Keyring.load(None, canaries.token_file),
        lambda: key_files.load_public(canaries.signing_key),
        lambda: curve.load_public(canaries.notice_key),
        lambda: curve.load_secret(canaries.signing_key),
        lambda: curve.load_secret(canaries.token_file),
        lambda: admin_token.load(canaries.signing_key, {}),
        lambda: load_settings(environment={"DELTA_SYNC_CONFIG": secret_file}),
        lambda: load_settings(environment={"DELTA_SYNC_CONFIG": str(canaries.notice_key)}),
        lambda: load_settings(environment={"DELTA_SYNC_CONFIG": str(canaries.token_file)}),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(DeltaSyncError) as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        assert canaries.in_text(shown) == [], number
