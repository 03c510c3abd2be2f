"""``delta-sync publish`` on checkpoint folders: what it prints, its errors, and how it ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support.checkpoints import index_of, shards_of, weights, write_checkpoint
from tests.support.commands import _variables, answer, delta_sync, kind, parsed, shown
from tests.support.publishing import assert_versions
from tests.support.running import eventually
from vllm_delta_sync import open_run
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME
from vllm_delta_sync.trust.keys import generate

START = (
    "import signal, sys\n"
    # Inherited as ignored where the tests run in the background of a shell without job control.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from vllm_delta_sync import cli\n"
    "sys.exit(cli.main())\n"
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_folder_begins_a_run_or_takes_it_over(out: Path, run: Path) -> None:
    folder = write_checkpoint(out / "checkpoint-10", weights(10))
    document = answer("publish", "--from", folder, "--bucket", run)
    seconds = document.pop("seconds")
    assert seconds > 0
    head = open_run(str(run)).head()
    assert document == {
        "run": head.run, "checkpoint": str(folder), "outcome": "published", "version": 0, "step": 10,
        "kind": "anchor", "changed": head.total, "total": head.total, "payload_bytes": head.payload_bytes,
        "full_bytes": head.full_bytes,
    }  # fmt: skip
    text = shown("publish", "--from", folder, "--bucket", run)
    assert text == f"{folder}: not published: its weights are those of version 0\n"
    other = write_checkpoint(out / "checkpoint-20", weights(20))
    text = shown("publish", "--from", other, "--step", "7", "--codec", "raw", DELTA_SYNC_BUCKET=str(run))
    assert text.startswith(f"{other}: version 1 (step 7), ")
    assert " % changed, " in text
    held = assert_versions(str(run), [weights(10), weights(20)])
    assert [(manifest.step, manifest.codec) for manifest in held.log()] == [(10, None), (7, "raw")]


def test_errors(out: Path, run: Path, tmp_path: Path) -> None:
    publish = ("publish", "--bucket", run, "--from")
    assert kind(3, *publish, out) == "not_found"
    assert kind(3, *publish, out / "none") == "not_found"
    assert kind(3, "publish", "--bucket", run, "--watch", out / "none") == "not_found"
    folder = write_checkpoint(out / "checkpoint-1", weights(1), sharded=True)
    missing = next(folder.glob("model-00002*"))
    missing.rename(tmp_path / missing.name)
    done = delta_sync(*publish, folder)
    assert done.err == (f"delta-sync: format: checkpoint '{folder}' is not complete: {missing.name} is missing\n")
    assert done.code == 1
    assert not run.exists()
    (tmp_path / missing.name).rename(missing)
    answer(*publish, folder)
    other = write_checkpoint(out / "other", {"x": weights(1)["model.steps"]})
    assert kind(1, *publish, other) == "tensor"
    assert kind(3, *publish, folder, "--base", tmp_path / "none") == "not_found"
    (tmp_path / "file").write_bytes(b"")
    assert kind(4, "publish", "--from", folder, "--bucket", tmp_path / "file") == "store"
    assert_versions(str(run), [weights(1)])


def test_what_is_complete_now(out: Path, run: Path, tmp_path: Path) -> None:
    watch = ("publish", "--watch", out, "--bucket", run, "--once", "--poll", "0.1")
    assert answer(*watch) == {"checkpoints": [], "refused": []}
    assert not run.exists()
    for step in (30, 4):
        write_checkpoint(out / f"checkpoint-{step}", weights(step))
    half = out / "checkpoint-5"
    half.mkdir()
    shards = shards_of(weights(5))
    save_file(next(iter(shards.values())), half / next(iter(shards)))
    (half / INDEX_NAME).write_text(index_of(shards))
    found = answer(*watch)["checkpoints"]
    assert [(row["checkpoint"], row["outcome"], row["version"], row["step"]) for row in found] == [
        (str(out / "checkpoint-4"), "published", 0, 4),
        (str(out / "checkpoint-30"), "published", 1, 30),
    ]
    write_checkpoint(out / "checkpoint-40", {"x": weights(1)["model.steps"]})
    report = answer(*watch, code=1)
    assert [row["outcome"] for row in report["checkpoints"]] == ["older", "older", "older"]
    assert [row["checkpoint"] for row in report["refused"]] == ["checkpoint-40"]
    assert f"{out / 'checkpoint-4'}: not published: version 1 is as new or newer\n" in shown(*watch, code=1)
    assert_versions(str(run), [weights(4), weights(30)])


def test_a_signed_run(out: Path, run: Path, tmp_path: Path) -> None:
    generate(tmp_path / "key")
    folder = write_checkpoint(out / "checkpoint-1", weights(1))
    answer("publish", "--from", folder, "--bucket", run, "--signing-key", tmp_path / "key")
    assert answer("verify", "--bucket", run, "--trusted-keys", tmp_path / "key.pub")["verdict"]
    other = write_checkpoint(out / "checkpoint-2", weights(2))
    assert kind(1, "publish", "--from", other, "--bucket", run) == "signature"
    answer("publish", "--watch", out, "--once", "--poll", "0.1", DELTA_SYNC_BUCKET=str(run),
           DELTA_SYNC_SIGNING_KEY=str(tmp_path / "key"))  # fmt: skip
    assert answer("verify", "--bucket", run, "--trusted-keys", tmp_path / "key.pub")["head"] == 1


# In a process of its own


@contextmanager
def watching(out: Path, run: Path, *more: str, **settings: str) -> Iterator["subprocess.Popen[str]"]:
    arguments = ["publish", "--watch", str(out), "--bucket", str(run), "--poll", "0.1", *more]
    command = [sys.executable, "-c", START, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_variables(settings)
    ) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize(("ends", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_it_between_two_polls(ends: signal.Signals, code: int, out: Path, run: Path) -> None:
    write_checkpoint(out / "checkpoint-1", weights(1))
    with watching(out, run, "--json") as command:
        assert command.stdout is not None
        assert parsed(command.stdout.readline())["data"]["version"] == 0
        write_checkpoint(out / "checkpoint-2", weights(2))
        row = parsed(command.stdout.readline())["data"]
        assert (row["version"], row["step"], row["outcome"]) == (1, 2, "published")
        command.send_signal(ends)
        rest = command.communicate(timeout=300)
        assert (command.returncode, rest) == (code, ("", ""))
    assert_versions(str(run), [weights(1), weights(2)])


@pytest.mark.parametrize(
    ("ends", "seconds"),
    [
        (signal.SIGINT, 0),
        (signal.SIGTERM, 1.5),
        pytest.param(signal.SIGINT, 1.5, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_the_middle_of_a_version_leaves_the_run_whole(
    ends: signal.Signals, seconds: float, out: Path, run: Path
) -> None:
    """While the run is taken over, and while the object of the version is uploaded, which takes some seconds."""
    delta_sync("publish", "--from", write_checkpoint(out / "checkpoint-1", weights(1)), "--bucket", run)
    write_checkpoint(out / "checkpoint-200", weights(200))
    with watching(out, run, DELTA_SYNC_STORE_UPLOAD_LIMIT="2000") as command:
        eventually(lambda: any((run / "claims").glob("*")))
        time.sleep(seconds)
        assert open_run(str(run)).head().version == 0
        command.send_signal(ends)
        command.communicate(timeout=300)
        assert command.returncode == {signal.SIGINT: 130, signal.SIGTERM: 0}[ends]
    assert open_run(str(run)).verify().replayed
    shown("publish", "--watch", out, "--bucket", run, "--once", "--poll", "0.1")
    assert_versions(str(run), [weights(1), weights(200)])
