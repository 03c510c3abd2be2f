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
from tests.support.commands import _variables, answer, delta_sync, envelope, kind, parsed, shown
from tests.support.publishing import assert_versions
from tests.support.running import eventually, run_python, without_rights_of_root
from vllm_delta_sync import open_run
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME
from vllm_delta_sync.trust.keys import generate

START = (
    "import signal, sys\n"
    # Inherited as ignored where the tests run in the background of a shell without job control.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "import os, time\n"
    "from vllm_delta_sync import cli\n"
    "from vllm_delta_sync.bucket.local import LocalBucket\n"
    "put, seconds = LocalBucket.put, float(os.environ.get('SECONDS_PER_OBJECT', '0'))\n"
    "def slow(bucket, key, *given, **named):\n"
    "    time.sleep(seconds if key.startswith('objects/') else 0)\n"
    "    put(bucket, key, *given, **named)\n"
    "LocalBucket.put = slow\n"
    "sys.exit(cli.main())\n"
)
"""The command, over a store that takes so long for each object."""


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
        "full_bytes": head.full_bytes, "reason": "",
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
    for option in ("--from", "--watch"):  # looking at a name that is too long fails, as in a folder of another user
        assert kind(3, "publish", option, tmp_path / ("long" * 100), "--bucket", run) == "not_found"
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
    assert kind(2, *publish, other) == "usage"
    assert kind(1, *publish, other, "--step", 5) == "tensor"
    assert kind(2, "publish", "--watch", out, "--step", 5, "--bucket", run) == "usage"
    assert kind(2, *publish, folder, "--grace", 5) == "usage"
    assert kind(3, *publish, folder, "--base", tmp_path / "none") == "not_found"
    assert kind(5, *publish, folder, "--expect-run", 32 * "0") == "conflict"
    assert kind(2, "publish", "--bucket", tmp_path / "none", "--from", folder, "--expect-run", 32 * "0") == "usage"
    assert answer(*publish, folder, "--expect-run", open_run(str(run)).info.run)["outcome"] == "unchanged"
    (tmp_path / "file").write_bytes(b"")
    assert kind(4, "publish", "--from", folder, "--bucket", tmp_path / "file") == "store"
    assert_versions(str(run), [weights(1)])


def test_a_folder_that_this_user_may_not_read(out: Path, run: Path) -> None:
    folder = write_checkpoint(out / "checkpoint-1", weights(1))
    program = (
        "import os, sys\n"
        "from vllm_delta_sync import cli\n"
        "for mode in (0o300, 0o600):\n"  # without its names; with nothing but its names
        "    os.chmod(sys.argv[1], mode)\n"
        "    assert cli.run(['publish', '--from', sys.argv[1], '--bucket', sys.argv[2]]) == 4\n"
    )
    done = run_python("-c", program, str(folder), str(run), prefix=without_rights_of_root())
    folder.chmod(0o700)
    assert done.stderr == 2 * f"delta-sync: store: folder '{folder}' cannot be read: Permission denied\n"


def test_what_is_complete_now(out: Path, run: Path, tmp_path: Path) -> None:
    watch = ("publish", "--watch", out, "--bucket", run, "--once", "--poll", "0.1")
    document = envelope(*watch, code=1)
    assert document["data"] == {"checkpoints": [], "refused": [], "left_out": []}
    assert document["error"]["message"] == f"nothing is published from {out}: there is no checkpoint folder in it"
    assert not run.exists()
    for step in (30, 4):
        write_checkpoint(out / f"checkpoint-{step}", weights(step))
    half = out / "checkpoint-5"
    half.mkdir()
    shards = shards_of(weights(5))
    save_file(next(iter(shards.values())), half / next(iter(shards)))
    (half / INDEX_NAME).write_text(index_of(shards))
    report = answer(*watch)
    found = report["checkpoints"]
    assert [row["checkpoint"] for row in report["left_out"]] == ["checkpoint-5"]
    assert [(row["checkpoint"], row["outcome"], row["version"], row["step"]) for row in found] == [
        (str(out / "checkpoint-4"), "published", 0, 4),
        (str(out / "checkpoint-30"), "published", 1, 30),
    ]
    write_checkpoint(out / "checkpoint-40", {"x": weights(1)["model.steps"]})
    report = answer(*watch, code=1)
    assert [row["outcome"] for row in report["checkpoints"]] == ["older", "older"]
    assert [row["checkpoint"] for row in report["refused"]] == ["checkpoint-40"]
    text = f"{out / 'checkpoint-4'}: not published: it was published before, and version 1 (step 30) is newer\n"
    assert text in shown(*watch, code=1)
    assert_versions(str(run), [weights(4), weights(30)])


def test_nothing_published_says_why(out: Path, run: Path, tmp_path: Path) -> None:
    """Each folder that is left out with its reason; but what the run has already is no failure."""
    watch = ("publish", "--watch", out, "--bucket", run, "--once", "--poll", "0.1")
    write_checkpoint(out / "Qwen3-0.6B-v2025", weights(0))
    sharded = out / "global_step_10" / "actor" / "model_world_size_2_rank_0.pt"
    sharded.parent.mkdir(parents=True)
    sharded.write_bytes(b"x")
    report = envelope(*watch, code=1)
    assert report["error"]["kind"] == "incomplete"
    reasons = {row["checkpoint"]: row["message"] for row in report["data"]["left_out"]}
    assert reasons.keys() == {"Qwen3-0.6B-v2025", "global_step_10"}
    assert "no step is in its name" in reasons["Qwen3-0.6B-v2025"]
    assert "docs/publish.md" in reasons["global_step_10"]
    done = delta_sync(*watch)
    assert (done.code, done.out) == (1, "")
    assert all(f"{name}: {reason}" in done.err for name, reason in reasons.items())
    assert not run.exists()
    write_checkpoint(out / "global_step_10" / "actor" / "huggingface", weights(10))
    (row,) = answer(*watch)["checkpoints"]
    assert (row["checkpoint"], row["step"]) == (str(out / "global_step_10"), 10)
    (row,) = answer(*watch)["checkpoints"]
    assert (row["outcome"], row["reason"] != "") == ("older", True)
    text = shown("publish", "--from", out / "global_step_10", "--bucket", run)
    assert text.endswith("not published: its weights are those of version 0\n")
    assert_versions(str(run), [weights(10)])


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


@pytest.mark.parametrize(("number", "code"), [pytest.param("SIGINT", 130, marks=pytest.mark.slow), ("SIGTERM", 143)])
def test_one_checkpoint_ends_by_a_signal_with_its_code(number: str, code: int, out: Path, run: Path) -> None:
    """In the middle of version 1; what was published before is whole."""
    first, second = (
        write_checkpoint(out / "checkpoint-1", weights(1)),
        write_checkpoint(out / "checkpoint-2", weights(2)),
    )
    delta_sync("publish", "--from", first, "--bucket", run)
    program = (
        "import os, signal, sys, time\n"
        "from trainer_side.session import PublishSession\n"
        "from vllm_delta_sync import cli\n"
        "def slow(*arguments, **options):\n"
        f"    os.kill(os.getpid(), signal.{number})\n"
        "    time.sleep(60)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "PublishSession.publish = slow\n"
        f"sys.argv[1:] = ['publish', '--from', {str(second)!r}, '--bucket', {str(run)!r}]\n"
        "sys.exit(cli.main())\n"
    )
    assert run_python("-c", program, code=code).stderr == ""
    assert_versions(str(run), [weights(1)])


SIGNALS = [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 0)]


@pytest.mark.parametrize(("ends", "code"), SIGNALS)
def test_a_signal_ends_it_once_the_last_checkpoint_is_published(
    ends: signal.Signals, code: int, out: Path, run: Path
) -> None:
    """It appears after the last poll: a trainer and this command get the signal at the same time."""
    write_checkpoint(out / "checkpoint-1", weights(1))
    with watching(out, run, "--json", "--poll", "1") as command:
        assert command.stdout is not None
        assert parsed(command.stdout.readline())["data"]["version"] == 0
        write_checkpoint(out / "checkpoint-2", weights(2))
        row = parsed(command.stdout.readline())["data"]
        assert (row["version"], row["step"], row["outcome"]) == (1, 2, "published")
        write_checkpoint(out / "checkpoint-3", weights(3))
        command.send_signal(ends)
        rest, said = command.communicate(timeout=300)
        assert (command.returncode, said) == (code, "")
        assert [parsed(line)["data"]["step"] for line in rest.splitlines()] == [3]
    assert_versions(str(run), [weights(1), weights(2), weights(3)])


@pytest.mark.parametrize(
    ("ends", "second", "code"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, None, 1, marks=pytest.mark.slow),
    ],
)
def test_what_is_left_at_the_end_is_named(
    ends: signal.Signals, second: signal.Signals | None, code: int, out: Path, run: Path
) -> None:
    """After the grace period, and at once after a second signal, in the middle of an upload that takes minutes."""
    delta_sync("publish", "--from", write_checkpoint(out / "checkpoint-1", weights(1)), "--bucket", run)
    write_checkpoint(out / "checkpoint-200", weights(200))
    grace = "1" if second is None else "1h"
    with watching(out, run, "--grace", grace, SECONDS_PER_OBJECT="240") as command:
        eventually(lambda: any((run / "claims").glob("*")))
        command.send_signal(ends)
        if second is not None:
            time.sleep(0.5)
            command.send_signal(second)
        _, said = command.communicate(timeout=300)
        assert command.returncode == code
    assert said.endswith("incomplete: not published: checkpoint-200; the same command continues\n")
    assert open_run(str(run)).verify().replayed
    shown("publish", "--watch", out, "--bucket", run, "--once", "--poll", "0.1")
    assert_versions(str(run), [weights(1), weights(200)])


@pytest.mark.parametrize(
    ("ends", "seconds"),
    [
        (signal.SIGTERM, 1.5),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow),
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
    with watching(out, run, SECONDS_PER_OBJECT="4") as command:
        eventually(lambda: any((run / "claims").glob("*")))
        time.sleep(seconds)
        assert open_run(str(run)).head().version == 0
        command.send_signal(ends)
        command.communicate(timeout=300)
        assert command.returncode == {signal.SIGINT: 130, signal.SIGTERM: 0}[ends]
    assert open_run(str(run)).verify().replayed
    shown("publish", "--watch", out, "--bucket", run, "--once", "--poll", "0.1")
    assert_versions(str(run), [weights(1), weights(200)])
