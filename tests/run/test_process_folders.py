"""A temporary folder stays while a process uses it, and is removed after that, however the process ends."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.running import run_python
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.process_folders import PREFIX, ProcessFolder, hold_folder, remove_abandoned
from vllm_delta_sync.run.objects import scratch_folder
from vllm_delta_sync.run.restore import scratch_file

SECONDS = 120
OWNERS = {
    "temporary": """
from vllm_delta_sync.process_folders import ProcessFolder
folder = ProcessFolder().path
""",
    "scratch": """
from vllm_delta_sync.run.objects import scratch_folder
block = scratch_folder(None, "a test", 0)
folder = block.__enter__()
""",
    "adapter": """
from pathlib import Path
from vllm_delta_sync.engine.api.adapters import make_adapter
folder = Path(make_adapter("math").folder)
""",
    # One of two API servers; this process stands for the one that starts both.
    "API servers": """
import multiprocessing, os
from types import SimpleNamespace
from vllm_delta_sync.engine.api.api_servers import find_api_server_group
multiprocessing.parent_process = lambda: SimpleNamespace(pid=os.getpid())
client = SimpleNamespace(engine_core=SimpleNamespace(client_index=0, client_count=2))
group = find_api_server_group(client)
folder = group.folder
os.close(group.open_lock())
""",
}
"""What makes a folder, in a process of its own."""
SLOW = ("adapter", "API servers")
"""These import the engine first."""
REPORT = """
import json, os, sys
(folder / "left").write_bytes(b"x")
print(json.dumps({"folder": str(folder), "pid": os.getpid()}), flush=True)
"""
WAIT = "sys.stdin.read()\n"
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
"""Another container, as far as ids of processes and of users go."""


class Owner:
    """A process that made a folder and lives on, until it is killed."""

    def __init__(self, root: Path, program: str, prefix: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(root)},
            start_new_session=True,
        )

    def hear(self) -> None:
        """Where it made the folder, once it has."""
        assert self._process.stdout is not None
        self.said = json.loads(self._process.stdout.readline())
        self.folder = Path(self.said["folder"])

    @property
    def is_there(self) -> bool:
        """Whether the folder is as it was made."""
        return (self.folder / "left").exists()

    def kill(self) -> None:
        """It, and all that it started in its session; returns once they have ended, and their locks with them."""
        started = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(SECONDS)
        _, running = psutil.wait_procs(started, SECONDS)
        assert not running

    def end(self) -> None:
        """As a program ends that has nothing left to do."""
        self._process.communicate(timeout=SECONDS)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path: that of a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


class Owners(list[Owner]):
    """All of a test."""

    def begin(self, root: Path, program: str, prefix: Sequence[str] = (), count: int = 1) -> None:
        """Start some at once; returns when each has made its folder."""
        begun = [Owner(root, program, prefix) for _ in range(count)]
        self += begun
        for owner in begun:
            owner.hear()


@pytest.fixture
def owners() -> Iterator[Owners]:
    found = Owners()
    yield found
    for owner in found:
        owner.kill()


def test_a_folder_is_removed_with_its_block_and_with_its_process(tmp_path: Path, owners: Owners) -> None:
    with ProcessFolder(tmp_path) as mine:
        assert not list(mine.path.iterdir())
        assert {path.stat().st_mode & 0o777 for path in (mine.path, mine.path.parent)} == {0o700}
        (mine.path / "file").touch()
    assert not list(tmp_path.iterdir())
    owners.begin(tmp_path, OWNERS["temporary"] + REPORT + WAIT)
    [owner] = owners
    assert owner.is_there
    owner.end()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind", ["temporary", "scratch", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)]
)
def test_what_a_killed_process_left_goes_and_what_is_used_stays(short: Path, owners: Owners, kind: str) -> None:
    program = OWNERS[kind] + REPORT + WAIT
    owners.begin(short, program, count=2)
    killed, alive = owners
    assert killed.folder != alive.folder
    killed.kill()
    assert killed.is_there
    owners.begin(short, program)
    assert [owner.is_there for owner in owners] == [False, True, True]
    assert len(list(short.iterdir())) == 2
    for owner in owners:
        owner.kill()
    remove_abandoned(short)
    assert not list(short.iterdir())


@pytest.mark.parametrize("kind", ["temporary", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_a_process_of_another_container_counts_as_running(short: Path, owners: Owners, kind: str) -> None:
    """Its id is that of another process here, or of no process."""
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], check=False).returncode != 0:
        pytest.skip("this machine makes no namespace for processes")
    program = OWNERS[kind] + REPORT + WAIT
    owners.begin(short, program, NAMESPACE)
    assert owners[0].said["pid"] < 10
    owners.begin(short, program)
    assert [owner.is_there for owner in owners] == [True, True]
    # And the other way round.
    owners.begin(short, program, NAMESPACE)
    assert len({owner.folder for owner in owners}) == 3
    assert [owner.is_there for owner in owners] == [True, True, True]
    owners[0].kill()
    owners.begin(short, program)
    assert [owner.is_there for owner in owners] == [False, True, True, True]


FORKED = """
child = os.fork()
if not child:
    if {ends}:
        sys.exit()
    time.sleep(600)
if {ends}:
    os.waitpid(child, 0)
print(json.dumps(child), flush=True)
"""


@pytest.mark.parametrize("ends", [True, False])
def test_a_forked_child_keeps_the_folder_beyond_its_parent(tmp_path: Path, owners: Owners, ends: bool) -> None:
    program = OWNERS["temporary"] + REPORT + "import time\n" + FORKED.format(ends=ends) + WAIT
    owners.begin(tmp_path, program)
    [owner] = owners
    assert owner._process.stdout is not None
    child = json.loads(owner._process.stdout.readline())
    assert owner.is_there
    os.kill(owner._process.pid, signal.SIGKILL)
    owner._process.wait(SECONDS)
    remove_abandoned(tmp_path)
    assert owner.is_there == (not ends)
    if not ends:
        os.kill(child, signal.SIGKILL)
        while owner.is_there:
            remove_abandoned(tmp_path)


def test_a_second_process_keeps_the_folder_of_a_first(tmp_path: Path, owners: Owners) -> None:
    """As a worker does that writes into the folder of an API server, or of one on another node."""
    owners.begin(tmp_path, OWNERS["temporary"] + REPORT + WAIT)
    [owner] = owners
    lock = hold_folder(owner.folder.parent)
    owner.kill()
    remove_abandoned(tmp_path)
    assert owner.is_there
    elsewhere = tmp_path / "other node" / owner.folder.parent.name
    other = hold_folder(elsewhere)
    assert elsewhere.stat().st_mode & 0o777 == 0o700
    remove_abandoned(elsewhere.parent)
    assert elsewhere.exists()
    for descriptor in (lock, other):
        os.close(descriptor)
    for directory in (tmp_path, elsewhere.parent):
        remove_abandoned(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["other node"]
    assert not list(elsewhere.parent.iterdir())


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    """Looking at a folder of its own does not cost a process the lock."""
    mine = ProcessFolder(tmp_path)
    for _ in range(3):
        remove_abandoned(tmp_path)
    outside = tmp_path / "outside"
    for folder in (outside, tmp_path / "other-prefix"):
        folder.mkdir()
        (folder / "lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(outside)
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}without-lock").mkdir()
    linked = tmp_path / f"{PREFIX}linked-lock"
    linked.mkdir()
    (linked / "lock").symlink_to(outside / "lock")
    run_python("-c", f"from vllm_delta_sync.process_folders import *; remove_abandoned(Path({str(tmp_path)!r}))")
    names = {"link", "file", "without-lock", "linked-lock", mine.path.parent.name.removeprefix(PREFIX)}
    expected = {f"{PREFIX}{name}" for name in names} | {"outside", "other-prefix"}
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert (outside / "lock").exists()
    mine.close()
    assert not mine.path.exists()


def test_without_locks_folders_work_and_none_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some cluster file systems are mounted without."""

    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with ProcessFolder(tmp_path) as first, ProcessFolder(tmp_path) as second:
        (first.path / "file").touch()
        remove_abandoned(tmp_path)
        assert (first.path / "file").exists()
        assert second.path.exists()
    assert not list(tmp_path.iterdir())


def test_folders_of_another_user_are_not_removed(tmp_path: Path) -> None:
    theirs = tmp_path / f"{PREFIX}theirs"
    theirs.mkdir(mode=0o700)
    (theirs / "lock").touch()
    if os.geteuid() != 0:
        pytest.skip("takes root, to give a folder to another user")
    os.chown(theirs, 12345, 12345)
    remove_abandoned(tmp_path)
    assert (theirs / "lock").exists()
    with pytest.raises(PermissionError, match="is not a folder that only this user can enter"):
        hold_folder(theirs)


def test_a_shared_folder_must_be_private(tmp_path: Path) -> None:
    for name, make in (("open", lambda path: path.mkdir(mode=0o755)), ("link", lambda path: path.symlink_to(tmp_path))):
        path = tmp_path / f"{PREFIX}{name}"
        make(path)
        with pytest.raises(PermissionError, match="is not a folder that only this user can enter"):
            hold_folder(path)


RACER = """
import os, sys
from pathlib import Path
from vllm_delta_sync.process_folders import PREFIX, hold_folder, remove_abandoned
shared, mine = Path(sys.argv[1]) / f"{PREFIX}shared", sys.argv[2]
for turn in range(int(sys.argv[3])):
    lock = hold_folder(shared)
    (shared / mine).write_text(str(turn))
    remove_abandoned(shared.parent)
    if (shared / mine).read_text() != str(turn):
        raise SystemExit("lost")
    os.close(lock)
    remove_abandoned(shared.parent)
"""


def test_no_process_loses_a_folder_that_others_try_to_remove(tmp_path: Path) -> None:
    """Each process makes, uses and releases the same folder, and removes it whenever that is allowed."""
    racers = [subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), str(one), "300"]) for one in range(4)]
    assert [racer.wait(SECONDS) for racer in racers] == [0] * 4
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("parent", [None, "nowhere"])
def test_folder_that_cannot_be_made_is_an_error_that_says_what_to_do(
    parent: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    remedy = "set TMPDIR" if parent is None else "name another folder"
    with pytest.raises(StoreError, match=rf"no temporary folder can be made: .*nowhere.*{remedy}"):
        ProcessFolder(None if parent is None else tmp_path / parent)


@pytest.mark.parametrize(
    "use",
    [ProcessFolder, lambda: scratch_file(1), lambda: scratch_folder(None, "a test", 0).__enter__()],
    ids=["folder", "file", "scratch folder"],
)
def test_where_no_temporary_directory_can_be_written_the_error_says_what_to_do(
    use: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "nowhere")])
    with pytest.raises(StoreError, match=r"no temporary directory can be written: .*nowhere.*set TMPDIR"):
        use()
