"""The page's document: figures of the run as it lies in the bucket, read once, in bounds, whatever is broken in it."""

import json
import threading
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.page_runs import HOSTILE, PARTS, PageRun, broken_run, busy_run, empty_run, hostile_run, layered_table
from tests.support.publishers import Hooked
from tests.support.written import Written
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.dashboard import heat_map
from vllm_delta_sync.dashboard.heat_map import HEAT_OBJECTS, HEAT_VERSIONS, count_elements, place_of
from vllm_delta_sync.dashboard.overview import MAX_PROBLEMS, BackgroundReader, RunView, ServerView, build_overview
from vllm_delta_sync.dashboard.page_reader import MAX_RECEIVERS, MAX_TAGS, PageReader
from vllm_delta_sync.dashboard.remedies import REMEDIES
from vllm_delta_sync.engine.observe.states import STATES
from vllm_delta_sync.errors import DataError, FormatError, NotFoundError, UnavailableError, error_kinds
from vllm_delta_sync.fleet.heartbeats import write_heartbeat
from vllm_delta_sync.format.manifest import VERSIONS_PREFIX, version_key
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.run.checks import delta_context

LONG = 500


def reader(folder: Path, **options: Any) -> PageReader:
    return PageReader(lambda: open_run(str(folder)), **options)


def overview(run: dict[str, Any] | None, *servers: ServerView, source: Any = "dashboard", error: Any = None) -> Any:
    """As a browser gets it."""
    view = RunView(run, error, 1.0)
    return json.loads(json.dumps(build_overview(source, 2.0, view, list(servers), STATES), allow_nan=False))


def counted(folder: Path, **options: Any) -> tuple[PageReader, list[str]]:
    """As ``reader``, and the keys that it reads, in whole or in part."""
    keys: list[str] = []
    bucket = Hooked(folder)
    bucket.reading = keys.append
    return PageReader(lambda: Run(bucket), **options), keys


def manifests(keys: list[str]) -> int:
    return len({key for key in keys if key.startswith(VERSIONS_PREFIX)})


def test_figures_are_those_of_the_manifests(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 4)
    written.publish(0.3)
    found = reader(written.folder).read()
    columns = found["versions"]
    assert columns["version"] == list(range(6))
    for version, manifest in enumerate(written.writer.manifests):
        share = manifest.changed / manifest.total if manifest.kind == "delta" else None
        assert (columns["payload"][version], columns["step"][version]) == (manifest.payload_bytes, manifest.step)
        assert (columns["share"][version], columns["kind"][version]) == (share, manifest.kind)
    payload = sum(manifest.payload_bytes for manifest in written.writer.manifests)
    assert found["summary"]["published"] == payload
    assert found["summary"]["saved"] == pytest.approx(1 - payload / (6 * written.writer.table.full_bytes))
    assert (found["head"]["version"], found["head"]["sound"], found["error"]) == (5, 5, None)


def test_heat_map_counts_what_the_deltas_change(tmp_path: Path) -> None:
    run = PageRun(tmp_path / "run", layered_table(3, 16), 3)
    still, moving = "model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.q_proj.weight"
    run.delta(lambda name: 0.5 if name == moving else 0.0)
    before = run.writer.bits[-1]
    run.delta(lambda name: 0.5 if name == moving else 0.0)
    place = next(i for i, spec in enumerate(run.writer.table) if spec.name == moving)
    changed = run.writer.manifests[1].changed + int((before[place] != run.writer.bits[-1][place]).sum())
    heat = reader(run.folder).read()["heat"]
    assert heat["versions"] == [2, 1]
    assert heat["layers"] == ["", "model.layers.0", "model.layers.1", "model.layers.2"]
    assert set(heat["kinds"]) == {*PARTS, "model.embed_tokens.weight", "model.norm.weight"}
    row = heat["cells"][heat["kinds"].index("self_attn.q_proj.weight")]
    assert row[3] == pytest.approx(changed / 2 / (16 * 16))
    assert row[:3] == [None, 0, 0]
    assert heat["cells"][heat["kinds"].index(place_of(still)[1])][2] == 0
    assert place_of("model.layers.3.mlp.experts.7.up.weight") == ("model.layers.3", "mlp.experts.*.up.weight")
    assert place_of("lm_head.weight") == ("", "lm_head.weight")


def test_elements_are_counted_by_the_headers_of_every_codec(tmp_path: Path) -> None:
    kinds = ("plain", "raw", "tiled", "full", "same")
    written = Written(tmp_path / "run")
    written.deltas(*kinds)
    written.publish_by_ranks(3)
    large = Written(tmp_path / "large", table=TensorTable([TensorSpec(f"l.{n}.w", "F32", (50_000,)) for n in range(3)]))
    large.publish(0.5)
    for run, how in ((written, (*kinds, "ranks")), (large, ("plain",))):
        bits, manifests = run.writer.bits, run.writer.manifests
        for old, new, manifest, kind in zip(bits, bits[1:], manifests[1:], how, strict=False):
            found, lengths = Counter[int](), list[int]()

            def read(key: str, start: int, length: int, run: Written = run, lengths: list[int] = lengths) -> bytes:
                lengths.append(length)
                return run.bucket.get_range(key, start, length)

            context = delta_context(manifest)
            assert context is not None
            for ref in manifest.objects:
                elements = partial(read, ref.key), ref.bytes, run.writer.table, context, ref.key
                found.update(count_elements(*elements, nullcontext()))
            for tensor, spec in enumerate(run.writer.table):
                whole = kind == "full" and tensor == 0
                assert found[tensor] == (spec.numel if whole else np.count_nonzero(old[tensor] != new[tensor])), kind
            assert max(lengths, default=0) <= 64 * 1024


def test_damaged_objects_are_parsed_one_at_a_time_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of one takes up to 400 MB of memory, and seconds; a version has an object for each rank."""
    written = Written(tmp_path / "run", 2)
    written.publish_by_ranks(3)
    objects = written.writer.manifests[-1].objects
    assert len(objects) > 1
    for ref in objects:
        header = b'{"a":[]}'.ljust(ref.bytes - 8)
        (written.folder / ref.key).write_bytes(len(header).to_bytes(8, "little") + header)
    parsed: list[int] = []
    running = 0

    def parse(*given: Any) -> Container:
        nonlocal running
        running += 1
        parsed.append(running)
        threading.Event().wait(0.05)
        try:
            return Container(*given)
        finally:
            running -= 1

    monkeypatch.setattr(heat_map, "Container", parse)
    reading, keys = counted(written.folder)
    heat = reading.read()["heat"]
    assert (heat["versions"], heat["lost"]) == ([2, 1], 1)
    assert set(parsed) == {1}
    keys.clear()
    assert reading.read()["heat"] == heat
    assert not [key for key in keys if key.startswith("objects/")]


def test_each_manifest_and_object_is_read_once(tmp_path: Path) -> None:
    run = PageRun(tmp_path / "run", layered_table(2, 16), 30)
    run.busy(30)
    reading, keys = counted(run.folder)
    reading.read()
    # All of them, and a look for one after the head.
    assert manifests(keys) == 32
    objects = {key for key in keys if key.startswith("objects/")}
    assert len(objects) == HEAT_VERSIONS <= HEAT_OBJECTS
    keys.clear()
    reading.read()
    # The head, and a look for the one after it.
    assert manifests(keys) <= 2
    assert not [key for key in keys if key.startswith("objects/")]
    run.delta(lambda name: 0.1)
    keys.clear()
    assert reading.read()["head"]["version"] == 31
    assert manifests(keys) <= 4
    assert len({key for key in keys if key.startswith("objects/")}) == 1


def test_a_long_run_costs_its_newest_versions_only(tmp_path: Path) -> None:
    run = PageRun(tmp_path / "run", layered_table(2, 16), LONG)
    run.many(LONG)
    reading, keys = counted(run.folder, last=50)
    found = reading.read()
    assert found["versions"]["version"] == list(range(LONG - 50, LONG))
    assert manifests(keys) <= 53
    # Garbage collection removed the objects: the map is empty, and says so.
    assert (found["heat"]["versions"], found["heat"]["lost"]) == ([], HEAT_VERSIONS)
    assert len(json.dumps(found)) < 50_000
    whole = reader(run.folder, last=LONG, heat=False).read()
    assert len(whole["versions"]["version"]) == LONG
    assert whole["heat"] is None
    assert len(json.dumps(whole)) < 200 * LONG


def test_an_empty_run_and_no_run(tmp_path: Path) -> None:
    empty_run(tmp_path / "run")
    found = overview(reader(tmp_path / "run").read())
    assert found["headline"] == {"level": "idle", "text": "Nothing is published yet"}
    assert [problem["remedy"] for problem in found["problems"]] == ["Start the publisher."]
    with pytest.raises(NotFoundError):
        reader(tmp_path / "nowhere").read()


def test_damage_is_shown_with_what_to_do_and_the_rest_stays(tmp_path: Path) -> None:
    broken_run(tmp_path / "run")
    found = overview(reader(tmp_path / "run").read())
    run = found["run"]
    assert [row["version"] for row in run["damaged"]] == [30, 21]
    assert run["versions"]["version"] == [version for version in range(40) if version not in (21, 30)]
    assert (run["head"]["version"], run["head"]["sound"]) == (39, 38)
    assert [row["version"] for row in run["quarantined"]] == [39, 27]
    assert found["headline"]["level"] == "error"
    shown = {(problem["where"], problem["kind"]): problem for problem in found["problems"]}
    assert "21" in shown["the run", "format"]["what"]
    for place in (("the run", "format"), ("receiver rollout-1", "fingerprint"), ("receiver rollout-2", "chain")):
        assert shown[place]["remedy"] == REMEDIES[str(place[1])]
    assert "version 38" in shown["the run", "gate"]["what"]
    assert "stray.json" in shown["heartbeats", None]["what"]
    levels = [problem["level"] for problem in found["problems"]]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)


def test_hostile_manifests_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    run = PageRun(tmp_path / "run", layered_table(1, 16), 12)
    run.busy(12)
    with open_run(str(run.folder)) as opened:
        limit = opened.document_limit
    for version in range(1, 11):
        (run.folder / version_key(version)).unlink()
        (run.folder / version_key(version)).write_bytes(b"0" * limit)
    reading = reader(run.folder)
    counts = [reading.read()["damaged_count"] for _ in range(4)]
    assert counts[0] < 8
    assert counts[-1] >= 10
    errors = [found for found in reading._found.values() if isinstance(found, DataError)]
    assert len(errors) == 10
    assert not any(error.__traceback__ or error.__cause__ for error in errors)


def test_a_repaired_manifest_is_taken_up_and_a_rewritten_one_is_noticed(tmp_path: Path) -> None:
    written, other = Written(tmp_path / "run", 6), Written(tmp_path / "other", 4, seed=9)
    file = written.folder / version_key(3)
    good = file.read_bytes()
    file.write_bytes(b"{}")
    reading = reader(written.folder)
    assert [row["version"] for row in reading.read()["damaged"]] == [3]
    file.write_bytes(good)
    assert reading.read()["damaged"] == []
    (written.folder / version_key(2)).write_bytes((other.folder / version_key(2)).read_bytes())
    damaged = reader(written.folder).read()["damaged"]
    assert {row["version"]: row["kind"] for row in damaged} == {2: "chain", 3: "chain"}


def test_another_run_at_the_same_url_is_read_anew(tmp_path: Path) -> None:
    Written(tmp_path / "run", 3)
    reading = reader(tmp_path / "run")
    assert reading.read()["head"]["version"] == 3
    Written(tmp_path / "other", 1, run="cd" * 16)
    (tmp_path / "run").rename(tmp_path / "old")
    (tmp_path / "other").rename(tmp_path / "run")
    found = reading.read()
    assert (found["id"], found["head"]["version"]) == ("cd" * 16, 1)


def test_fleet_holds_tags_and_lag(tmp_path: Path) -> None:
    busy_run(tmp_path / "run", layers=2, versions=50, width=16)
    found = overview(reader(tmp_path / "run").read())
    rows = {row["receiver"]: row for row in found["run"]["receivers"]}
    assert {name: row["served"] for name, row in rows.items() if row["live"]} == {
        "rollout-1": 50, "rollout-2": 50, "rollout-3": 46, "rollout-4": 49, "eval-1": 30,
    }  # fmt: skip
    assert (rows["rollout-3"]["behind"], rows["rollout-3"]["holding"]) == (4, True)
    assert rows["rollout-3"]["behind_seconds"] == pytest.approx(4 * 45, abs=30)
    assert (rows["eval-2"]["live"], rows["eval-2"]["left"]) == (False, True)
    assert found["run"]["tags"] == [{"name": "best", "version": 30}, {"name": "release-1", "version": 30}]
    assert found["headline"]["text"] == "2 of 5 receivers serve the newest version, 50"
    wheres = {problem["where"]: problem["level"] for problem in found["problems"]}
    assert wheres == {"receiver rollout-4": "error", "receiver rollout-3": "note"}


def test_many_receivers_and_tags_stay_within_bounds(tmp_path: Path) -> None:
    run = PageRun(tmp_path / "run", layered_table(1, 16), 2)
    run.busy(2)
    opened = open_run(str(run.folder))
    error = {"kind": "store", "message": "x"}
    for number in range(MAX_RECEIVERS + 5):
        write_heartbeat(opened, f"r{number}", 1, seconds=300, error=error if number else None)
    write_heartbeat(opened, "a", 2, seconds=300)  # the first by name, and nothing is wrong with it
    write_heartbeat(
        opened, "b", 0, seconds=300, following="head", head=2, lag=0
    )  # nor with one that serves exact versions only
    for number in range(MAX_TAGS + 5):
        run.writer.tag(f"t{number}", 1)
    found = overview(reader(run.folder).read())
    assert (len(found["run"]["receivers"]), found["run"]["fleet"]["live"]) == (MAX_RECEIVERS, MAX_RECEIVERS + 7)
    assert all(row["error"] for row in found["run"]["receivers"])
    assert found["headline"]["text"] == f"2 of {MAX_RECEIVERS + 7} receivers serve the newest version, 2"
    assert len(found["run"]["tags"]) == MAX_TAGS
    assert (len(found["problems"]), found["problem_count"]) == (MAX_PROBLEMS, MAX_RECEIVERS)


def test_servers_are_not_trusted(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run")
    malformed: tuple[dict[str, Any], ...] = (
        {},
        {"served": 3, "recent": [1, {"timings_ms": 2}], "lag": "x", "undo": [True, "x", 4]},
        {"ready": []},
    )
    for status in malformed:
        server = overview(None, ServerView("http://a", status))["servers"][0]
        assert (server["served"], server["lag"], server["ready"]) == (None, None, None)
        assert server["undo"] in ([], [4])
    long = run.status(5, "r" * 5000, state="s" * 5000, target="t" * 5000)
    server = overview(None, ServerView("http://a", long))["servers"][0]
    assert max(len(str(server[name])) for name in ("receiver", "state", "target")) <= 120
    lost = overview(None, ServerView("http://a", UnavailableError("connection refused")))
    assert lost["problems"][0]["where"] == "http://a"
    assert lost["problems"][0]["remedy"] == REMEDIES["unavailable"]
    other = run.status(5, "r1", run="ee" * 16)
    warned = overview(reader(run.folder).read(), ServerView("http://a", other))
    assert any(f"follows run {'ee' * 16}" in problem["what"] for problem in warned["problems"])
    assert warned["headline"]["text"].startswith("1 of 2 receivers")  # those of the run


def test_what_a_server_says_of_itself(tmp_path: Path) -> None:
    run = PageRun(tmp_path / "run", layered_table(1, 16), 20)
    run.busy(20)
    status = run.status(18, "r1")
    found = overview(reader(run.folder).read(), ServerView(None, status), source="server")
    assert found["headline"]["text"] == "Version 18 is served, 2 versions behind"
    place = {"version": 18, "quarantined": [], "held_back": None}
    before = run.status(18, "r1", holding=True, state="held", head=place, lag=0)  # it was held when 18 was the newest
    later = overview(reader(run.folder).read(), ServerView(None, before), source="server")
    assert (later["headline"], later["servers"][0]["lag"]) == (found["headline"], 2)
    server = found["servers"][0]
    assert server["meaning"] == STATES["idle"]
    commit, newest = status["recent"][-1], server["recent"][-1]
    timings = commit["timings_ms"]
    assert (newest["version"], newest["payload"], newest["pause"]) == (18, commit["payload_bytes"], timings["pause"])
    assert newest["staged"] == pytest.approx(sum(timings[name] for name in ("fetch", "verify", "decode", "route")))
    held = run.status(18, "r1", holding=True, ready={"ready": False, "reasons": ["held at version 18; release it"]})
    assert [problem["level"] for problem in overview(None, ServerView(None, held))["problems"]] == ["note"]


def test_every_kind_of_error_has_its_remedy() -> None:
    import vllm_delta_sync.engine.api.routes
    import vllm_delta_sync.engine.api.weight_transfer  # noqa: F401

    assert set(error_kinds()) - {"error"} <= set(REMEDIES)


def test_texts_arrive_whole_and_unchanged(tmp_path: Path) -> None:
    """Escaping is the page's matter: the document is text."""
    hostile_run(tmp_path / "run")
    found = overview(reader(tmp_path / "run").read())
    assert found["run"]["quarantined"][0]["reasons"] == list(HOSTILE)[:4]
    assert any("<img src=x" in kind for kind in found["run"]["heat"]["kinds"])


# Reading in the background


def after_read(background: BackgroundReader) -> RunView:
    background.latest()
    reading = background._reading
    if reading is not None:
        reading.join(60)
    return background.latest(may_read=False)


def test_any_number_of_viewers_is_one_read() -> None:
    begun, go = threading.Semaphore(0), threading.Event()
    reads = []

    def read() -> dict[str, Any]:
        reads.append(threading.current_thread())
        begun.release()
        assert go.wait(60)
        return {"number": len(reads)}

    background = BackgroundReader(read, seconds=3600)
    viewers = [threading.Thread(target=background.latest) for _ in range(20)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    assert begun.acquire(timeout=60)
    # A viewer does not wait for the bucket.
    assert background.latest() == RunView(None)
    go.set()
    assert after_read(background).document == {"number": 1}
    for _ in range(5):
        assert background.latest().document == {"number": 1}
    assert len(reads) == 1


def test_a_failed_read_keeps_what_was_read_before() -> None:
    answers: list[Any] = [{"number": 1}, FormatError("damaged"), ZeroDivisionError("bug"), {"number": 2}]

    def read() -> dict[str, Any]:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return dict(found)

    background = BackgroundReader(read, seconds=0)
    assert after_read(background).document == {"number": 1}
    for kind in ("format", "engine"):
        view = after_read(background)
        assert (view.document, view.error and view.error.kind) == ({"number": 1}, kind)
    view = after_read(background)
    assert (view.document, view.error) == ({"number": 2}, None)


def test_a_thread_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    background = BackgroundReader(lambda: {"number": 1}, seconds=3600)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            background.latest()
    assert after_read(background).document == {"number": 1}
