"""``delta-sync du``, ``diff`` and ``stats``: figures are those of the bucket and of the weights; and ``head~N``."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support import running
from tests.support.collecting import long_run
from tests.support.commands import answer, delta_sync, kind, refusal, shown
from tests.support.publishers import small_trainer
from tests.support.samples import RunWriter, every_dtype_table, random_bits
from tests.support.sidecars import age, publish
from tests.support.written import SMALL, TABLE, Written
from trainer_side import Publisher
from vllm_delta_sync import cli, open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.cli.arguments import VERSION
from vllm_delta_sync.dashboard.page_reader import PageReader
from vllm_delta_sync.errors import NotFoundError, UsageError
from vllm_delta_sync.fleet.heartbeats import write_heartbeat
from vllm_delta_sync.format.base_document import dump_canonical
from vllm_delta_sync.format.manifest import object_key, version_key
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.maintenance.accounting import account
from vllm_delta_sync.maintenance.follow import follow
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.run_stats import read_rows
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.torch_views import tensor_from_bits

# Otherwise several workers compile the loops of codec ``tiled`` at the same time.
pytestmark = pytest.mark.xdist_group("accounting")

KINDS_OF_DELTA = ("plain", "raw", "tiled", "full", "same", "plain", "plain", "plain")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A run with everything that lies beside versions, and an object that nothing names."""
    written = Written(tmp_path_factory.mktemp("accounting") / "run")
    written.deltas(*KINDS_OF_DELTA)
    written.publish_by_ranks(3)
    written.merged_deltas()
    written.beside(5)
    written.tag("best", 3)
    written.claim()
    written.bucket.put(object_key("ab" * 32), b"left by a crash")
    write_heartbeat(written.run, "r1", 7, target=9, seconds=300)
    write_heartbeat(written.run, "r2", None, seconds=300)
    return written


@pytest.fixture
def written(template: Written, tmp_path: Path) -> Written:
    return template.copied(tmp_path / "run")


def du(written: Written, *arguments: object, code: int = 0) -> Any:
    return answer("du", "--bucket", written.folder, *arguments, code=code)


def files(folder: Path) -> dict[str, int]:
    """Key → bytes of what lies in a directory."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def kinds_of(document: Any) -> dict[str, tuple[int, int]]:
    return {row["kind"]: (row["objects"], row["bytes"]) for row in document["kinds"]}


def by_plain_reading(folder: Path) -> dict[str, tuple[int, int]]:
    """Kind → (objects, bytes), from the JSON of the documents alone."""
    lying = files(folder)

    def documents(prefix: str) -> list[Any]:
        return [json.loads((folder / key).read_bytes()) for key in sorted(lying) if key.startswith(prefix)]

    def named(rows: list[Any], field: str = "objects") -> set[str]:
        return {item["key"] for row in rows for item in row.get(field, [])}

    versions = documents("versions/")
    found = {
        "deltas": named([row for row in versions if row["kind"] == "delta"]),
        "anchors": named([row for row in versions if row["kind"] == "anchor"]),
        "standalone anchors": named(documents("anchors/")),
        "merged deltas": named(documents("merged/")),
        "sidecars": named(versions, "sidecars"),
        "files": named(documents("run.json"), "files"),
        "manifests": {key for key in lying if key.startswith("versions/")},
        "documents": {key for key in lying if not key.startswith(("versions/", "objects/", "sidecars/", "files/"))},
    }
    found["unnamed"] = set(lying) - set().union(*found.values())
    stored = {name: keys & lying.keys() for name, keys in found.items()}
    return {name: (len(keys), sum(lying[key] for key in keys)) for name, keys in stored.items() if keys}


# du


def test_du_counts_each_object_of_the_bucket_once(written: Written) -> None:
    lying = files(written.folder)
    document = du(written, "--last", "100")
    assert (document["bytes"], document["objects"]) == (sum(lying.values()), len(lying))
    assert kinds_of(document) == by_plain_reading(written.folder)
    assert {row["kind"] for row in document["kinds"]} >= {"unnamed", "standalone anchors", "merged deltas"}
    assert (document["versions"], document["collected"], document["unreadable"]) == (10, 0, [])
    assert document["full_bytes"] == 10 * TABLE.full_bytes
    rows = document["last"]
    assert [row["version"] for row in rows] == list(range(10))
    for row, manifest in zip(rows, written.writer.manifests, strict=True):
        assert row["stored"]["objects"] == manifest.payload_bytes == row["payload_bytes"]
        assert row["stored"]["manifest"] == lying[version_key(row["version"])]
        assert row["stored_bytes"] == sum(row["stored"].values())
    kinds = kinds_of(document)
    of_versions = ("deltas", "anchors", "standalone anchors", "sidecars", "manifests")
    assert sum(row["stored_bytes"] for row in rows) == sum(kinds.get(name, (0, 0))[1] for name in of_versions)
    assert [row["version"] for row in rows if row["stored"]["standalone_anchor"]] == [5]
    assert document["read"] == {"manifests": 10, "documents": 3}
    text = shown("du", "--bucket", written.folder, "--last", "2")
    assert all(word in text for word in ("unnamed: named by nothing", "read 10 manifests, 3 other documents, no obj"))
    assert [row["version"] for row in du(written, "--last", "2")["last"]] == [8, 9]
    assert len(du(written)["last"]) == 10
    # What gc removed is collected.
    age(written.folder)
    collect(written.run, RetentionPolicy(keep_last=2, keep_every=4))
    after, lying = du(written, "--last", "100"), files(written.folder)
    assert kinds_of(after) == by_plain_reading(written.folder)
    collected = [
        manifest.version
        for manifest in written.writer.manifests
        if any(ref.key not in lying for ref in manifest.objects)
    ]
    assert after["collected"] == len(collected) > 0
    assert [row["version"] for row in after["last"] if row["lost"]] == collected


def test_du_of_a_run_of_the_publisher_with_files_and_shared_sidecars(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_bytes(b'{"model_type":"qwen3"}')
    trainer = small_trainer()
    folder = tmp_path / "run"
    with Publisher(trainer.live, str(folder), files=tmp_path / "own") as publisher:
        for step in range(1, 4):
            publish(publisher, trainer, step, shared=b"the same each time", own=str(step).encode())
    document = answer("du", "--bucket", folder)
    assert kinds_of(document) == by_plain_reading(folder)
    assert kinds_of(document)["sidecars"] == (4, 21)
    # What several versions name counts for the first of them.
    assert [row["stored"]["sidecars"] for row in document["last"]] == [0, 19, 1, 1]
    assert sum(size for _, size in kinds_of(document).values()) == sum(files(folder).values())


def test_du_of_a_reference_does_not_count_the_checkpoint(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 3, start="checkpoint")
    assert du(written)["full_bytes"] == 3 * TABLE.full_bytes


def test_many_versions_are_read_without_holding_manifests(tmp_path: Path) -> None:
    """A run has 100,000 versions after some weeks, and a manifest takes 5 kB of memory."""
    run, many = long_run(tmp_path, 400).run_, 400
    readers: list[Callable[[RunReader], list[Any]]] = [lambda run: account(run).versions, read_rows]
    for read in readers:
        read(run)  # what is imported or cached once
        with running.counted() as most:
            assert len(read(run)) == many + 1
        assert most[0] < 4_000 * many


def test_du_notes_a_damaged_merged_delta(written: Written) -> None:
    key = "merged/0000000000-0000000004.json"
    written.bucket.put(key, b"{")
    document = du(written)
    assert [row["key"] for row in document["unreadable"]] == [key]
    kinds = kinds_of(document)
    assert kinds["unnamed"][0] == 2
    assert sum(count for count, _ in kinds.values()) == len(files(written.folder))
    assert f"counts as unnamed: {key}: " in shown("du", "--bucket", written.folder)


@pytest.mark.parametrize("flaw", ["missing", "damaged", "rewritten"])
def test_damage_is_one_clear_error(written: Written, flaw: str) -> None:
    key = version_key(4)
    if flaw == "missing":
        written.lose(key)
    elif flaw == "damaged":
        written.bucket.put(key, b"{")
    else:
        value = json.loads(written.bucket.get(key))
        written.bucket.put(key, dump_canonical({**value, "step": 41}))
    for command in ("du", "stats"):
        done = delta_sync(command, "--bucket", written.folder)
        assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
        expected = {"missing": "not_found", "damaged": "format", "rewritten": "chain"}[flaw]
        assert done.err.startswith(f"delta-sync: {expected}: ")
        assert ("version 5 names parent" if flaw == "rewritten" else key) in done.err


def test_an_empty_run(tmp_path: Path) -> None:
    writer = RunWriter(open_bucket(tmp_path / "run"), SMALL)
    document = answer("du", "--bucket", tmp_path / "run")
    lying = files(tmp_path / "run")
    assert kinds_of(document) == {"documents": (2, sum(lying.values()))}
    assert (document["versions"], document["last"]) == (0, [])
    shown("du", "--bucket", writer.bucket.url)
    for command in (("stats",), ("diff", "0", "head")):
        assert kind(3, *command, "--bucket", tmp_path / "run") == "not_found"


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Requests to directories within the block, by key; those of a listing as ``list``."""
    requests: Counter[str] = Counter()

    def watch(name: str) -> Any:
        call = getattr(LocalBucket, name)

        def watched(bucket: LocalBucket, key: str = "", *more: Any, **options: Any) -> Any:
            requests["list" if name == "list" else key] += 1
            return call(bucket, key, *more, **options)

        return mock.patch.object(LocalBucket, name, watched)

    with watch("get"), watch("get_range"), watch("stat"), watch("list"):
        yield requests


@pytest.mark.parametrize(("command", "first"), [("du", 0), ("stats", 0), ("stats --last 3", 5)])
def test_each_manifest_is_read_once_and_no_object(written: Written, command: str, first: int) -> None:
    with counted() as requests:
        document = answer(*command.split(), "--bucket", written.folder)
    assert [key for key in requests if key.startswith(("objects/", "sidecars/"))] == []
    head = written.head
    once = {version_key(version): 1 for version in range(first, head + 1)}
    # The version after the head is asked for, to learn that there is none.
    read = {key: n for key, n in requests.items() if key.startswith("versions/") and key != version_key(head + 1)}
    assert read == once
    assert document["read"]["manifests"] == len(once)
    documents = sum(n for key, n in requests.items() if key.startswith(("anchors/", "merged/")))
    assert requests.total() <= len(once) + documents + 30


# diff


def values(spec: TensorSpec, bits: Bits) -> np.ndarray:
    """The elements in fp64, by way of torch."""
    found: np.ndarray = tensor_from_bits(bits.copy(), spec).to(torch.float64).numpy().reshape(-1)
    return found


def expected_change(spec: TensorSpec, old: Bits, new: Bits) -> dict[str, Any]:
    """A row of diff, by numpy on whole tensors."""
    a, b = values(spec, old), values(spec, new)
    both = np.isfinite(a) & np.isfinite(b)
    with np.errstate(all="ignore"):
        change, whole = float(np.linalg.norm(b[both] - a[both])), float(np.linalg.norm(a[both]))
    return {
        "changed": int(np.count_nonzero(old != new)),
        "nonfinite_old": int(np.count_nonzero(~np.isfinite(a))),
        "nonfinite_new": int(np.count_nonzero(~np.isfinite(b))),
        "norm_change": change,
        "norm_old": whole,
        "relative": change / whole if change else 0.0,
    }


def assert_changes(document: Any, table: TensorTable, old: list[Bits], new: list[Bits]) -> None:
    """A document of diff has the figures of these weights, and is sorted."""
    expected = {spec.name: expected_change(spec, *pair) for spec, *pair in zip(table, old, new, strict=True)}
    rows = {row["name"]: row for row in document["changes"]}
    assert rows.keys() == {name for name, change in expected.items() if change["changed"]}
    for name, row in rows.items():
        for field, value in expected[name].items():
            if isinstance(value, int):
                assert row[field] == value, (name, field)
            elif math.isfinite(value):
                assert row[field] == pytest.approx(value, rel=1e-12), (name, field)
            else:
                assert row[field] is None, (name, field)
    for field in ("changed", "nonfinite_old", "nonfinite_new"):
        assert document[field] == sum(change[field] for change in expected.values())
    distances = [math.inf if row["relative"] is None else row["relative"] for row in document["changes"]]
    assert distances == sorted(distances, reverse=True)
    norms = [np.hypot.reduce([change[field] for change in expected.values()]) for field in ("norm_change", "norm_old")]
    if np.isfinite(norms).all():
        assert (document["norm_change"], document["norm_old"]) == pytest.approx(norms, rel=1e-12)
        assert document["relative"] == pytest.approx(norms[0] / norms[1], rel=1e-12)


def bits_of_every_dtype(table: TensorTable, random: np.random.Generator) -> list[Bits]:
    """Uniform patterns, NaN and infinity among them; booleans are 0 or 1, doubles below where squares overflow."""
    found = random_bits(table, random)
    for spec, bits in zip(table, found, strict=True):
        if spec.dtype == "BOOL":
            bits &= 1
        elif spec.dtype == "F64":
            bits[:] = random.standard_normal(bits.size).view(bits.dtype)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_diff_is_what_numpy_computes(tmp_path: Path, seed: int) -> None:
    table = every_dtype_table(2000)
    random = np.random.default_rng(seed)
    old = bits_of_every_dtype(table, random)
    new = [
        np.where(random.random(a.size) < 0.2, b, a)
        for a, b in zip(old, bits_of_every_dtype(table, random), strict=True)
    ]
    writer = RunWriter(open_bucket(tmp_path / "run"), table)
    writer.anchor(old)
    writer.delta(new)
    with mock.patch("vllm_delta_sync.maintenance.compare.CHUNK_ELEMENTS", 700):
        document = answer("diff", "0", "1", "--bucket", tmp_path / "run")
    assert_changes(document, table, old, new)
    assert document["changed_tensors"] == len(document["changes"]) == len(DTYPES) + (new[-1] != old[-1]).any()
    assert_changes(answer("diff", "head", "head~1", "--bucket", tmp_path / "run"), table, new, old)
    same = answer("diff", "1", "head", "--bucket", tmp_path / "run")
    assert (same["changed"], same["changes"], same["relative"]) == (0, [], 0.0)


def test_diff_of_zeros_signs_and_what_overflows(tmp_path: Path) -> None:
    """Bits are compared, so a changed sign of zero counts; norms that do not exist are null, and JSON stays JSON."""
    table = TensorTable(
        [TensorSpec("huge", "F64", (2,)), TensorSpec("sign", "F32", (2,)), TensorSpec("zero", "F32", (2,))]
    )
    old = [np.array([1e300, -1e300]), np.array([0.0, 1.0], "<f4"), np.zeros(2, "<f4")]
    new = [np.array([-1e300, 1e300]), np.array([-0.0, 1.0], "<f4"), np.array([0.5, 0], "<f4")]
    before, after = (
        [array.view(spec.element.uint) for spec, array in zip(table, side, strict=True)] for side in (old, new)
    )
    writer = RunWriter(open_bucket(tmp_path / "run"), table)
    writer.anchor(before)
    writer.delta(after)
    text = shown("diff", "0", "1", "--bucket", tmp_path / "run", "--json")
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["data"]
    rows = {row["name"]: row for row in document["changes"]}
    assert rows["sign"]["changed"] == 1
    assert (rows["sign"]["relative"], rows["zero"]["relative"], rows["zero"]["norm_change"]) == (0.0, None, 0.5)
    assert (rows["huge"]["norm_change"], rows["huge"]["relative"], document["relative"]) == (None, None, None)
    assert document["changes"][-1]["name"] == "sign"
    shown("diff", "0", "1", "--bucket", tmp_path / "run")


def test_diff_across_codecs_rebases_and_tags(written: Written) -> None:
    written.publish(0.2, base=4)
    table, bits = written.writer.table, written.writer.bits
    for names, a, b in ((("tag:best", "head"), 3, 10), (("head~1", "4"), 9, 4), (("0", "8"), 0, 8)):
        document = answer("diff", *names, "--bucket", written.folder)
        assert (document["old"]["version"], document["new"]["version"]) == (a, b)
        assert_changes(document, table, bits[a], bits[b])
        assert document["read"]["objects"] > 0
    text = shown("diff", "0", "head", "--bucket", written.folder, "--top", "1")
    assert "… 3 more; --json lists them" in text
    assert "they are in no norm" in text


def test_diff_of_two_runs(written: Written, tmp_path: Path) -> None:
    other = Written(tmp_path / "other", 2, seed=9, run="ab" * 16)
    both = ("--bucket", written.folder, "--other", other.folder)
    document = answer("diff", "head", "head~1", *both)
    assert (document["old"]["version"], document["new"]["version"]) == (9, 1)
    assert document["new"]["run"] == "ab" * 16
    assert_changes(document, written.writer.table, written.writer.bits[9], other.writer.bits[1])
    small = Written(tmp_path / "small", 1, table=SMALL)
    refused = refusal("diff", "0", "0", "--bucket", written.folder, "--other", small.folder, code=1)
    assert refused["kind"] == "tensor"
    assert all(word in refused["message"] for word in ("'a.weight'", "BF16", "cannot be compared"))


def test_diff_of_a_branch_with_its_source(tmp_path: Path) -> None:
    branch = Written(tmp_path / "run", 2, start="branch")
    document = answer("diff", "2", "head", "--bucket", tmp_path / "source", "--other", tmp_path / "run")
    assert_changes(document, TABLE, branch.writer.bits[0], branch.writer.bits[2])
    assert document["read"]["bases"] == 1
    assert ", and 1 base" in shown("diff", "0", "1", "--bucket", tmp_path / "run").replace("2 bases", "1 base")


def test_diff_of_what_is_damaged_or_not_there(written: Written) -> None:
    assert kind(3, "diff", "0", "10", "--bucket", written.folder) == "not_found"
    assert kind(3, "diff", "tag:worst", "1", "--bucket", written.folder) == "not_found"
    written.flip(written.object_of(9))
    assert kind(1, "diff", "8", "9", "--bucket", written.folder) == "digest"


# stats


def test_stats_are_those_of_the_manifests(written: Written) -> None:
    document = answer("stats", "--bucket", written.folder)
    manifests, rows = written.writer.manifests, document["versions"]
    assert [(row["version"], row["step"], row["codec"]) for row in rows] == [
        (manifest.version, manifest.step, manifest.codec) for manifest in manifests
    ]
    assert [row["payload_bytes"] for row in rows] == [manifest.payload_bytes for manifest in manifests]
    assert [row["changed_share"] for row in rows] == [manifest.changed / TABLE.total for manifest in manifests]
    # The writer's clock goes by one second for each version.
    assert [row["seconds"] for row in rows] == [None, *[1.0] * 9]
    published = np.cumsum([manifest.payload_bytes for manifest in manifests])
    assert [row["published_bytes"] for row in rows] == published.tolist()
    assert rows[-1]["saved_share"] == pytest.approx(1 - published[-1] / (10 * TABLE.full_bytes))
    summary = document["summary"]
    payload = [manifest.payload_bytes for manifest in manifests if manifest.kind == "delta"]
    assert summary["payload_bytes"] == {
        "median": np.median(payload),
        "p95": pytest.approx(np.percentile(payload, 95)),
        "max": max(payload),
    }
    assert summary["hours"] == pytest.approx(9 / 3600)
    assert summary["versions_per_hour"] == pytest.approx(3600)
    assert summary["bytes_per_hour"] == pytest.approx(sum(payload) * 400)
    assert summary["published_bytes"] == published[-1]
    assert document["read"] == {"manifests": 10}
    text = shown("stats", "--bucket", written.folder)
    assert "read 10 manifests, no objects" in text


def test_stats_of_the_last_versions(written: Written) -> None:
    whole = answer("stats", "--bucket", written.folder)["versions"]
    document = answer("stats", "--bucket", written.folder, "--last", "3")
    sums = ("published_bytes", "published_full_bytes", "saved_share")

    def own(rows: list[Any]) -> list[Any]:
        return [{name: value for name, value in row.items() if name not in sums} for row in rows]

    assert own(document["versions"]) == own(whole[-3:])
    assert document["summary"]["published_bytes"] == sum(row["payload_bytes"] for row in whole[-3:])
    assert document["summary"]["full_bytes"] == 3 * TABLE.full_bytes
    one = answer("stats", "--bucket", written.folder, "--last", "1")
    assert (len(one["versions"]), one["versions"][0]["seconds"], one["summary"]["versions_per_hour"]) == (1, 1.0, None)
    assert "… 7 before them" not in shown("stats", "--bucket", written.folder, "--last", "3")
    long = Written(written.folder.with_name("long"), 25, table=SMALL)
    assert "… 6 before them" in shown("stats", "--bucket", long.folder)
    assert "before them" not in shown("stats", "--bucket", long.folder, "--last", "100")


@pytest.mark.parametrize("moment", ["2026-99-99T99:99:99Z", "1999-01-01T00:00:00Z"], ids=["none", "earlier"])
def test_stats_of_times_that_cannot_be(moment: str, tmp_path: Path) -> None:
    """A time that does not exist, or of a clock that went back."""
    written = Written(tmp_path / "run", 2)
    newest = json.loads(written.bucket.get(version_key(2)))
    written.bucket.put(version_key(2), dump_canonical({**newest, "created_at": moment}))
    written.lose("HEAD.json")
    document = answer("stats", "--bucket", written.folder)
    assert [row["seconds"] for row in document["versions"]] == [None, 1.0, None]
    summary = document["summary"]
    assert (summary["versions_per_hour"], summary["hours"], summary["seconds"]["max"]) == (None, 0, 1.0)
    assert "versions   0 to 2\n" in shown("stats", "--bucket", written.folder)
    assert PageReader(lambda: open_run(str(written.folder))).read()["summary"]["seconds"]["max"] == 1.0


# What all of them take, and print


def test_versions_counted_from_the_head(written: Written) -> None:
    run = open_run(str(written.folder))
    assert [run.resolve(name).version for name in ("head", "head~0", "head~1", "head~9", "tag:best", 4, None)] == [
        *(9, 9, 8, 0, 3, 4, 9)
    ]
    with pytest.raises(NotFoundError, match="version head~10 is not published; the newest is 9"):
        run.resolve("head~10")
    for wrong in ("head~", "head~-1", "head~x", "head~1~1", "head^", "HEAD", "~1", "head~12345678901"):
        with pytest.raises(UsageError, match="give a number, head~N, tag:NAME"):
            run.resolve(wrong)
        assert kind(2, "diff", wrong, "head", "--bucket", written.folder) == "usage"
    assert run.resolve(np.int64(4)).version == 4  # type: ignore[arg-type]
    for no_name in (3.0, b"3", [3]):
        with pytest.raises(UsageError, match="is not a version; give a number"):
            run.resolve(no_name)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="moves with the head"):
        follow(str(written.folder), written.folder.with_name("kept"), "head~1")


def test_every_command_takes_them(written: Written, tmp_path: Path) -> None:
    bucket = ("--bucket", written.folder)
    assert answer("inspect", *bucket, "--version", "head~2")["version"] == 7
    assert answer("export", *bucket, "--version", "head~1", "--to", tmp_path / "export")["version"] == 8
    assert answer("tag", "set", "older", *bucket, "--version", "head~3")["version"] == 6
    assert answer("branch", "--to", tmp_path / "branch", *bucket, "--version", "head~4")["source"]["version"] == 5
    assert answer("compact", *bucket, "--no-merge", "--anchor", "head~5", "--dry-run")["anchor"] == 4
    written.lose("heartbeats/r2.json")
    assert answer("fleet", "wait", *bucket, "--version", "head~2", "--timeout", "1")["lowest"] == 7
    kept = tmp_path / "kept"
    assert [row["version"] for row in answer("follow", *bucket, "--version", "head~1", "--to", kept)["versions"]] == [8]
    takes = {
        name: action.metavar
        for name, command in cli.build_parser().commands.items()
        for action in command._actions
        if action.dest in ("version", "anchor") and action.nargs is None
    }
    assert takes.pop("rollback") == f"{VERSION}|served~N"
    assert set(takes.values()) == {VERSION}
