"""Flag over environment over TOML file: for every command, and for the library calls."""

import json
import os
from pathlib import Path

import pytest

from tests.cli.test_cli_signing import KeyedRun
from tests.support.clouds import far_from_clouds
from tests.support.commands import answer, refusal
from tests.support.publishers import Trainer
from tests.support.signed_runs import Signed
from tests.support.stores import s3_server
from trainer_side import Publisher
from vllm_delta_sync import cli, open_run
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket.factory import OpenedBucket
from vllm_delta_sync.engine.api import embedded
from vllm_delta_sync.errors import SettingsError, SignatureError, UsageError
from vllm_delta_sync.settings import client_settings, load_settings
from vllm_delta_sync.trust import Keyring


def toml(folder: Path, **values: object) -> dict[str, str]:
    """The environment that names a settings file with these values."""
    file = folder / "settings.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    return {"DELTA_SYNC_CONFIG": str(file)}


# Arguments that no setting gives. {url}: the run, {folder}: where new files go.
ON_A_RUN = (
    *("log", "inspect", "inspect --version 1", "verify", "verify --all", "export --to {folder}/export"),
    *("repair", "repair --dry-run", "gc --keep-last 1", "gc --keep-last 1 --dry-run", "tag list"),
    *("tag set best", "tag rm old", "branch --to {folder}/branch", "compact", "compact --dry-run"),
    *("doctor --bytes 0", "fleet list", "fleet wait --version 1 --replicas 0"),
    *("follow --to {folder}/followed --once", "du", "diff 0 1", "stats", "report --to {folder}/report.html"),
)
OF_EVERY_KIND = (
    *("keygen {folder}/new.key", "serve model --dry-run"),
    *("broker --publishers tcp://127.0.0.1:* --subscribers tcp://127.0.0.1:*", *ON_A_RUN),
    *("publish --from {folder}/checkpoint", "dashboard --port 0", "mirror --port 0 --to {folder}/cache"),
    *("status", "sync", "rollback --version 1", "hold", "release", "wait --version 1"),
)


def arguments_of(command: str, world: KeyedRun) -> list[str]:
    return command.format(url=world.url, folder=world.folder).split()


def files(url: str) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in Path(url).rglob("*.*")}


@pytest.fixture
def world(tmp_path: Path) -> KeyedRun:
    """A run that the key ``stranger`` has signed, and files of other keys."""
    world = KeyedRun(tmp_path, first="stranger")
    world.run.deltas(*["plain"] * 3)
    world.run.tag("old", 2)
    return world


def test_every_command_has_its_case() -> None:
    commands = cli.build_parser().commands
    assert {name for name in commands for case in OF_EVERY_KIND if f"{case} ".startswith(f"{name} ")} == set(commands)


def test_what_the_file_does_not_trust_is_refused(world: KeyedRun) -> None:
    before = files(world.url)
    keys = {"trusted_keys": world.pub("root"), "signing_key": str(world.path("root"))}
    refusing = toml(world.folder, bucket=world.url, **keys)
    for command in ON_A_RUN:
        assert refusal(*arguments_of(command, world), code=1, **refusing)["kind"] == "signature"
    assert files(world.url) == before
    # A flag, and the environment, win over the file; nothing but the signature was wrong.
    environment = {
        **toml(world.folder, bucket="/nowhere", trusted_keys=world.pub("root")),
        "DELTA_SYNC_BUCKET": world.url,
        "DELTA_SYNC_TRUSTED_KEYS": world.pub("stranger"),
        "DELTA_SYNC_SIGNING_KEY": str(world.path("stranger")),
    }
    for command in ON_A_RUN:
        answer(*arguments_of(command, world), code=0, **environment)


def test_an_unsigned_run_is_refused_where_the_file_asks_for_signatures(world: KeyedRun, tmp_path: Path) -> None:
    world.url = str(tmp_path / "plain")
    plain = Signed(Keyring(), open_bucket(world.url))
    plain.deltas(*["plain"] * 3)
    plain.tag("old", 2)
    environment = {**toml(world.folder, trusted_keys=world.pub("root")), "DELTA_SYNC_BUCKET": world.url}
    for command in ON_A_RUN:
        refused = refusal(*arguments_of(command, world), code=1, **environment)
        assert (refused["kind"], "not signed" in refused["message"]) == ("signature", True)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(world: KeyedRun) -> None:
    file = toml(world.folder, bucket="/of-the-file", trusted_keys=world.pub("root"))
    assert "of-the-file" in refusal("log", code=3, **file)["message"]
    of_environment = {**file, "DELTA_SYNC_BUCKET": "/of-the-environment"}
    assert "of-the-environment" in refusal("log", code=3, **of_environment)["message"]
    trusting = {**of_environment, "DELTA_SYNC_TRUSTED_KEYS": world.pub("next")}
    assert refusal("log", "--bucket", world.url, code=1, **trusting)["kind"] == "signature"
    found = answer("log", "--bucket", world.url, "--trusted-keys", world.pub("stranger"), code=0, **trusting)
    assert found["versions"][-1]["signature_holds"] is True


def test_an_unknown_name_is_an_error_of_every_command(world: KeyedRun) -> None:
    known = {"DELTA_SYNC_BUCKET": world.url}
    misspelt = {**known, **toml(world.folder, trusted_key=world.pub("root"))}
    for command in OF_EVERY_KIND:
        refused = refusal(*arguments_of(command, world), code=2, **misspelt)
        assert refused["kind"] == "settings"
        assert all(word in refused["message"] for word in ("'trusted_key'", "settings.toml", "trusted_keys"))
        refused = refusal(*arguments_of(command, world), code=2, **known, DELTA_SYNC_TRUSTED_KEY="x")
        assert "'trusted_key' is unknown (in environment variable DELTA_SYNC_TRUSTED_KEY)" in refused["message"]


@pytest.mark.parametrize("name", ["trusted_keys", "signing_key"])
def test_a_key_that_is_named_by_nothing_is_no_leave_to_trust_anybody(name: str, world: KeyedRun) -> None:
    file = toml(world.folder, bucket=world.url)
    refused = [
        refusal("tag", "set", "best", "--" + name.replace("_", "-"), "", code=2, **file),
        refusal("tag", "set", "best", code=2, **{**file, "DELTA_SYNC_" + name.upper(): ""}),
        refusal("tag", "set", "best", code=2, **toml(world.folder, bucket=world.url, **{name: ""})),
    ]
    for document in refused:
        assert (document["kind"], name in document["message"]) == ("settings", True)


def test_the_file_says_who_signs(world: KeyedRun) -> None:
    file = toml(world.folder, bucket=world.url, signing_key=str(world.path("stranger")))
    assert answer("tag", "set", "best", "--version", "2", code=0, **file)["version"] == 2
    # A server has no business with that key.
    refused = refusal("serve", "model", "--dry-run", code=2, **file)
    for word in ("signing_key", str(world.folder / "settings.toml"), "trusted_keys"):
        assert word in refused["message"]


def test_a_value_that_does_not_fit_is_an_error_that_says_where_it_is_from(world: KeyedRun) -> None:
    file = toml(world.folder, bucket=world.url, store_deadline=-1)
    message = refusal("verify", code=2, **file)["message"]
    assert "'store_deadline' is '-1'" in message
    assert str(world.folder / "settings.toml") in message
    message = refusal("verify", code=2, **file, DELTA_SYNC_STORE_DEADLINE="soon")["message"]
    assert "'store_deadline' is 'soon'" in message
    assert "DELTA_SYNC_STORE_DEADLINE" in message


# The library


def set_all(patch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        patch.setenv(name, value)


def test_what_a_library_call_is_not_given_is_taken_from_the_settings(
    world: KeyedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_run(world.url).head().version == 3
    set_all(monkeypatch, toml(world.folder, trusted_keys=world.pub("root"), mirror=f"{world.folder}/one"))
    with pytest.raises(SignatureError):
        open_run(world.url)
    # What a call is given wins, and an empty keyring asks for nothing.
    assert open_run(world.url, Keyring.load(world.pub("stranger"))).head().version == 3
    bucket = open_run(world.url, Keyring()).bucket
    assert isinstance(bucket, OpenedBucket)
    assert bucket.options.mirror == f"{world.folder}/one"
    monkeypatch.setenv("DELTA_SYNC_MIRROR", f"{world.folder}/two")
    opened = open_bucket(world.url)
    assert isinstance(opened, OpenedBucket)
    assert opened.options.mirror == f"{world.folder}/two"
    assert not isinstance(open_bucket(world.url, StoreOptions()), OpenedBucket)
    monkeypatch.setenv("DELTA_SYNC_TRUSTED_KEYS", world.pub("stranger"))
    assert open_run(world.url).verify().checked
    set_all(monkeypatch, toml(world.folder, trusted_key=world.pub("root")))
    with pytest.raises(SettingsError, match="'trusted_key'"):
        open_run(world.url)


def test_an_engine_of_ones_own_is_attached_by_paths_too(world: KeyedRun) -> None:
    key = Path(world.pub("root"))
    for keys in (key, str(key), [key]):
        settings = embedded._settings(world.folder, keys)
        assert (settings.bucket, settings.trusted_keys) == (str(world.folder), str(key))


def test_a_publisher_signs_with_the_key_that_is_set(world: KeyedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    monkeypatch.setenv("DELTA_SYNC_TRUSTED_KEYS", world.pub("next"))
    with pytest.raises(UsageError, match="trusted_keys is set without signing_key"):
        Publisher(trainer.live, str(world.folder / "other"))
    set_all(monkeypatch, toml(world.folder, signing_key=str(world.path("next"))))
    with Publisher(trainer.live, str(world.folder / "other")):
        pass
    assert open_run(str(world.folder / "other")).info.signature is not None
    # A key that is given wins; by the keys that are set it is not one to begin a run with.
    with pytest.raises(SignatureError, match="is not among trusted_keys"):
        Publisher(trainer.live, str(world.folder / "third"), signing_key=world.path("root"))


def test_commands_talk_to_the_store_that_the_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = s3_server()
    far_from_clouds(monkeypatch, tmp_path)
    credentials = {name: value for name, value in server.environment.items() if "ENDPOINT" not in name}
    set_all(monkeypatch, credentials)
    url = f"{server.create_bucket(f'settings-{os.getpid()}')}/run"
    with open_bucket(url, StoreOptions(store_endpoint=server.endpoint)) as bucket:
        Signed(Keyring(), bucket).deltas("plain", "plain")
    file = toml(tmp_path, bucket=url, store_endpoint=server.endpoint, store_progress="off")
    assert answer("log", code=0, **file)["versions"][-1]["version"] == 2
    assert answer("repair", code=0, **file)["verdict"] is True
    set_all(monkeypatch, file)
    assert open_run(url).head().version == 2


# Loading


def test_a_setting_that_does_not_fit_is_named(tmp_path: Path) -> None:
    for words, environment in (
        ("'bucket' is missing", {}),
        ("environment variable DELTA_SYNC_BUKET", {"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_BUKET": "/y"}),
        ("'poll_seconds' is '0'", {"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_POLL_SECONDS": "0"}),
        ("'pause_mode' is 'stop'", {"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_PAUSE_MODE": "stop"}),
        ("'notice' is '5555'", {"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_NOTICE": "5555"}),
        ("'cache_bytes' is '-1'", {"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_CACHE_BYTES": "-1"}),
        ("cannot be read", {"DELTA_SYNC_BUCKET": "/x", "DELTA_SYNC_CONFIG": "/no/such/file"}),
    ):
        with pytest.raises(SettingsError, match=words):
            load_settings(environment=environment)
    file = tmp_path / "file"
    for words, content in (("'speed' is unknown", b'bucket = "/x"\nspeed = 3\n'), ("as TOML", b"bucket = '\xff\xfe'")):
        file.write_bytes(content)
        with pytest.raises(SettingsError, match=words):
            load_settings(environment={"DELTA_SYNC_CONFIG": str(file)})


def test_adapters_have_the_settings_of_the_server_but_those_of_its_run() -> None:
    given = {
        "bucket": "/x",
        "mirror": "/y",
        "target": "tag:best",
        "poll_seconds": 3,
        "lora_adapters": "a=/runs/a, b=/b",
    }
    found = load_settings(given, {}).adapters()
    assert list(found) == ["a", "b"]
    own = found["a"]
    assert (own.bucket, own.mirror, own.target, own.lora_name, own.poll_seconds) == ("/runs/a", None, "head", "a", 3)
    for words, wrong in (("is not NAME=URL", "/runs/a"), ("named twice", "a=/a,a=/b"), ("adapter 'a': ", "a=ftp://a")):
        with pytest.raises(SettingsError, match=words):
            load_settings({"bucket": "/x", "lora_adapters": wrong}, {}).adapters()


def test_paths_in_a_file_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell has replaced the tilde there."""
    file = tmp_path / "settings.toml"
    file.write_text('state_dir = "~/state"\n', "utf-8-sig")  # as some editors write it
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DELTA_SYNC_CONFIG", str(file))
    assert client_settings().state_dir == tmp_path / "state"


def test_paths_in_quotes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's env file keeps them; what a server puts into such a folder would be gone with its container."""
    monkeypatch.setenv("DELTA_SYNC_STATE_DIR", '"/state"')
    with pytest.raises(SettingsError, match=r"from environment variable DELTA_SYNC_STATE_DIR.* begins with a quote"):
        client_settings()
