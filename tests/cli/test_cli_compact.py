"""``delta-sync compact``, run as a user runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import answer, delta_sync
from tests.support.written import Written
from vllm_delta_sync.chain.plan import path
from vllm_delta_sync.chain.read import restore
from vllm_delta_sync.cli.compact import _stopping
from vllm_delta_sync.upkeep.compaction_scratch import check_stop


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "run", 17)


def test_help() -> None:
    done = delta_sync("compact", "--help")
    assert done.returncode == 0
    for word in ("examples:", "--json", "--dry-run", "--anchor N|head|tag:NAME", "--no-folds", "Ctrl-C"):
        assert word in done.stdout


def test_folds_and_an_anchor(written: Written) -> None:
    url = str(written.folder)
    planned = answer("compact", "--bucket", url, "--anchor", "16", "--dry-run")
    assert planned["dry_run"]
    assert not written.run.folds()
    document = answer("compact", DELTA_SYNC_BUCKET=url)
    pairs = [(row["first"], row["last"]) for row in document["folds"]]
    assert pairs == [(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)]
    assert planned["folds"] == document["folds"]
    assert document["bytes"] > 0
    assert (document["head"], document["skipped"], document["anchor"]) == (17, [], None)
    for pair in pairs:
        written.check(*pair)
    assert len(path(written.run, 0, 17)) == 2
    anchored = answer("compact", "--bucket", url, "--no-folds", "--anchor", "head")
    assert (anchored["anchor"], anchored["anchor_present"], anchored["folds"]) == (17, False, [])
    assert restore(written.run, written.run.head()).plan.beside


def test_text(written: Written) -> None:
    url = str(written.folder)
    written.lose(written.writer.manifests[6].objects[0].key)
    text = delta_sync("compact", "--bucket", url, "--dry-run").stdout
    assert "5 to make, 0 were there" in text
    assert text.splitlines()[-1].split() == ["0", "16"]
    done = delta_sync("compact", "--bucket", url, "--anchor", "4")
    assert (done.returncode, done.stderr) == (1, "")
    assert "folded ranges  3 made, 0 were there" in done.stdout
    assert "anchor         of version 4, made" in done.stdout
    assert "skipped versions 4 to 8: no object" in done.stdout
    again = delta_sync("compact", "--bucket", url, "--anchor", "4").stdout
    assert "anchor         of version 4, was there" in again


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--no-folds"], 2, "leaves nothing to do"),
        (["--anchor", "-1"], 2, "--anchor"),
        (["--anchor", "best"], 2, "is no version"),
        (["--anchor", "18"], 3, "version 18 is not published"),
        (["--anchor", "tag:none"], 3, "no tag 'none'"),
        (["--scratch", "/nowhere"], 4, "scratch folder"),
    ],
)
def test_refused(written: Written, arguments: list[str], code: int, message: str) -> None:
    done = delta_sync("compact", "--bucket", str(written.folder), *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_run(tmp_path: Path) -> None:
    assert delta_sync("compact").returncode == 2
    assert delta_sync("compact", "--bucket", str(tmp_path / "none")).returncode == 3


def test_the_first_interrupt_asks_and_the_second_one_ends() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _stopping() as stop:
            assert not stop()
            os.kill(os.getpid(), signal.SIGINT)
            assert stop()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            _ask_and_stop()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with _stopping() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
    finally:
        signal.signal(signal.SIGINT, before)


def _ask_and_stop() -> None:
    with _stopping() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        check_stop(stop)


def test_ended_in_the_middle(written: Written, tmp_path: Path) -> None:
    """Ctrl-C leaves the run whole, nothing in the scratch folder, and the rest for the next time."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for _ in range(64 - 17):
        written.publish(share=0.001)
    command = [sys.executable, "-m", "vllm_delta_sync.cli", "compact", "--bucket", str(written.folder)]
    process = subprocess.Popen(
        [*command, "--scratch", str(scratch)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background of a shell has told children to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    folds = written.folder / "folds"
    while not (folds.is_dir() and any(folds.iterdir())) and process.poll() is None:
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not list(scratch.iterdir())
    made = written.run.folds()
    assert 0 < len(made) < 21
    for pair in made:
        written.check(*pair)
    document = answer("compact", "--bucket", str(written.folder))
    assert document["folds_present"] == len(made)
    assert len(made) + len(document["folds"]) == 21
