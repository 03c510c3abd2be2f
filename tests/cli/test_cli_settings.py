"""Flag over environment over TOML file: for every command, and for the library calls."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import GOLDEN, delta_sync
from tests.cli.test_cli_keys import World, answer
from tests.support.clouds import far_from_clouds
from tests.support.signed_runs import Signed
from tests.support.stores import s3_server
from tests.trainer.faults.hooks import Trainer
from trainer_side import Publisher
from vllm_delta_sync import cli, open_run
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket.opening import OpenedBucket
from vllm_delta_sync.errors import SettingsError, SignatureError, UsageError
from vllm_delta_sync.trust import Keyring


def toml(folder: Path, **values: object) -> dict[str, str]:
    """The environment that names a settings file with these values."""
    file = folder / "settings.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    return {"DELTA_SYNC_CONFIG": str(file)}


def said(environment: Mapping[str, str], *arguments: str, code: int = 0) -> Any:
    """The JSON document of a command in this environment."""
    return answer(*arguments, code=code, **environment)  # type: ignore[arg-type]


# Arguments that no setting gives. {url}: the run, {folder}: where new files go, {pub}: a public key file.
ON_A_RUN = (
    ("log",),
    ("inspect", "{url}"),
    ("inspect", "{url}", "--version", "1"),
    ("verify",),
    ("verify", "--all"),
    ("export", "--to", "{folder}/export"),
    ("repair",),
    ("repair", "--dry-run"),
    ("gc", "--keep-last", "1"),
    ("gc", "--keep-last", "1", "--dry-run"),
    ("tag",),
    ("tag", "best"),
    ("tag", "old", "--delete"),
    ("branch", "{folder}/branch"),
    ("compact",),
    ("compact", "--dry-run"),
    ("keys",),
    ("keys", "--add", "{pub}"),
    ("doctor", "--bytes", "0"),
    ("fleet",),
    ("fleet", "--wait", "1", "--replicas", "0"),
)
OF_EVERY_KIND = (
    *(("keygen", "{folder}/new.key"), ("inspect", "{folder}/root.key.pub"), ("serve", "model", "--dry-run")),
    ("broker", "--publishers", "tcp://127.0.0.1:*", "--subscribers", "tcp://127.0.0.1:*"),
    *ON_A_RUN,
)


def arguments_of(command: tuple[str, ...], world: World) -> list[str]:
    return [part.format(url=world.url, folder=world.folder, pub=world.pub("next")) for part in command]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A run that the key ``stranger`` has signed, and files of other keys."""
    world = World(tmp_path, first="stranger")
    world.run.deltas(*["packed"] * 3)
    world.run.tag("old", 2)
    return world


def test_every_command_has_its_case() -> None:
    assert {command[0] for command in OF_EVERY_KIND} == set(cli.COMMANDS)


@pytest.mark.parametrize("command", ON_A_RUN, ids=" ".join)
def test_what_the_file_does_not_trust_is_refused(command: tuple[str, ...], world: World) -> None:
    before = {file: file.read_bytes() for file in Path(world.url).rglob("*.*")}
    keys = {"trusted_keys": world.pub("root"), "signing_key": str(world.path("root"))}
    refused = said(toml(world.folder, bucket=world.url, **keys), *arguments_of(command, world), code=1)
    assert refused["error"]["kind"] == "signature"
    assert {file: file.read_bytes() for file in Path(world.url).rglob("*.*")} == before
    # A flag, and the environment, win over the file; nothing but the signature was wrong.
    environment = {
        **toml(world.folder, bucket="/nowhere", trusted_keys=world.pub("root")),
        "DELTA_SYNC_BUCKET": world.url,
        "DELTA_SYNC_TRUSTED_KEYS": world.pub("stranger"),
        "DELTA_SYNC_SIGNING_KEY": str(world.path("stranger")),
    }
    said(environment, *arguments_of(command, world))


@pytest.mark.parametrize("command", [case for case in ON_A_RUN if case[:2] != ("keys", "--add")], ids=" ".join)
def test_an_unsigned_run_is_refused_where_the_file_asks_for_signatures(
    command: tuple[str, ...], world: World, tmp_path: Path
) -> None:
    world.url = str(tmp_path / "plain")
    plain = Signed(Keyring(), open_bucket(world.url))
    plain.deltas(*["packed"] * 3)
    plain.tag("old", 2)
    file = toml(world.folder, trusted_keys=world.pub("root"))
    refused = said({**file, "DELTA_SYNC_BUCKET": world.url}, *arguments_of(command, world), code=1)
    assert refused["error"]["kind"] == "signature"
    assert "not signed" in refused["error"]["message"]


def test_a_flag_wins_over_the_environment_and_that_over_the_file(world: World) -> None:
    file = toml(world.folder, bucket="/of-the-file", trusted_keys=world.pub("root"))
    assert "of-the-file" in said(file, "log", code=3)["error"]["message"]
    of_environment = {**file, "DELTA_SYNC_BUCKET": "/of-the-environment"}
    assert "of-the-environment" in said(of_environment, "log", code=3)["error"]["message"]
    trusting = {**of_environment, "DELTA_SYNC_TRUSTED_KEYS": world.pub("next")}
    assert said(trusting, "log", "--bucket", world.url, code=1)["error"]["kind"] == "signature"
    found = said(trusting, "log", "--bucket", world.url, "--trusted-keys", world.pub("stranger"))
    assert found["versions"][-1]["signature_holds"] is True


@pytest.mark.parametrize("command", OF_EVERY_KIND, ids=" ".join)
def test_an_unknown_name_is_an_error_of_every_command(command: tuple[str, ...], world: World) -> None:
    arguments = arguments_of(command, world)
    known = {"DELTA_SYNC_BUCKET": world.url}
    refused = said({**known, **toml(world.folder, trusted_key=world.pub("root"))}, *arguments, code=2)
    assert refused["error"]["kind"] == "settings"
    for word in ("'trusted_key'", str(world.folder / "settings.toml"), "trusted_keys"):
        assert word in refused["error"]["message"]
    refused = said({**known, "DELTA_SYNC_TRUSTED_KEY": world.pub("root")}, *arguments, code=2)
    assert "DELTA_SYNC_TRUSTED_KEY is not a setting" in refused["error"]["message"]


@pytest.mark.parametrize("place", ["flag", "environment", "file"])
@pytest.mark.parametrize("name", ["trusted_keys", "signing_key"])
def test_a_key_that_is_named_by_nothing_is_no_leave_to_trust_anybody(name: str, place: str, world: World) -> None:
    flags = ["--" + name.replace("_", "-"), ""] if place == "flag" else []
    environment = {"DELTA_SYNC_" + name.upper(): ""} if place == "environment" else {}
    file = toml(world.folder, bucket=world.url, **({name: ""} if place == "file" else {}))
    refused = said({**file, **environment}, "tag", "best", *flags, code=2)
    assert refused["error"]["kind"] == "settings"
    assert name in refused["error"]["message"]


def test_the_file_says_who_signs(world: World) -> None:
    file = toml(world.folder, bucket=world.url, signing_key=str(world.path("stranger")))
    assert said(file, "tag", "best", "--version", "2")["version"] == 2
    # A server has no business with that key.
    refused = said(file, "serve", "model", "--dry-run", code=2)
    for word in ("signing_key", str(world.folder / "settings.toml"), "trusted_keys"):
        assert word in refused["error"]["message"]


def test_a_value_that_does_not_fit_is_an_error_that_says_where_it_is_from(world: World) -> None:
    file = toml(world.folder, bucket=world.url, store_deadline=-1)
    message = said(file, "verify", code=2)["error"]["message"]
    assert "'store_deadline' is '-1'" in message
    assert str(world.folder / "settings.toml") in message
    message = said({**file, "DELTA_SYNC_STORE_DEADLINE": "soon"}, "verify", code=2)["error"]["message"]
    assert "'store_deadline' is 'soon'" in message
    assert "DELTA_SYNC_STORE_DEADLINE" in message


# The library


def set_all(patch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        patch.setenv(name, value)


def test_what_a_library_call_is_not_given_is_taken_from_the_settings(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_run(world.url).head().version == 3
    set_all(monkeypatch, toml(world.folder, trusted_keys=world.pub("root"), store_download_limit=10**9))
    with pytest.raises(SignatureError):
        open_run(world.url)
    # What a call is given wins, and an empty keyring asks for nothing.
    assert open_run(world.url, Keyring.load(world.pub("stranger"))).head().version == 3
    bucket = open_run(world.url, Keyring()).bucket
    assert isinstance(bucket, OpenedBucket)
    assert bucket.options.store_download_limit == 10**9
    monkeypatch.setenv("DELTA_SYNC_STORE_DOWNLOAD_LIMIT", "5000000")
    opened = open_bucket(world.url)
    assert isinstance(opened, OpenedBucket)
    assert opened.options.store_download_limit == 5_000_000
    assert not isinstance(open_bucket(world.url, StoreOptions()), OpenedBucket)
    monkeypatch.setenv("DELTA_SYNC_TRUSTED_KEYS", world.pub("stranger"))
    assert open_run(world.url).verify().checked
    set_all(monkeypatch, toml(world.folder, trusted_key=world.pub("root")))
    with pytest.raises(SettingsError, match="'trusted_key'"):
        open_run(world.url)


def test_a_publisher_signs_with_the_key_that_is_set(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    monkeypatch.setenv("DELTA_SYNC_TRUSTED_KEYS", world.pub("next"))
    with pytest.raises(UsageError, match="trusted_keys is set without signing_key"):
        Publisher(trainer.live, str(world.folder / "other"))
    set_all(monkeypatch, toml(world.folder, signing_key=str(world.path("next"))))
    with Publisher(trainer.live, str(world.folder / "other")):
        pass
    assert open_run(str(world.folder / "other")).info.signature is not None
    # A key that is given wins; by the keys that are set it is not one to begin a run with.
    with pytest.raises(SignatureError, match="cannot begin with signing_key"):
        Publisher(trainer.live, str(world.folder / "third"), signing_key=world.path("root"))


def test_commands_talk_to_the_store_that_the_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = s3_server()
    far_from_clouds(monkeypatch, tmp_path)
    credentials = {name: value for name, value in server.environment.items() if "ENDPOINT" not in name}
    set_all(monkeypatch, credentials)
    url = f"{server.create_bucket(f'settings-{os.getpid()}')}/run"
    with open_bucket(url, StoreOptions(store_endpoint=server.endpoint)) as bucket:
        Signed(Keyring(), bucket).deltas("packed", "packed")
    file = toml(tmp_path, bucket=url, store_endpoint=server.endpoint, store_progress="off")
    assert said(file, "log")["versions"][-1]["version"] == 2
    assert said(file, "repair")["verdict"] is True
    set_all(monkeypatch, file)
    assert open_run(url).head().version == 2


def test_a_process_of_its_own_reads_the_same_settings(tmp_path: Path) -> None:
    file = toml(tmp_path, bucket=GOLDEN, trusted_keys=str(tmp_path / "gone.pub"))
    done = delta_sync("verify", **file)
    assert (done.returncode, done.stdout) == (2, "")
    assert "gone.pub" in done.stderr
