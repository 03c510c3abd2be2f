"""Settings: precedence, unknown names, values that do not fit."""

from pathlib import Path

import pytest

from vllm_delta_sync.config import load_settings
from vllm_delta_sync.errors import SettingsError


def test_flag_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('bucket = "/from-file"\npoll_seconds = 9.0\npolicy = "manual"\n')
    environment = {"DELTA_SYNC_CONFIG": str(file), "DELTA_SYNC_POLL_SECONDS": "4", "OTHER": "x"}
    settings = load_settings({"policy": "follow", "notice": None}, environment)
    assert (settings.bucket, settings.poll_seconds, settings.policy) == ("/from-file", 4.0, "follow")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "'bucket' is missing"),
        ({"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_BUKET": "/y"}, "DELTA_SYNC_BUKET is not a setting"),
        ({"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_POLL_SECONDS": "0"}, "'poll_seconds' is '0'"),
        ({"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_PAUSE_MODE": "stop"}, "'pause_mode' is 'stop'"),
        ({"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_NOTICE": "5555"}, "'notice' is '5555'"),
        ({"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_CACHE_BYTES": "-1"}, "'cache_bytes' is '-1'"),
        ({"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_CONFIG": "/no/such/file"}, "cannot be read"),
    ],
)
def test_one_clear_error(environment: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(environment=environment)
    assert words in caught.value.message


def test_unknown_name_in_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('bucket = "/x"\nspeed = 3\n')
    with pytest.raises(SettingsError, match="'speed' is unknown"):
        load_settings(environment={"DELTA_SYNC_CONFIG": str(file)})


def test_admin_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    settings = load_settings({"bucket": "/x", "admin_token_file": str(file)}, {})
    with pytest.raises(SettingsError, match="cannot be read"):
        settings.admin_token()
    file.write_text("\n")
    with pytest.raises(SettingsError, match="is empty"):
        settings.admin_token()
    file.write_text("a-token-of-27-characters-it\n")
    token = settings.admin_token({})
    assert token is not None
    assert token.matches("a-token-of-27-characters-it")
    assert load_settings({"bucket": "/x"}, {}).admin_token() is None


def test_files_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"bucket = '\xff\xfe'")
    with pytest.raises(SettingsError, match="cannot be read as TOML"):
        load_settings(environment={"DELTA_SYNC_CONFIG": str(file)})
    with pytest.raises(SettingsError, match=r"admin_token_file .* cannot be read"):
        load_settings({"bucket": "/x", "admin_token_file": str(file)}, {}).admin_token()
