"""``delta-sync doctor``, run as a user runs it."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import GOLDEN, delta_sync
from tests.cli.test_doctor_server import WELL, answering
from tests.golden.regenerate import DIRECTORY
from tests.support.publishing import keys
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.upkeep.doctor import BUCKET_CHECKS, SERVER_CHECKS

COMMAND = [sys.executable, "-m", "vllm_delta_sync.cli", "doctor"]


def lines_of(text: str) -> dict[str, tuple[str, str]]:
    """Check → mark, and what is said."""
    found = re.findall(r"^(\S) ([a-z-]+(?: [a-z]+)?)  +(.*)$", text, re.MULTILINE)
    return {check: (mark, said) for mark, check, said in found}


def run_as(arguments: list[str], prefix: Sequence[str] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DELTA_SYNC_")}
    return subprocess.run(
        [*prefix, *COMMAND, *arguments], capture_output=True, text=True, timeout=600, env=kept, **options
    )


def test_for_people(tmp_path: Path) -> None:
    run = shutil.copytree(DIRECTORY, tmp_path / "run")
    done = delta_sync("doctor", "--bucket", str(run), "--bytes", "1000000", PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    lines = lines_of(done.stdout)
    assert list(lines) == list(BUCKET_CHECKS)
    assert {mark for mark, _ in lines.values()} == {"✓", "·"}
    assert (
        len({line.index(said) for line, (_, said) in zip(done.stdout.splitlines(), lines.values(), strict=False)}) == 1
    )
    assert "what to do" not in done.stdout
    assert done.stdout.splitlines()[-1] == "0 failed, 0 warnings, 15 well, 2 skipped"


def test_in_ascii(tmp_path: Path) -> None:
    done = delta_sync("doctor", "--bucket", str(tmp_path / "no"), "--bytes", "0", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "\\" not in done.stdout
    assert {mark for mark, _ in lines_of(done.stdout).values()} == {"+", "!", "-"}
    assert re.search(r"^  url  +The first publisher makes it; .*\.$", done.stdout, re.MULTILINE)


def test_as_json(tmp_path: Path) -> None:
    run = shutil.copytree(DIRECTORY, tmp_path / "run")
    with answering({"/health": (200, b""), "/delta_sync/status": (200, json.dumps(WELL).encode())}) as url:
        done = delta_sync("doctor", "--bucket", str(run), "--bytes", "0", "--server", url, "--json")
    document = json.loads(done.stdout)
    assert [row["check"] for row in document["findings"]] == [*BUCKET_CHECKS, *SERVER_CHECKS]
    assert {"check", "verdict", "kind", "said", "mend", "figures"} == set(document["findings"][0])
    # The golden run is another one than the server says that it follows.
    assert (document["verdict"], document["error"]["kind"], document["exit_code"]) == (False, "chain", 1)
    assert (done.returncode, done.stderr) == (1, "")
    verdicts = {row["check"]: row["verdict"] for row in document["findings"]}
    assert verdicts["same run"] == "failed"
    assert verdicts["lag"] == "skipped"


def test_the_first_failure_decides(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for arguments, code, word in (
        (["--bucket", str(tmp_path / "none"), "--read-only"], 3, "does not exist"),
        (["--bucket", str(tmp_path / "file")], 4, "directory"),
        (["--bucket", GOLDEN, "--read-only", "--server", "http://127.0.0.1:9"], 4, "Connection refused"),
        (["--bucket", GOLDEN, "--read-only", "--server", "nonsense"], 2, "http://host:8000"),
    ):
        done = delta_sync("doctor", *arguments, PYTHONIOENCODING="utf-8")
        assert done.returncode == code, done.stdout
        failed = [said for mark, said in lines_of(done.stdout).values() if mark == "✗"]
        assert len(failed) == 1
        assert word in failed[0]
        assert "--keep-going" in done.stdout


def test_usage() -> None:
    wrong = delta_sync("doctor", "--bucket", "gopher://x")
    assert wrong.returncode == 2
    assert "setting 'bucket': bucket URL 'gopher://x' has the unknown scheme 'gopher'" in wrong.stderr
    for arguments in ([], ["--bucket", GOLDEN, "--bytes", "-1"], ["--bucket", GOLDEN, "--bytes", "1MB"]):
        assert delta_sync("doctor", *arguments).returncode == 2
    done = delta_sync("doctor", "--bucket", GOLDEN, DELTA_SYNC_STORE_DEADLINE="soon")
    assert done.returncode == 2
    assert "DELTA_SYNC_STORE_DEADLINE" in done.stderr
    done = delta_sync("doctor", "--bucket", GOLDEN, DELTA_SYNC_CACHE_DIR="/tmp", DELTA_SYNC_CACHE_BYTES="much")
    assert "setting 'cache_bytes' is 'much'" in done.stderr


def test_mirror_and_cache_from_the_environment(tmp_path: Path) -> None:
    done = delta_sync(
        *("doctor", "--bucket", GOLDEN, "--read-only", "--json"),
        DELTA_SYNC_MIRROR=str(tmp_path),
        DELTA_SYNC_CACHE_DIR=str(tmp_path / "cache"),
        DELTA_SYNC_CACHE_BYTES="5",
    )
    found = {row["check"]: row for row in json.loads(done.stdout)["findings"]}
    assert found["mirror"]["verdict"] == "warning"
    assert found["cache"]["figures"]["cache_bytes"] == 5
    assert done.returncode == 0


def test_a_directory_that_may_only_be_read(tmp_path: Path) -> None:
    run = shutil.copytree(DIRECTORY, tmp_path / "run")
    for folder in (run, *(path for path in run.iterdir() if path.is_dir())):
        folder.chmod(0o555)
    # Modes mean nothing to root, unless it gives up what makes it so.
    plain = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    if plain and subprocess.run([*plain, "true"], capture_output=True).returncode:
        pytest.skip("setpriv does not work here")
    done = run_as(["--bucket", str(run), "--keep-going"], plain)
    lines = lines_of(done.stdout)
    assert (done.returncode, lines["put"][0]) == (4, "✗"), done.stdout + done.stderr
    assert "give this user access" in lines["put"][1]
    assert "--read-only" in done.stdout
    assert lines["run"][0] == "✓"
    assert run_as(["--bucket", str(run), "--read-only"], plain).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_file_system(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", mount], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        done = run_as(["--bucket", str(mount), "--bytes", "1000000"])
        assert done.returncode == 4
        assert "free some space there" in lines_of(done.stdout)["throughput"][1]
        assert keys(str(mount)) == set()
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_file_size_limit(tmp_path: Path) -> None:
    done = run_as(["--bucket", str(tmp_path)], preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)))
    assert done.returncode == 4
    assert "ulimit -f" in lines_of(done.stdout)["put"][1]
    limit = 1_000_000
    done = run_as(
        ["--bucket", str(tmp_path), "--bytes", "2000000"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 4
    assert "give less --bytes" in lines_of(done.stdout)["throughput"][1]
    assert keys(str(tmp_path)) == set()


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """The signal comes while a large object is made or moved."""
    run = tmp_path / "run"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [*COMMAND, "--bucket", str(run), "--bytes", "500000000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if "latency" in line:
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr.read() == ""
    process.stdout.close()
    process.stderr.close()
    assert keys(str(run)) == set()


def test_what_is_shown_is_harmless(tmp_path: Path) -> None:
    evil = {**WELL, "state": "refused", "served": None, "last_error": {"kind": "store", "message": "\x1b[2Jboo"}}
    with answering({"/health": (200, b""), "/delta_sync/status": (200, json.dumps(evil).encode())}) as url:
        done = delta_sync("doctor", "--bucket", GOLDEN, "--read-only", "--server", url)
    assert "\x1b" not in done.stdout
    assert "boo" in done.stdout


def test_a_run_is_the_same_before_and_after(tmp_path: Path) -> None:
    run = shutil.copytree(DIRECTORY, tmp_path / "run")
    before = keys(str(run))
    assert delta_sync("doctor", "--bucket", str(run), "--bytes", "1000").returncode == 0
    assert keys(str(run)) == before
    assert all(open_bucket(run).get(key) == open_bucket(DIRECTORY).get(key) for key in before)
    assert delta_sync("verify", "--bucket", str(run)).returncode == 0
