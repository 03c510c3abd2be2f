"""``delta-sync serve``: whose arguments are whose, what it sets, runs and writes, and what it refuses."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.golden.regenerate import DIRECTORY
from tests.support.commands import answer, delta_sync, parsed, shown
from trainer_side import Publisher
from vllm_delta_sync import cli, open_run
from vllm_delta_sync.cli.serve import split_serve
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.maintenance.export import export
from vllm_delta_sync.settings import Settings, load_settings
from vllm_delta_sync.trust import keys

GOLDEN = str(DIRECTORY)
FILES = {"config.json": '{"model_type": "qwen3"}', "tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}"}


def publish(url: str, folder: Path, names: tuple[str, ...] = tuple(FILES), **options: Any) -> str:
    """Begin a run that keeps some files; its id."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text(FILES[name])
    with Publisher([("a", torch.zeros(4))], url, files=folder, **options):
        pass
    with open_run(url) as run:
        return run.info.run


class Command:
    """``delta-sync serve --dry-run`` in this process, with a cache folder for it alone."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
        self.home, self._capsys, self._caplog = home, capsys, caplog

    def __call__(self, *arguments: str) -> list[str]:
        self._caplog.clear()
        code = cli.run(["serve", *arguments, "--dry-run", "--json"])
        said = parsed(self._capsys.readouterr().out)
        assert code == 0, said
        command: list[str] = said["data"]["command"]
        return command[command.index("serve") + 1 :]

    def refused(self, code: int, *arguments: str) -> str:
        assert cli.run(["serve", *arguments, "--dry-run"]) == code
        return self._capsys.readouterr().err

    @property
    def warned(self) -> str:
        return self._caplog.text


@pytest.fixture
def serve(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Command(tmp_path / "cache", capsys, caplog)


def test_a_sentence_transformers_model_starts_from_its_folder(serve: Command, tmp_path: Path) -> None:
    """A run keeps no subfolders, so vLLM would not find how to pool."""
    (folder := tmp_path / "files").mkdir()
    for name, text in {**FILES, "modules.json": "[]"}.items():
        (folder / name).write_text(text)
    with Publisher([("a", torch.zeros(4))], run := str(tmp_path / "run"), files=folder):
        pass
    assert "1_Pooling" in serve.refused(2, "--bucket", run)
    assert serve("model", "--bucket", run)[0] == "model"
    assert "--pooler-config" in serve("--bucket", run, "--pooler-config", '{"pooling_type": "MEAN"}')
    with open_run(run) as opened:
        assert any("1_Pooling" in note for note in export(opened, tmp_path / "out").notes)


def test_every_setting_is_a_flag() -> None:
    flags = [f"--{field.replace('_', '-')}" for field in Settings.model_fields]
    given = [part for flag in flags for part in (flag, "value")]
    assert split_serve(["model", *given, "--port", "8000"]) == ([*given, "model"], ["--port", "8000"])


def test_our_arguments_are_parted_from_those_of_vllm() -> None:
    behind = "--policy=strict --mirror --json -h -- --bucket v"
    for line, ours, rest in (
        (
            "model --port 8000 --bucket u --policy=manual --enforce-eager --notice n -tp 2",
            "--bucket u --policy=manual --notice n model",
            "--port 8000 --enforce-eager -tp 2",
        ),
        ("--bucket u model -- x", "--bucket u model", "x"),
        (f"model -tp 2 --bucket u -- {behind}", "--bucket u model", f"-tp 2 {behind}"),
        # MODEL is ours, so it is missing here; without it the run's own files are taken.
        ("--bucket u -- model", "--bucket u", "model"),
        ("--port 1 --bucket u", "--bucket u", "--port 1"),
    ):
        assert split_serve(line.split()) == (ours.split(), rest.split())


def test_dry_run() -> None:
    arguments = ["serve", "base", "--bucket", GOLDEN]
    flags = ["--poll-seconds", "0.5", "--port", "8000", "--dry-run"]
    document = answer(*arguments, *flags)
    assert document["environment"]["DELTA_SYNC_BUCKET"] == GOLDEN
    assert document["environment"]["DELTA_SYNC_POLL_SECONDS"] == "0.5"
    assert "delta_sync" in document["environment"]["VLLM_PLUGINS"].split(",")
    command = document["command"]
    assert command[command.index("serve") + 1] == "base"
    assert command[-2:] == ["--port", "8000"]
    assert f"DELTA_SYNC_BUCKET={GOLDEN} \\\n" in shown(*arguments, *flags)
    # What stands behind -- is vLLM's, whatever it is called.
    behind = ["--policy", "strict", "--dry-run", "--json"]
    text = shown(*arguments, "--dry-run", "--", *behind)
    assert text.endswith(" " + " ".join(behind) + "\n")
    assert "DELTA_SYNC_POLICY" not in text
    document = parsed(shown(*arguments, "--dry-run", "--json", "--", *behind))["data"]
    assert document["command"][-4:] == behind
    wrong = delta_sync(*arguments, "--pause-mode", "never", "--dry-run")
    assert wrong.code == 2
    assert wrong.err.startswith("delta-sync: settings: setting 'pause_mode' is 'never'")


def test_model_name_and_format_come_from_the_run(tmp_path: Path, serve: Command) -> None:
    url = str(tmp_path / "first-run")
    run = publish(url, tmp_path / "files")
    command = serve("--bucket", url, "--port", "8000")
    folder = serve.home / "vllm-delta-sync" / "models" / run
    assert command[0] == str(folder)
    assert command[3:] == ["--load-format", "delta_sync", "--served-model-name", "first-run", "--port", "8000"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == FILES
    # What was damaged meanwhile is written again.
    (folder / "config.json").write_text("{}")
    assert serve("--bucket", url, "--port", "8000") == command
    assert (folder / "config.json").read_text() == FILES["config.json"]


@pytest.mark.parametrize("name", ["--served-model-name", "--served_model_name"])
def test_what_is_given_is_not_given_again(tmp_path: Path, serve: Command, name: str) -> None:
    url = str(tmp_path / "run")
    publish(url, tmp_path / "files")
    given = [name, "policy", "--load_format=delta_sync"]
    assert serve("--bucket", url, *given)[3:] == given
    # A cache folder that is set is where everything goes.
    command = serve("--bucket", url, "--cache-dir", str(tmp_path / "own"))
    assert Path(command[0]).parent == tmp_path / "own" / "models"


def test_a_model_that_is_given_is_used_as_it_is(tmp_path: Path, serve: Command) -> None:
    url = str(tmp_path / "run")
    publish(url, tmp_path / "files")
    command = serve("base", "--bucket", url)
    assert command[0] == "base"
    assert "--load-format" not in command
    assert not serve.home.exists()


def test_the_file_of_vllms_config_counts_as_arguments(tmp_path: Path, serve: Command) -> None:
    url, file = str(tmp_path / "first-run"), tmp_path / "server.yaml"
    publish(url, tmp_path / "files")
    arguments = ["--bucket", url, "--config", str(file)]
    # The model that it names is MODEL, unless there is another one; all else is vLLM's.
    file.write_text("model: base\nload-format: auto\ngrpc: false\n")
    assert serve(*arguments) == ["base", *serve("other", *arguments)[1:]]
    assert serve(*arguments)[3:] == ["--config", str(file)]
    assert serve("other", *arguments)[0] == "other"
    file.write_text("served_model_name: [policy, other]\n")
    assert serve(*arguments)[3:] == ["--load-format", "delta_sync", "--config", str(file)]
    for text, said in (
        ("load-format: auto", "--load-format is 'auto', but there is no MODEL to load"),
        ("grpc: true", "--grpc starts a server that loads no plugins"),
        ("worker-extension-cls: my.Own", "--worker-extension-cls is set by delta-sync serve"),
        ("[port]", "which vLLM cannot read as a mapping of arguments to values"),
        ("a: b: c", "to values: mapping values are not allowed here"),
    ):
        file.write_text(text)
        assert said in serve.refused(2, *arguments)
    file.unlink()
    assert "to values: [Errno 2]" in serve.refused(2, *arguments)
    assert "write the model as the first argument" in serve.refused(2, "--bucket", url, "--model", "base")


def test_only_a_real_start_keeps_what_was_seen_of_the_run(tmp_path: Path, serve: Command) -> None:
    """A dry run may be on another machine, or by another user, than the server."""
    keys.generate(tmp_path / "key")
    blocked = tmp_path / "file"
    blocked.touch()
    flags = ["base", "--bucket", GOLDEN, "--trusted-keys", str(tmp_path / "key.pub")]
    serve(*flags, "--state-dir", str(tmp_path / "state"))
    assert not (tmp_path / "state").exists()
    serve(*flags, "--state-dir", str(blocked))
    with mock.patch.object(os, "execv", side_effect=AssertionError("started")):
        started = delta_sync("serve", *flags, "--state-dir", str(blocked))
    assert started.code == 2
    assert f"what was seen of the run cannot be kept in {str(blocked)!r}" in started.err


def test_peers_get_the_token_that_a_flag_names(tmp_path: Path, serve: Command) -> None:
    """The file of a flag is in no environment yet while this command reads the run and what was seen of it."""
    url, token = str(tmp_path / "run"), tmp_path / "token"
    publish(url, tmp_path / "model")
    token.write_text("0123456789abcdef-a-token")
    asked, flag = ["--bucket", url, "--peer", "http://127.0.0.1:9"], ["--admin-token-file", str(token)]
    assert serve(*asked, *flag)
    keys.generate(tmp_path / "key")
    flags = {"admin_token_file": token, "trusted_keys": str(tmp_path / "key.pub"), "state_dir": tmp_path / "state"}
    settings = load_settings({"bucket": url, "peer": asked[3], **flags})
    TrustedHead(settings, settings.keyring())  # as the command does before it becomes vLLM
    # Before minutes of loading, not after them.
    assert "setting 'peer' needs the run's token" in serve.refused(2, "model", *asked)
    assert "peer: server URL '127.0.0.1:9' is not valid; write it like http://host:8000" in serve.refused(
        2, "model", "--bucket", url, "--peer", "127.0.0.1:9", *flag
    )


def test_refusals_name_what_to_give(tmp_path: Path, serve: Command) -> None:
    url = str(tmp_path / "run")
    publish(url, tmp_path / "files")
    said = serve.refused(2, "--bucket", url, "--load-format", "safetensors")
    assert "--load-format is 'safetensors', but there is no MODEL to load: give MODEL" in said
    said = serve.refused(2, "--bucket", GOLDEN)
    assert "has no config.json, so a server cannot start from it alone: give MODEL" in said
    assert "no run at" in serve.refused(3, "--bucket", str(tmp_path / "none"))
    assert not serve.home.exists()
    blocked = tmp_path / "file"
    blocked.touch()
    said = serve.refused(4, "--bucket", url, "--cache-dir", str(blocked))
    assert "cannot be used: Not a directory; set cache_dir to another one" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path, serve: Command) -> None:
    url = str(tmp_path / "run")
    run = publish(url, tmp_path / "files")
    folder = tmp_path / "cache" / "models" / run
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    said = serve.refused(4, "--bucket", url, "--cache-dir", str(tmp_path / "cache"))
    assert "belongs to user 65534, this process runs as user 0; set cache_dir to another one" in said
    assert list(folder.iterdir()) == []


def test_a_run_without_a_tokenizer_is_warned_of(tmp_path: Path, serve: Command) -> None:
    url = str(tmp_path / "run")
    publish(url, tmp_path / "files", ("config.json",))
    serve("--bucket", url)
    assert "the run has no tokenizer, so vLLM may not start: give --tokenizer" in serve.warned
    for given in (["--skip-tokenizer-init"], ["--tokenizer", "elsewhere"]):
        serve("--bucket", url, *given)
        assert "tokenizer" not in serve.warned


def test_files_of_a_run_that_is_not_trusted_are_not_written(tmp_path: Path, serve: Command) -> None:
    url = str(tmp_path / "run")
    for name in ("signer", "other"):
        keys.generate(tmp_path / name)
    run = publish(url, tmp_path / "files", signing_key=tmp_path / "signer", trusted_keys=[tmp_path / "signer.pub"])
    state = ("--state-dir", str(tmp_path / "state"), "--cache-dir", str(tmp_path / "cache"))
    said = serve.refused(1, "--bucket", url, "--trusted-keys", str(tmp_path / "other.pub"), *state)
    assert said.startswith("delta-sync: signature: ")
    # A config.json may name code.
    for flag in ("--trust-remote-code", "--trust_remote_code"):
        assert "give MODEL, or set trusted_keys" in serve.refused(2, "--bucket", url, flag)
        assert serve("base", "--bucket", url, flag)[-1] == flag
    assert not serve.home.exists()
    # What a start without keys may have written there.
    folder = tmp_path / "cache" / "models" / run
    folder.mkdir(parents=True)
    (folder / "stranger.jinja").touch()
    serve("--bucket", url, "--trusted-keys", str(tmp_path / "signer.pub"), *state, "--trust-remote-code")
    assert not (folder / "stranger.jinja").exists()
    assert (folder / "config.json").exists()
