"""What a server remembers of a run across restarts, and how old HEAD.json may be."""

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.chains import Chain
from tests.support.trusted import Trusted
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.planning import trusted_head as module
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.engine.staging.reconstruct import newest_good_manifest
from vllm_delta_sync.errors import ExpiredError, ForkError, ReplayError, SettingsError
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.settings import Settings, load_settings


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def expire(world: Trusted, moment: str) -> None:
    world.chain.expires_at = moment
    world.chain.head(len(world.chain.manifests) - 1)


def test_status_says_what_is_trusted_and_what_was_seen(tmp_path: Path) -> None:
    world = Trusted(tmp_path)
    key = (world.trainer.public or "")[:16]
    nothing = {"keys": [key], "last_seen": None, "expires_at": None, "expired": False}
    assert world.receiver.status()["trust"] == nothing
    world.serves(3)
    seen = {"run": world.chain.run, "version": 3}
    mark = {**seen, "manifest": world.chain.manifests[3].digest, "kept": True}
    expected = {**nothing, "last_seen": mark, "expires_at": world.chain.expires_at}
    assert world.receiver.status()["trust"] == expected
    # Without trusted keys nothing is kept.
    world.settings = {"state_dir": tmp_path / "unused"}
    world.start()
    world.serves(3)
    assert world.receiver.status()["trust"] is None
    assert not (tmp_path / "unused").exists()


def test_mark_is_kept_before_anything_is_committed(tmp_path: Path) -> None:
    """A crash in between must not make it forgotten; and it is not done while generation waits."""
    world = Trusted(tmp_path)
    seen: list[int] = []
    pause = world.server.port.pause

    def paused() -> None:
        seen.extend(json.loads(path.read_bytes())["version"] for path in (tmp_path / "state").glob("*.json"))
        pause()

    world.server.port.pause = paused  # type: ignore[method-assign]
    world.serves(3)
    assert seen == [3]


def test_rollback_is_no_replay(tmp_path: Path) -> None:
    world = Trusted(tmp_path, stage_bytes=0)
    world.serves(3)
    world.receiver.rollback(1)
    assert world.receiver.status()["trust"]["last_seen"]["version"] == 3
    world.receiver.release()
    world.chain.grow(1)
    world.serves(4)


def test_run_begun_anew_on_purpose(tmp_path: Path) -> None:
    """The message names the file; without it the next start follows the new run."""
    world = Trusted(tmp_path)
    world.serves(3)
    other = Chain(tmp_path, "other", seed=1, keyring=world.trainer)
    other.inside(other.fresh())
    other.grow(1)
    world.put(other.folder)
    message = world.refused("chain").message
    file = next((tmp_path / "state").glob("*.json"))
    assert str(file) in message
    file.unlink()
    world.refused("chain")
    world.chain.bits = other.bits
    world.start()
    world.serves(1)


@pytest.mark.parametrize("gone", [False, True], ids=["expired", "deleted"])
def test_head_that_has_run_out_is_shown(tmp_path: Path, gone: bool, caplog: pytest.LogCaptureFixture) -> None:
    world = Trusted(tmp_path)
    world.serves(3)
    if gone:
        (world.folder / keys.HEAD_KEY).unlink()
    else:
        expire(world, ago(61))
    with caplog.at_level(logging.WARNING, "vllm.delta_sync"):
        for _ in range(3):
            # Nothing new comes, and all the same it is noticed.
            world.receiver.advance()
    status = world.receiver.status()
    assert (status["last_error"]["kind"], status["trust"]["expired"]) == ("expired", True)
    if not gone:
        for words in ("HEAD.json expired at", "this machine's clock says", "or a clock is wrong"):
            assert words in status["last_error"]["message"]
    assert sum("HEAD.json" in record.message for record in caplog.records) == 1
    world.server.serves(3)
    world.chain.grow(1)
    if gone:
        (world.folder / keys.HEAD_KEY).unlink()
    world.receiver.advance()
    world.server.serves(4)
    assert world.receiver.status()["last_error"]["kind"] == "expired"
    expire(world, ago(-600))
    world.serves(4)
    assert not world.receiver.status()["trust"]["expired"]


def test_expiry_does_not_hide_another_error(tmp_path: Path) -> None:
    world = Trusted(tmp_path)
    world.serves(3)
    expire(world, ago(61))
    (world.folder / keys.version_key(4)).write_bytes(b"{}")
    world.refused("format")
    assert world.receiver.status()["trust"]["expired"]


def test_clocks_may_be_apart(tmp_path: Path) -> None:
    world = Trusted(tmp_path)
    expire(world, ago(module.CLOCK_LEEWAY.total_seconds() - 10))
    world.serves(3)
    # No later time exists, with or without leeway.
    expire(world, "9999-12-31T23:59:59.999999Z")
    world.serves(3)
    assert not world.receiver.status()["trust"]["expired"]


@pytest.mark.parametrize("gone", [False, True], ids=["expired", "deleted"])
def test_new_versions_are_refused_where_the_setting_says_so(tmp_path: Path, gone: bool) -> None:
    world = Trusted(tmp_path, expired_head="refuse")
    world.serves(3)
    world.chain.grow(1)
    if gone:
        (world.folder / keys.HEAD_KEY).unlink()
    else:
        expire(world, ago(61))
    world.refused("expired")
    world.receiver.hold()
    world.receiver.release()
    expire(world, ago(-600))
    world.serves(4)


@pytest.mark.parametrize("setting", ["warn", "refuse"])
def test_head_of_a_stranger_stops_what_is_signed_only_where_the_setting_says_so(tmp_path: Path, setting: str) -> None:
    world = Trusted(tmp_path, expired_head=setting)
    world.serves(3)
    world.chain.grow(1)
    true = (world.folder / keys.HEAD_KEY).read_bytes()
    world.chain.keyring = world.stranger
    world.chain.head(4)
    world.chain.keyring = world.trainer
    if setting == "refuse":
        world.refused("signature")
        assert world.receiver.status()["head"]["version"] == 4
    else:
        with pytest.raises(Exception, match="not trusted"):
            world.receiver.advance()
        assert world.receiver.status()["last_error"]["kind"] == "signature"
        world.server.serves(4)
    (world.folder / keys.HEAD_KEY).write_bytes(true)
    world.serves(4)


def test_state_that_cannot_be_kept_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="set state_dir"):
        Trusted(tmp_path, state_dir=tmp_path / "file")
    (tmp_path / "second").mkdir()
    world = Trusted(tmp_path / "second")
    world.serves(3)
    next((tmp_path / "second" / "state").glob("*.json")).write_text("[1]")
    with pytest.raises(SettingsError, match="remove it"):
        world.start()


def test_a_full_disk_later_keeps_no_weights_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was seen in this life holds all the same."""
    world = Trusted(tmp_path)
    world.serves(3)
    blocked = next((tmp_path / "state").glob("*.json")).with_suffix(".json.part")
    blocked.mkdir()
    world.chain.grow(1)
    world.serves(4)
    assert world.receiver.status()["trust"]["last_seen"]["kept"] is False
    assert "cannot be written" in caplog.text
    true = world.copied()
    world.put(world.copied(until=3).folder)
    world.refused("replay")
    world.put(true.folder)
    blocked.rmdir()
    world.serves(4)
    mark = world.receiver.status()["trust"]["last_seen"]
    assert (mark["version"], mark["manifest"], mark["kept"]) == (4, world.chain.manifests[4].digest, True)


def test_servers_of_a_machine_share_what_they_have_seen(tmp_path: Path) -> None:
    world = Trusted(tmp_path)
    first = world.server
    world.start()
    world.serves(3)
    other = world.copied()
    world.chain.grow(1)
    world.serves(4)
    other.grow(1)
    world.put(other.folder)
    world.server = first
    world.refused("fork")


def test_cold_start_honours_the_mark_and_leaves_it(tmp_path: Path) -> None:
    world = Trusted(tmp_path)
    world.serves(3)
    file = next((tmp_path / "state").glob("*.json"))
    kept = file.read_bytes()
    settings = Settings(bucket=world.chain.url, **world.settings)

    def cold(settings: Settings = settings) -> int:
        run = open_run(settings.bucket, settings.keyring())
        return newest_good_manifest(run, trusted_head=TrustedHead(settings, run.keyring, writes=False)).version

    world.chain.grow(1)
    assert cold() == 4
    true = world.copied()
    world.put(world.copied(until=2).folder)
    with pytest.raises(ReplayError):
        cold()
    world.put(true.folder)
    expire(world, ago(61))
    assert cold() == 4
    with pytest.raises(ExpiredError):
        cold(settings.model_copy(update={"expired_head": "refuse"}))
    assert file.read_bytes() == kept


def test_default_place_of_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert load_settings({"bucket": "/x"}, {}).state_folder() == tmp_path / "xdg" / "vllm-delta-sync"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_settings({"bucket": "/x"}, {}).state_folder() == tmp_path / ".local/state/vllm-delta-sync"


def test_head_descends_from_what_is_served_where_nothing_else_is_remembered(tmp_path: Path) -> None:
    world = Trusted(tmp_path)
    settings = Settings(bucket=world.chain.url, **world.settings)
    run = open_run(world.chain.url, world.trainer)
    fork = world.copied(until=1)
    fork.grow(3)
    head = world.chain.manifests[3]
    for served, error in (
        (fork.manifests[2], ForkError),
        (fork.manifests[3], ForkError),
        (fork.manifests[4], ReplayError),
    ):
        with pytest.raises(error):
            TrustedHead(settings, world.trainer).accept_head(run, head, None, served)
    TrustedHead(settings, world.trainer).accept_head(run, head, None, world.chain.manifests[1])
