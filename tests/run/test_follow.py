"""Follow: ``DIR/current`` is always one whole version of the run, as an ordinary checkpoint."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.run.machine.killed_folders import TABLE as LARGE_TABLE
from tests.support.chains import TABLE, Chain
from tests.support.commands import answer, delta_sync, kind, parsed, process, shown
from tests.support.exporting import expected, file_size_limit, held, names, stored
from tests.support.forks import Forks
from tests.support.marked import MarkedChain
from tests.support.running import run_python
from tests.support.samples import flip
from tests.support.signed import Keys
from tests.support.slime_folders import deltas, rebuilt, versions
from tests.support.written import Written
from vllm_delta_sync import FollowedVersion, follow, open_run
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DigestError,
    ForkError,
    NotFoundError,
    ReplayError,
    SignatureError,
    StoreError,
    UsageError,
)
from vllm_delta_sync.format.manifest import HEAD_KEY, version_key
from vllm_delta_sync.maintenance.export import export
from vllm_delta_sync.maintenance.follow_folder import WORK_NAME
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.tensors.checkpoint import EXPORT_NAME

SHARD_BYTES = 2000
"""Some tensors of these models are larger, and most are smaller."""
KILLS = [
    *(("checkpoint", 10, 4, 1), ("slime", 8, 6, 3)),
    pytest.param("checkpoint", 50, 20, 11, marks=pytest.mark.slow),
    pytest.param("slime", 40, 30, 15, marks=pytest.mark.slow),
]
"""Format; versions; in how many a kill is tried; and how many must have happened: not each makes so many changes."""


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def once(chain: Chain, out: Path, **options: Any) -> FollowedVersion | None:
    """Follow once, and check that ``current`` has the bits of a version and what an export of it has."""
    updates = list(follow(chain.url, out, once=True, **{"shard_bytes": SHARD_BYTES, **options}))
    record = json.loads((out / "current" / EXPORT_NAME).read_bytes())
    assert held(out / "current") == expected(chain.table, chain.bits[record["version"]])
    assert record["manifest"] == chain.manifests[record["version"]].digest
    assert sorted(record["files"]) == names(out / "current")
    assert len(updates) <= 1
    return updates[0] if updates else None


def at(out: Path) -> int:
    """The version that ``current`` is at."""
    return int(json.loads((out / "current" / EXPORT_NAME).read_bytes())["version"])


# Versions


def test_every_version_equals_an_export_of_it(tmp_path: Path, out: Path) -> None:
    """Through codecs, whole tensors, versions built on earlier ones, and one that changes nothing; with small files."""
    chain = Chain(tmp_path, base=True)
    (tmp_path / "base" / "config.json").write_bytes(b"{}")
    grown: list[dict[str, Any]] = [{}, {"codec": "tiled"}, {"full": [1]}, {"base": 1}, {"share": 0.0}]
    for options in [None, *grown]:
        if options is not None:
            chain.grow(**options)
        update = once(chain, out)
        assert update is not None
        assert update.version == at(out) == len(chain.manifests) - 1
        assert update.folder.samefile(out / "current")
        report = export(open_run(chain.url), tmp_path / f"export{update.version}", shard_bytes=SHARD_BYTES)
        assert stored(out / "current") == stored(report.folder)
        assert "config.json" in report.files
    assert once(chain, out) is None, "it is at the newest version"


def test_files_without_changes_are_shared(chain: Chain, out: Path) -> None:
    once(chain, out)
    before = {name: (out / "current" / name).stat().st_ino for name in names(out / "current")}
    bits = [array.copy() for array in chain.bits[-1]]
    bits[0][0] += 1
    chain.delta(bits)
    update = once(chain, out)
    assert update is not None
    shards = [name for name in before if name.endswith(".safetensors")]
    assert len(update.linked) == len(shards) - 1 > 3
    for name in update.linked:
        assert (out / "current" / name).stat().st_ino == before[name]


def test_what_an_engine_has_mapped_stays(chain: Chain, out: Path) -> None:
    once(chain, out)
    folder = (out / "current").resolve()
    maps = {path.name: np.memmap(path, np.uint8, mode="r") for path in folder.glob("*.safetensors")}
    before = {name: data.tobytes() for name, data in maps.items()}
    for number in range(4):
        chain.grow(share=1.0)
        once(chain, out)
        assert folder.exists() == (number == 0), "the version before the current one is kept"
    assert {name: data.tobytes() for name, data in maps.items()} == before


def test_far_behind_it_reads_no_more_than_it_needs(chain: Chain, out: Path) -> None:
    """Versions that change more than the model has are read from an anchor."""
    once(chain, out)
    chain.grow(12, share=0.5)
    chain.beside_it(12)
    update = once(chain, out)
    assert update is not None
    assert update.read_bytes < 1.2 * chain.table.full_bytes < sum(item.payload_bytes for item in chain.manifests[1:])


# Targets


def test_quarantined_versions_are_skipped(tmp_path: Path, out: Path) -> None:
    chain = MarkedChain(tmp_path)
    chain.play(".!")
    once(chain, out)
    assert at(out) == 1
    chain.play("!")
    assert once(chain, out) is None
    once(chain, out, version=2)
    assert at(out) == 2, "one that is named is taken"


def test_a_tag_is_followed_wherever_it_moves(chain: Chain, out: Path) -> None:
    chain.grow(3)
    run = open_run(chain.url)
    for version in (1, 3, 0, 3):
        set_tag(run, "best", version)
        once(chain, out, version="tag:best")
        assert at(out) == version


def test_a_version_that_was_made_before_is_used_again(chain: Chain, out: Path) -> None:
    chain.grow()
    for version in (0, 1):
        once(chain, out, version=version)
    chain.lose(1)
    update = once(chain, out, version=0)
    assert update is not None
    assert update.read_bytes == 0
    once(chain, out, version=1)


def test_it_polls_until_it_is_stopped(chain: Chain, out: Path) -> None:
    stop = threading.Event()
    seen = []
    for update in follow(chain.url, out, poll_seconds=0.01, stop=stop):
        seen.append(update.version)
        if update.version == 3:
            stop.set()
        else:
            chain.grow()
    assert seen == [0, 1, 2, 3]


def test_a_run_that_begins_later(tmp_path: Path, out: Path) -> None:
    url = str(tmp_path / "run")
    with pytest.raises(NotFoundError):
        list(follow(url, out, once=True))
    updates = follow(url, out, poll_seconds=0.01)
    begin = threading.Timer(0.3, Chain, (tmp_path,))
    begin.start()
    assert next(updates).version == 0
    begin.join()
    updates.close()


def test_a_version_that_was_not_handled_comes_again(chain: Chain, out: Path) -> None:
    for _ in range(2):
        for update in follow(chain.url, out, once=True):
            assert update.version == 0
            break  # as if the engine could not load it
    assert [update.version for update in follow(chain.url, out, once=True)] == [0]
    assert list(follow(chain.url, out, once=True)) == []


# Killed


@pytest.mark.parametrize(("format", "count", "kills", "least"), KILLS)
def test_killed_at_random_it_shows_whole_versions(
    tmp_path: Path,
    out: Path,
    nursery: Forks,
    campaign_seed: int | None,
    format: str,
    count: int,
    kills: int,
    least: int,
) -> None:
    """Before a random change of names in a folder."""
    chance = random.Random(campaign_seed or 0)
    written = Written(tmp_path / "run", 0, 11, LARGE_TABLE)
    targets = chance.sample(range(count), kills)
    killed = 0

    def shown() -> int | None:
        """The newest version there, which is whole; None before there is one."""
        if format == "slime":
            newest = max(versions(out), default=None)
        else:
            newest = at(out) if (out / "current").exists() else None
        if newest is not None:
            found = rebuilt(out, newest) if format == "slime" else held(out / "current")
            assert found == expected(LARGE_TABLE, written.writer.bits[newest])
        return newest

    for version in range(count):
        if version:
            written.publish(0.05 if version % 5 else 0.0, full=[version % 24] if version % 7 == 0 else ())
        if version in targets:
            killed += nursery.end(nursery.begin(tmp_path, chance.randrange(1, 12), "follow", format))
            shown()
            if chance.random() < 0.3 and version < count - 1:
                continue  # the next one finds what this one left
        assert not nursery.end(nursery.begin(tmp_path, 0, "follow", format))
        assert shown() == version
    assert killed >= least
    assert deltas(out) or format == "checkpoint"
    assert names(out / WORK_NAME) in (["handled", "lock"], ["handled", "lock", "objects"])


# Refused


def test_bad_arguments_and_a_folder_of_others(chain: Chain, out: Path) -> None:
    for options in ({"keep": 0}, {"poll_seconds": 0.0}, {"shard_bytes": 0}):
        with pytest.raises(UsageError, match=next(iter(options))):
            follow(chain.url, out, **options)
    assert not out.exists()
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"holds 'model\.safetensors'"):
        list(follow(chain.url, out, once=True))
    assert stored(out) == {"model.safetensors": b"mine"}
    with pytest.raises(UsageError, match="is a file"):
        list(follow(chain.url, out / "model.safetensors", once=True))


def test_one_process_at_a_time(chain: Chain, out: Path) -> None:
    first = follow(chain.url, out)
    next(first)
    with pytest.raises(ConflictError, match="another process follows"):
        next(follow(chain.url, out))
    first.close()
    assert next(follow(chain.url, out)).version == 0, "the first one had not handled it"


def test_another_run(chain: Chain, out: Path, tmp_path: Path) -> None:
    once(chain, out)
    (tmp_path / "b").mkdir()
    other = Chain(tmp_path / "b", seed=5)
    with pytest.raises(ChainError, match="into another folder"):
        list(follow(other.url, out, once=True))
    assert at(out) == 0


def test_an_older_state_is_not_taken(chain: Chain, out: Path) -> None:
    chain.grow(2)
    head = (chain.folder / HEAD_KEY).read_bytes()
    chain.grow()
    once(chain, out)
    (chain.folder / version_key(3)).unlink()
    (chain.folder / HEAD_KEY).write_bytes(head)
    with pytest.raises(ReplayError, match="remove"):
        once(chain, out)
    assert at(out) == 3
    (out / "current").unlink()
    once(chain, out)
    assert at(out) == 2


def test_signatures(tmp_path: Path, out: Path) -> None:
    keys = Keys(tmp_path / "keys")
    chain = Chain(tmp_path, keyring=keys.ring("a"))
    chain.grow()
    trusted = keys.readers("a")
    once(chain, out, keyring=trusted)
    record = out / "current" / EXPORT_NAME
    about = json.loads(record.read_bytes())
    chain.grow()
    record.write_text(json.dumps({**about, "manifest": "ab" * 32}))
    with pytest.raises(ForkError, match="two histories"):
        list(follow(chain.url, out, once=True, keyring=trusted))
    record.write_text(json.dumps(about))
    once(chain, out, keyring=trusted)
    chain.keyring = keys.ring("b")
    chain.grow()
    with pytest.raises(SignatureError):
        once(chain, out, keyring=trusted)
    assert at(out) == 2


def test_damage_is_not_taken_and_repaired_when_it_can_be(chain: Chain, out: Path) -> None:
    once(chain, out)
    chain.grow(2)
    chain.damage(chain.manifests[1])
    with pytest.raises(DigestError):
        once(chain, out)
    assert at(out) == 0
    chain.beside_it(2)
    once(chain, out)
    assert at(out) == 2


def test_a_current_that_others_changed_is_made_anew(chain: Chain, out: Path) -> None:
    once(chain, out)
    flip(next(path for path in (out / "current").resolve().glob("*.safetensors")))
    chain.grow()
    once(chain, out)
    assert at(out) == 1


@pytest.mark.parametrize(
    ("name", "how"), [("config.json", "removed"), ("", "removed"), ("", "changed"), (EXPORT_NAME, "removed")]
)
def test_files_of_current_that_others_touch_while_it_runs(tmp_path: Path, out: Path, name: str, how: str) -> None:
    """A purge by age removes what hard links keep old; a changed file would be linked or copied on."""
    chain = Chain(tmp_path, base=True)
    (tmp_path / "base" / "config.json").write_text("{}")
    updates = follow(chain.url, out, poll_seconds=0.02, shard_bytes=SHARD_BYTES)
    first = next(updates)
    path = first.folder / name if name else next(first.folder.glob("*.safetensors"))
    if how == "changed":
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        path.unlink()
    chain.grow()
    assert next(updates).version == 1
    assert held(out / "current") == expected(chain.table, chain.bits[1])
    assert (out / "current" / "config.json").read_text() == "{}"
    updates.close()


@pytest.mark.parametrize("keep", [1, 2])
def test_a_clock_that_was_set_back(chain: Chain, out: Path, keep: int) -> None:
    once(chain, out)
    chain.grow()
    ahead = once(chain, out, keep=keep)
    assert ahead is not None
    later = time.time() + 7200
    os.utime(ahead.folder / EXPORT_NAME, (later, later))
    for version in (2, 3, 4):
        chain.grow()
        once(chain, out, keep=keep)
        assert at(out) == version
        assert len(list(out.glob("version-*"))) == keep


def test_what_users_put_into_an_older_version_makes_it_no_newer(chain: Chain, out: Path) -> None:
    """As a converter does whose output goes beside its input: the version that an engine still read was removed."""
    made = []
    for _ in range(3):
        made.append(once(chain, out))
        chain.grow()
        for update in made[:-1]:
            assert update is not None
            if update.folder.exists():
                (update.folder / "model-F16.gguf").write_bytes(b"")
    assert [update is not None and update.folder.exists() for update in made] == [False, True, True]


def test_what_users_put_beside_versions_stays(chain: Chain, out: Path) -> None:
    for _ in range(3):
        update = once(chain, out)
        assert update is not None
        (out / f"{update.folder.name}-gguf").mkdir()
        chain.grow()
    (out / "version-notes").mkdir()
    once(chain, out)
    kept = [path.name for path in out.iterdir() if path.name.endswith(("-gguf", "-notes"))]
    assert len(kept) == 4
    assert len(list(out.glob("version-*"))) == 4 + 2
    (out / "current").unlink()
    (out / "current").mkdir()
    with pytest.raises(UsageError, match="is no symbolic link"):
        once(chain, out)


def test_no_room_to_remember_what_was_handled(chain: Chain, out: Path, caplog: pytest.LogCaptureFixture) -> None:
    updates = follow(chain.url, out, poll_seconds=0.02)
    assert next(updates).version == 0
    (out / WORK_NAME / "handled").mkdir()  # so that the file cannot be written
    chain.grow()
    assert next(updates).version == 1
    updates.close()
    assert "handled' cannot be written" in caplog.text


def test_no_room(chain: Chain, out: Path) -> None:
    once(chain, out, shard_bytes=10**9)
    chain.grow()
    with file_size_limit(TABLE.full_bytes // 2), pytest.raises(StoreError, match="cannot be written"):
        once(chain, out, shard_bytes=10**9)
    assert at(out) == 0
    assert not (out / WORK_NAME / "next").exists()
    once(chain, out, shard_bytes=10**9)
    assert at(out) == 1


def test_what_a_model_lacks_is_said_and_comes_with_a_base(
    chain: Chain, out: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without config.json no engine loads the folder: an export says it, and a follower said nothing."""
    once(chain, out)
    assert "gets no config.json and no tokenizer, searched in run" in caplog.text
    base = tmp_path / "given"
    base.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (base / name).write_bytes(b"{}")
    caplog.clear()
    chain.grow()
    updates = follow(chain.url, out, base=base, shard_bytes=SHARD_BYTES, poll_seconds=0.02)
    for version in (1, 2):
        update = next(updates)
        assert (update.version, update.read_bytes < TABLE.full_bytes) == (version, True), "made from the one before"
        assert {"config.json", "tokenizer.json"} < set(names(update.folder))
        chain.grow()
    updates.close()
    assert caplog.text == ""


def test_file_system_without_symbolic_links_is_named(chain: Chain, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(StoreError, match="cannot be written: it takes no symbolic links"):
        once(chain, out)


# The command


def test_the_command(chain: Chain, out: Path, tmp_path: Path) -> None:
    arguments = ("follow", "--bucket", chain.url, "--to", out, "--once", "--on-update")
    script = tmp_path / "update.sh"
    script.write_text('#!/bin/sh\necho "$1 $DELTA_SYNC_VERSION $DELTA_SYNC_STEP $DELTA_SYNC_FOLDER" >> "$2"\n')
    script.chmod(0o755)
    command = f"{script} 'two words' {tmp_path}/log"
    assert shown(*arguments, command).startswith("version 0 (step 0) in ")
    assert "is at the version already" in shown(*arguments, command)
    chain.grow()
    document = answer(*arguments, command)
    assert [update["version"] for update in document["versions"]] == [1]
    folder = (out / "current").resolve()
    assert document["versions"][0]["directory"] == str(folder)
    chain.grow()
    done = process(*arguments, "echo reloaded", "--json")
    assert parsed(done.out)["data"]["versions"][0]["version"] == 2, "the command's output is not among the lines"
    assert done.err.splitlines()[-1] == "reloaded"
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0].startswith("two words 0 ")
    assert lines[1:] == [f"two words 1 {chain.manifests[1].step} {folder}"]
    chain.grow()
    # Engines that the command tells of it have another working directory.
    shown("follow", "--bucket", chain.url, "--to", os.path.relpath(out), "--once", "--on-update", command)
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith(f" {(out / 'current').resolve()}")
    chain.grow()
    # It may call delta-sync.
    assert delta_sync(*arguments, f"{sys.executable} -m vllm_delta_sync.cli log --bucket {chain.url}").code == 0


def test_sigterm_ends_the_command_with_0(chain: Chain, out: Path) -> None:
    """While it polls, and while the command of ``--on-update`` runs, which runs again at the next start.

    One that was to end by itself is not done.
    """
    line = [sys.executable, "-m", "vllm_delta_sync.cli", "follow", "--bucket", chain.url]
    update, pipe = ["--on-update", "sh -c 'echo begun; exec sleep 600'"], subprocess.PIPE
    cases = [([], "version ", 0), (update, "begun", 0), (["--once", *update], "", 143)]
    with ExitStack() as stack:
        begun = []
        for number, (more, _, _) in enumerate(cases):
            command = [*line, "--to", str(out / str(number)), *more]
            begun.append(stack.enter_context(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)))
        for number, (process, (more, said, code)) in enumerate(zip(begun, cases, strict=True)):
            assert process.stdout is not None
            while said not in process.stdout.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == code
            if code == 0:
                assert [line.split(", ")[0] for line in errors.splitlines()] == [
                    f"{str(out / str(number))!r} gets no config.json and no tokenizer"
                ]
                assert held(out / str(number) / "current") == expected(chain.table, chain.bits[0])
                rows = answer("follow", "--bucket", chain.url, "--to", out / str(number), "--once")["versions"]
                assert len(rows) == 1 or not more


def test_sigterm_while_the_command_of_on_update_starts_ends_it_too(chain: Chain, out: Path) -> None:
    program = (
        "import os, signal, subprocess, sys\n"
        "from vllm_delta_sync import cli\n"
        "start = subprocess.Popen._execute_child\n"
        "def begin(*arguments):\n"
        "    start(*arguments)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "subprocess.Popen._execute_child = begin\n"
        f"sys.argv[1:] = ['follow', '--bucket', {chain.url!r}, '--to', {str(out)!r}, '--on-update', 'sleep 600']\n"
        "sys.exit(cli.main())\n"
    )
    run_python("-c", program, seconds=60)  # its output ends with the last process that has it


def test_a_command_that_fails(chain: Chain, out: Path) -> None:
    arguments = ("follow", "--bucket", chain.url, "--to", out, "--once", "--on-update")
    done = delta_sync(*arguments, "false")
    assert done.code == 1
    assert "'false' ended with exit code 1" in done.err
    assert "cannot be started" in delta_sync(*arguments, "/nowhere/reload").err, "the version is still to be handled"
    assert delta_sync(*arguments, "true").out.startswith("version 0 ")
    assert "at the version already" in delta_sync(*arguments, "false").out
    assert kind(2, *arguments, "'") == "usage"
    assert kind(2, *arguments, " ") == "usage"
