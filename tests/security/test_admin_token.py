"""The admin token: where it may come from, and that nothing keeps it."""

import gc
import os
import pickle
from pathlib import Path

import pytest

from tests.support.running import run_python
from vllm_delta_sync import admin_token
from vllm_delta_sync.admin_token import DIGEST_VARIABLE, VARIABLE, AdminToken, readable_by_others
from vllm_delta_sync.errors import SettingsError
from vllm_delta_sync.settings import load_settings

TOKEN = "0123456789abcdef"


def test_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    token = admin_token.load(file, {})
    assert token is not None
    assert token.matches(TOKEN)
    for wrong in ("", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "ü", "\udce9"):
        assert not token.matches(wrong)


def test_from_the_environment() -> None:
    environment = {VARIABLE: TOKEN}
    token = admin_token.load(None, environment)
    assert token is not None
    assert token.matches(TOKEN)
    admin_token.hide(environment)
    assert environment.keys() == {DIGEST_VARIABLE}
    assert TOKEN not in environment[DIGEST_VARIABLE]
    token = admin_token.load(None, environment)
    assert token is not None
    assert token.matches(TOKEN)
    assert not token.matches(environment[DIGEST_VARIABLE])
    assert admin_token.load(None, {}) is None


def test_a_client_gets_the_token_itself(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f" {TOKEN}\n")
    assert admin_token.load_text(file, {}) == admin_token.load_text(None, {VARIABLE: TOKEN}) == TOKEN
    assert admin_token.load_text(None, {DIGEST_VARIABLE: "00" * 32}) is None
    assert admin_token.load_text(None, {}) is None


def test_settings_take_the_variable_and_do_not_keep_it() -> None:
    settings = load_settings(environment={"DELTA_SYNC_BUCKET": "/x", VARIABLE: TOKEN})
    assert TOKEN not in repr(settings) + str(settings) + settings.model_dump_json()
    with pytest.raises(SettingsError, match="environment variable DELTA_SYNC_ADMIN_TOKENS") as caught:
        load_settings(environment={"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_ADMIN_TOKENS": TOKEN})
    assert TOKEN not in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("short-token-15c", "of 15 characters, fewer than 16"),
        ("x" * 4097, "longer than 4096"),
        ("with a space in it", "printable ASCII"),
        ("näh-kein-ascii-text", "printable ASCII"),
        ("two-lines-of-it\nand-another", "printable ASCII"),
    ],
)
def test_token_that_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    for source, environment in ((file, {}), (None, {VARIABLE: text})):
        with pytest.raises(SettingsError, match=words) as caught:
            admin_token.load(source, environment)
        assert not text or text not in caught.value.message
        with pytest.raises(SettingsError, match=words):
            admin_token.load_text(source, environment)
    environment = {VARIABLE: text}
    admin_token.hide(environment)
    assert environment == {VARIABLE: text}, "a token that cannot be used must not become none"


@pytest.mark.parametrize("second", [VARIABLE, DIGEST_VARIABLE])
def test_two_tokens(tmp_path: Path, second: str) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with pytest.raises(SettingsError, match="both set"):
        admin_token.load(file, {second: TOKEN})
    with pytest.raises(SettingsError, match="both set"):
        admin_token.load(None, {VARIABLE: TOKEN, DIGEST_VARIABLE: "00" * 32})


def test_digest_that_is_none() -> None:
    with pytest.raises(SettingsError, match="is not a SHA-256"):
        admin_token.load(None, {DIGEST_VARIABLE: TOKEN})


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    binary = tmp_path / "binary"
    binary.write_bytes(b"secret-\xff\xfe-secret")
    for file, words in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (pipe, "regular file")):
        with pytest.raises(SettingsError, match=words):
            admin_token.load(file, {})
    with pytest.raises(SettingsError, match="it is not UTF-8 text") as caught:
        admin_token.load(binary, {})
    assert caught.value.__cause__ is None


def test_modes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    for mode, open_to_others in ((0o600, False), (0o400, False), (0o640, True), (0o604, True)):
        file.chmod(mode)
        assert readable_by_others(file) is open_to_others
    assert not readable_by_others(tmp_path / "none")


def test_nothing_holds_the_text() -> None:
    text = "".join(["unlikely-", "token-", "text-", "4711"])
    token = AdminToken.of(text, "test")
    assert [found for found in gc.get_referents(token) if isinstance(found, str)] == []
    assert text not in repr(token) + str(token)
    assert text.encode() not in pickle.dumps([found for found in gc.get_referents(token) if found is not AdminToken])


PARENT = f"""
import os, subprocess, sys
from vllm_delta_sync.engine.entrypoints import plugin
plugin.register()
assert "{VARIABLE}" not in os.environ
print(subprocess.run(["env"], capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
def test_general_plugin_takes_it_out_of_the_environment() -> None:
    """vLLM calls it in the API server before it starts other processes."""
    done = run_python("-c", PARENT, environment={VARIABLE: TOKEN})
    assert DIGEST_VARIABLE in done.stdout
    assert TOKEN not in done.stdout
