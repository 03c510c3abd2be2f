"""Scratch files of compaction: gone whatever ends it, and a clear error where there is no room."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.written import Written
from vllm_delta_sync.chain.lazy import scratch_folder
from vllm_delta_sync.errors import (
    StoreError,
)
from vllm_delta_sync.upkeep.compaction import StoppedError, make_anchor, make_fold


def objects(folder: Path) -> set[str]:
    return {file.name for file in (folder / "objects").iterdir()}


def test_being_stopped_leaves_nothing(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 4)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = objects(written.folder)
    for times in range(6):
        asked = iter([False] * times)
        with pytest.raises(StoppedError):
            make_fold(written.run, 0, 4, scratch=scratch, stop=lambda asked=asked: next(asked, True))  # type: ignore[misc]
    with pytest.raises(StoppedError):
        make_anchor(written.run, 4, scratch=scratch, stop=lambda: True)
    assert not list(scratch.iterdir())
    assert objects(written.folder) == before
    assert not written.run.folds()
    assert not written.run.anchors()


def test_an_interrupt_leaves_no_scratch(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 4)
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    class Interrupted(type(written.bucket)):  # type: ignore[misc]
        def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
            assert list(scratch.iterdir())
            raise KeyboardInterrupt

    run = written.run
    run.bucket = Interrupted(written.folder)
    with pytest.raises(KeyboardInterrupt):
        make_fold(run, 0, 4, scratch=scratch)
    with pytest.raises(KeyboardInterrupt):
        make_anchor(run, 4, scratch=scratch)
    assert not list(scratch.iterdir())


def test_no_room_for_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(tmp_path / "run", 4)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=100))
    with pytest.raises(StoreError, match="bytes of scratch"):
        make_fold(written.run, 0, 4)
    with pytest.raises(StoreError, match="bytes of scratch"):
        make_anchor(written.run, 4)


SMALL_FILES = """
import resource, sys
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.upkeep.compaction import make_fold
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.wire.kernels import add_distances
from vllm_delta_sync.wire import fold_kernels
run = open_run(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    make_fold(run, 0, 4, scratch=sys.argv[3])
except StoreError as error:
    print(error)
"""


def test_scratch_that_fills_up(tmp_path: Path) -> None:
    """Files may become as large as each part, not as all together."""
    written = Written(tmp_path / "run", 0)
    for _ in range(4):
        written.publish(share=0.2)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    most = max(manifest.payload_bytes for manifest in written.writer.manifests[1:]) + 100
    arguments = [str(written.folder), str(most), str(scratch)]
    done = subprocess.run([sys.executable, "-c", SMALL_FILES, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cannot be written: File too large; free space there" in done.stdout
    assert not list(scratch.iterdir())
    assert not written.run.folds()


HOLD = """
import sys
from vllm_delta_sync.chain.lazy import scratch_folder
with scratch_folder(sys.argv[1], "a test", 0) as folder:
    (folder / "left").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_scratch_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    """And that of a living one is left alone."""
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    folders = []
    for owner in owners:
        assert owner.stdout is not None
        folders.append(Path(owner.stdout.readline().strip()))
    owners[0].kill()
    owners[0].wait()
    (tmp_path / "delta-sync-scratch-new").mkdir()
    assert all((folder / "left").exists() for folder in folders)
    with scratch_folder(tmp_path, "a test", 0) as mine:
        assert {mine, folders[1], tmp_path / "delta-sync-scratch-new"} == set(tmp_path.iterdir())
    owners[1].communicate(timeout=300)
    assert list(tmp_path.iterdir()) == [tmp_path / "delta-sync-scratch-new"]
