"""``delta-sync gc``, ``tag`` and ``branch``."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.collecting import TABLE
from tests.support.commands import answer, delta_sync, kind, shown
from tests.support.sidecars import age
from tests.support.written import Written
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.fleet.heartbeats import write_heartbeat
from vllm_delta_sync.maintenance.gc import collect as retention

VERSIONS = 20


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A run of twenty versions that were published a day ago."""
    written = Written(tmp_path_factory.mktemp("twenty") / "run", table=TABLE)
    for _ in range(VERSIONS):
        written.publish(0.2)
    written.writer.merge(0, 4)
    written.writer.merge(0, 16)
    age(written.folder, 24 * 3600)
    return written


@pytest.fixture
def url(template: Written, tmp_path: Path) -> str:
    return str(template.copied(tmp_path / "run").folder)


def test_gc(url: str) -> None:
    planned = answer("gc", "--bucket", url, "--keep-last", "2", "--dry-run")
    assert planned["dry_run"]
    assert len(planned["removed"]["objects"]) == 17
    assert planned["removed"]["merged_deltas"] == [{"first": 0, "last": 4}]
    assert not open_run(url).retention()
    done = answer("gc", "--bucket", url, "--keep-last", "2")
    assert done["removed"] == planned["removed"]
    assert done["kept"] == [{"version": 19, "because": ["last"]}, {"version": 20, "because": ["head"]}]
    assert (done["head"], done["lost"], done["gone"], done["notes"]) == (20, [], [[1, 16]], [])
    assert done["bytes"] > 0
    assert open_run(url).snapshot(19).fingerprint == open_run(url).manifest(19).model_fingerprint
    assert answer("gc", "--bucket", url, "--keep-last", "2")["bytes"] == 0


def test_gc_for_people(url: str) -> None:
    write_heartbeat(open_run(url), "ended", 20)
    age(Path(url), 2 * 24 * 3600)
    write_heartbeat(open_run(url), "east-1", 9)
    answer("tag", "set", "best", "--bucket", url, "--version", "7")
    out = shown("gc", "--bucket", url, "--keep-last", "1", "--dry-run")
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines() if "  " in line)
    assert lines["head"] == "version 20"
    assert lines["kept"] == "3 versions: 7, 9, 20"
    removed = r"\d+ objects, 0 anchors, \d merged deltas, 1 heartbeats, [\d.]+ k?B"
    assert re.fullmatch(removed, lines["would remove"])
    # Who holds what would go.
    assert re.search(r"^ +7  tag best\n +9  heartbeat east-1$", out, re.MULTILINE)
    for version in (6, 8):  # neither from below nor back from above
        open_bucket(url).delete(open_run(url).manifest(version).objects[0].key)
    out = shown("gc", "--bucket", url, "--keep-last", "1", code=1)
    assert "versions 7 should be kept but cannot be rebuilt; run delta-sync repair" in out
    assert re.search(r"^removed +\d+ objects", out, re.MULTILINE)


def test_gc_takes_its_policy_from_the_command_line(url: str) -> None:
    chosen: list[retention.RetentionPolicy] = []
    collect = retention.collect

    def spy(run: Any, policy: retention.RetentionPolicy, *rest: Any) -> retention.CollectionReport:
        chosen.append(policy)
        return collect(run, policy, *rest)

    with mock.patch.object(retention, "collect", spy):
        answer("gc", "--bucket", url, "--yes")
        answer("gc", "--bucket", url, "--dry-run")
        flags = "--keep-last 5 --keep-every 3 --keep-for 7d --no-tagged --min-age 15m --longest-pin 2h --dry-run"
        answer("gc", "--bucket", url, *flags.split())
        answer("gc", "--bucket", url, "--keep-for", "90s", "--min-age", "0s", "--dry-run")
    assert chosen == [
        retention.RetentionPolicy(),
        retention.RetentionPolicy(),
        retention.RetentionPolicy(5, 3, False, 7 * 86400.0, 900.0, 7200.0),
        retention.RetentionPolicy(keep_seconds=90.0, min_age=0.0),
    ]


@pytest.mark.parametrize("flags", [(), ("--no-tagged",), ("--min-age", "0s", "--longest-pin", "1d")])
def test_gc_without_a_policy_asks_for_one(url: str, flags: tuple[str, ...]) -> None:
    before = {file: file.read_bytes() for file in Path(url).rglob("*.*")}
    done = delta_sync("gc", "--bucket", url, *flags)
    assert (done.code, done.out) == (2, "")
    for word in ("--keep-last", "--keep-every", "--keep-for", "--yes", "--dry-run", "newest 100"):
        assert word in done.err
    assert {file: file.read_bytes() for file in Path(url).rglob("*.*")} == before
    assert answer("gc", "--bucket", url, *flags, "--keep-for", "2d")["kept"]
    assert answer("gc", "--bucket", url, *flags, "--yes")["kept"]


def reasons(url: str, *flags: str) -> str:
    """Why nothing is removed: the same in a dry run, in the document and for people."""
    planned = answer("gc", "--bucket", url, *flags, "--dry-run")
    text = shown("gc", "--bucket", url, *flags, "--dry-run")
    done = answer("gc", "--bucket", url, *flags)
    assert not any(done["removed"].values())
    lines = [re.split(r"  +", line, maxsplit=1)[1] for line in text.splitlines() if line.startswith("nothing, because")]
    said = ["\n".join(lines), *("\n".join(document["nothing_because"]) for document in (planned, done))]
    # A moment passes between them.
    assert len({re.sub(r"can be removed in .*", "", one) for one in said}) == 1
    return said[0]


def test_gc_says_why_nothing_goes(url: str) -> None:
    assert reasons(url, "--yes") == "23 objects are needed by versions to keep, or by servers on their way"
    young = reasons(url, "--keep-last", "1", "--min-age", "30h")
    assert re.search(
        r"objects were put less than 108000 s ago \(--min-age\); the first can be removed in 21\d\d\d s$", young
    )
    # No explanation where something is removed; afterwards it names what earlier collections removed.
    gone = answer("gc", "--bucket", url, "--keep-last", "1")
    assert any(gone["removed"].values())
    assert gone["nothing_because"] == []
    assert "earlier collections removed the deltas of versions" in reasons(url, "--keep-last", "1")


def test_tag(url: str) -> None:
    made = answer("tag", "set", "best", "--bucket", url, "--version", "7", "--milestone")
    assert (made["tag"], made["version"], made["milestone"], made["branch"]) == ("best", 7, True, None)
    assert shown("tag", "set", "newest", "--bucket", url) == "version 20 is tagged newest\n"
    rows = answer("tag", "list", "--bucket", url)["tags"]
    assert [(row["tag"], row["version"]) for row in rows] == [("best", 7), ("newest", 20)]
    assert re.search(r"^best +7  yes ", shown("tag", "list", "--bucket", url), re.MULTILINE)
    assert answer("tag", "set", "moved", "--bucket", url, "--version", "tag:best")["version"] == 7
    assert shown("tag", "rm", "best", "--bucket", url) == "removed tag best\n"
    assert kind(3, "tag", "rm", "best", "--bucket", url) == "not_found"
    assert kind(3, "tag", "set", "best", "--bucket", url, "--version", "21") == "not_found"


def test_branch(url: str, tmp_path: Path) -> None:
    new = str(tmp_path / "new")
    made = answer("branch", "--to", new, "--bucket", url, "--version", "7")
    assert made["source"] == {"run": open_run(url).info.run, "url": open_run(url).bucket.url, "version": 7}
    run = open_run(new)
    assert (made["run"], made["url"]) == (run.info.run, run.bucket.url)
    assert run.snapshot().fingerprint.hex() == made["fingerprint"] == open_run(url).manifest(7).fingerprint
    assert kind(5, "branch", "--to", new, "--bucket", url) == "conflict"
    assert kind(2, "branch", "--to", url, "--bucket", url) == "usage"
    tag = answer("tag", "list", "--bucket", url)["tags"][0]["tag"]
    out = shown("branch", "--to", tmp_path / "third", "--bucket", url, "--version", f"tag:{tag}")
    assert "starts at    version 7 of file://" in out
