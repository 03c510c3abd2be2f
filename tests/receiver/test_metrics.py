"""What Prometheus and the log are told: of each move, by one process of several, and nothing where nobody listens."""

import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.support.chains import Server
from tests.support.marked import MarkedChain
from tests.support.running import ROOT
from tests.support.world import World
from vllm_delta_sync import open_run
from vllm_delta_sync.engine.follow import updater
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.observe import metrics
from vllm_delta_sync.engine.observe.states import STATES
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.errors import ChainError, FingerprintError, NotFoundError, error_kinds
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.server_client import ServerStatus
from vllm_delta_sync.settings import Settings


def sample(name: str, **labels: str) -> float:
    """What is shown now; zero if it is not."""
    return REGISTRY.get_sample_value(metrics.PREFIX + name, labels) or 0.0


def grown(name: str, **labels: str) -> Callable[[], float]:
    """By how much it has grown since."""
    before = sample(name, **labels)
    return lambda: sample(name, **labels) - before


def test_each_move_is_counted_once_with_what_it_took(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.receiver.advance()
    moves = {move: grown("commits_total", move=move) for move in metrics.MOVES}
    versions, size = grown("versions_total"), grown("payload_bytes_total")
    changed, pauses = grown("changed_elements_total"), grown("pause_seconds_count")
    phases = {phase: grown("phase_seconds_sum", phase=phase) for phase in metrics.PHASES}
    world.train_and_follow(1, 2)
    (commit,) = world.receiver.status()["recent"]
    assert (versions(), pauses()) == (2, 1)
    assert (size(), changed()) == (commit["payload_bytes"], commit["changed"])
    for phase, took in phases.items():
        assert took() == pytest.approx(commit["timings_ms"][phase] / 1e3, abs=1e-6), phase
    world.receiver.rollback(0)
    world.model.norm.data.mul_(2)
    world.receiver.verify()
    world.receiver.repair()
    assert {move: took() for move, took in moves.items()} == {"forward": 1, "rollback": 1, "repair": 1}
    status = world.receiver.status()
    assert (status["commits"], status["timings_ms"]) == (3, status["recent"][-1]["timings_ms"])
    shown = ServerStatus.model_validate(status).recent
    assert [(row.version, row.versions, row.pause is None) for row in shown] == [
        (2, 2, False),
        (0, 0, False),
        (0, 0, False),
    ]
    assert (versions(), pauses()) == (2, 3)


def test_gauges_follow_the_status(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.receiver.board.export_metrics()
    assert sample("served_version") != sample("served_version"), "NaN before a version is proven"
    assert (sample("state", state="waiting_for_run"), sample("ready")) == (1, 0)
    world.receiver.advance()
    world.train_and_follow(7)
    shown = {name: sample(name) for name in ("served_version", "served_step", "head_version", "lag_versions", "ready")}
    assert shown == {"served_version": 1, "served_step": 7, "head_version": 1, "lag_versions": 0, "ready": 1}
    assert (sample("undo_versions"), sample("head_quarantined")) == (1, 0)
    assert sample("served_timestamp_seconds") <= sample("look_timestamp_seconds") + 60
    world.receiver.rollback(0)
    assert {state: sample("state", state=state) for state in STATES} == {s: float(s == "held") for s in STATES}
    assert (sample("lag_versions"), sample("served_version"), sample("ready")) == (1, 0, 0)


@pytest.mark.parametrize(("target", "lag"), [("1", 0.0), ("tag:best", None), ("head", 2.0)])
def test_lag_counts_up_to_the_version_that_the_target_names(tmp_path: Path, target: str, lag: float | None) -> None:
    """Or the alert DeltaSyncLagging fires for a server that is where its operator wants it."""
    world = World(tmp_path)
    world.train(1)
    set_tag(open_run(world.url), "best", 1)
    world.follow(target=target)
    world.receiver.board.export_metrics()
    world.receiver.advance()
    world.train(2)
    world.train(3)
    world.receiver.observe()  # as with policy manual
    shown = sample("lag_versions")
    assert (None if shown != shown else shown) == lag


def test_a_quarantined_head_is_shown_until_a_sound_version_follows(tmp_path: Path) -> None:
    chain = MarkedChain(tmp_path)
    server = Server(chain, chain.bits[0])
    server.receiver.board.export_metrics()
    for played, quarantined in ((".", 0), ("!", 1), (".", 0)):
        chain.play(played)
        server.receiver.advance()
        assert sample("head_quarantined") == quarantined


def test_failures_are_counted_by_kind_and_nothing_names_a_place(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.receiver.advance()
    failures = grown("failures_total", kind="not_found")
    run = world.receiver.run_id
    for name in ("run.json", "HEAD.json"):
        (Path(world.url) / name).rename(tmp_path / name)
    for _ in range(2):
        with pytest.raises(NotFoundError):
            world.receiver.advance()
    assert failures() == 2
    shown = generate_latest().decode()
    ours = "".join(line for line in shown.splitlines(True) if "delta_sync" in line)
    assert world.url not in ours
    assert str(run) not in ours
    kinds = set(re.findall(r'delta_sync_failures_total\{kind="(\w+)"\}', ours))
    assert kinds == set(error_kinds())


@pytest.mark.parametrize(
    ("writer", "found_by", "count"),
    [
        ("update_weights", "advance", 1),
        (None, "verify", 1),
        ("update_weights", "check_served", 1),
        ("wake_up", "advance", 0),
    ],
)
def test_changed_weights_are_one_failure(tmp_path: Path, writer: str | None, found_by: str, count: int) -> None:
    """None if a sleep at level 2 has lost them, as it should."""
    world = World(tmp_path)
    world.receiver.advance()
    failures = grown("failures_total", kind="fingerprint")
    world.model.norm.data.mul_(2)
    if writer is not None:
        world.port.ranks[0].note_external_write(writer)
    with suppress(FingerprintError):
        getattr(world.receiver, found_by)()
    assert failures() == count
    error = world.receiver.status()["last_error"]
    assert (error and error["kind"], world.receiver.served_version) == (("fingerprint", None) if count else (None, 0))


def test_waiting_is_no_failure(tmp_path: Path) -> None:
    """For a publisher, or for the version that the target names; the alert DeltaSyncFailing does not fire."""
    world = World(tmp_path)
    failures = {kind: grown("failures_total", kind=kind) for kind in ("not_found", "chain")}
    waiting = Receiver(world.port, Settings(bucket=str(tmp_path / "nothing")))
    with pytest.raises(NotFoundError):
        waiting.advance()
    assert waiting.status()["last_error"]["kind"] == "not_found"
    world.follow(target="tag:best")
    run = open_run(world.url)
    with pytest.raises(NotFoundError, match="has no tag 'best'"):
        world.receiver.advance()
    world.train(1)
    set_tag(run, "best", 1)
    world.receiver.advance()
    set_tag(run, "best", 0)
    with pytest.raises(ChainError, match="does not roll back by itself"):
        world.receiver.advance()
    assert world.receiver.served_version == 1
    assert {kind: count() for kind, count in failures.items()} == {"not_found": 0, "chain": 0}


def test_vllm_keeps_them_and_names_are_as_prometheus_wants_them() -> None:
    metrics.register()
    metrics.show(dict.fromkeys(metrics.GAUGES.keys() - {"state"}), "idle", STATES)
    unregister_vllm_metrics()
    shown = generate_latest().decode()
    kinds = dict(re.findall(r"^# TYPE (delta_sync_\w+) (\w+)$", shown, re.MULTILINE))
    made = {name: kind for name, kind in kinds.items() if not name.endswith("_created")}
    expected = {"histogram": metrics.HISTOGRAMS, "counter": metrics.COUNTERS, "gauge": metrics.GAUGES}
    assert made == {metrics.PREFIX + name: kind for kind, names in expected.items() for name in names}
    assert all(name.endswith("_seconds") for name in metrics.HISTOGRAMS)
    assert all(name.endswith("_total") for name in metrics.COUNTERS)


def test_every_metric_is_documented() -> None:
    table = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `delta_sync_(\w+?)(?:\{(\w+)\})?` \| (\w+) \| (.*) \|$", table, re.MULTILINE)
    known = {"histogram": metrics.HISTOGRAMS, "counter": metrics.COUNTERS, "gauge": metrics.GAUGES}
    expected = {
        (name, metrics.LABELS.get(name, ("",))[0], kind, text)
        for kind, names in known.items()
        for name, text in names.items()
    }
    assert set(rows) == expected


# The line of the log for each change of weights


ENDING = r"committed [\d.]+ ms, (resumed [\d.]+ ms, )?paused [\d.]+ ms"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of moves since the last call."""
    found = [record.getMessage() for record in caplog.records if re.match(r"version \d+ \(step", record.getMessage())]
    caplog.clear()
    return found


def test_every_move_has_one_line_of_the_same_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.delta_sync")
    world = World(tmp_path)
    world.receiver.advance()
    world.train_and_follow(480)
    (line,) = lines(caplog)
    assert re.fullmatch(rf"version 1 \(step 480\) served: [\d.]+ % changed, [\d.]+ MB; .*{ENDING}", line)
    for step in (481, 482):
        world.tensors["model.norm.weight"].mul_(1.5)
        world.train(step)
    world.receiver.advance()
    (line,) = lines(caplog)
    form = r"version 3 \(step 482\) served: 2 versions in one commit, ([\d,]+) elements written, [\d.]+ MB; "
    found = re.match(form, line)
    assert found is not None
    # What both versions changed is written once.
    assert 0 < int(found[1].replace(",", "")) < world.receiver.status()["recent"][-1]["changed"]
    world.receiver.rollback(1)
    (line,) = lines(caplog)
    assert re.fullmatch(rf"version 1 \(step 480\) served: rolled back from version 3; .*{ENDING}", line)
    world.model.norm.data.mul_(2)
    world.receiver.verify()
    world.receiver.repair()
    (line,) = lines(caplog)
    assert line.startswith("version 1 (step 480) served: weights that were changed from outside are repaired; fetched ")


def test_anchor_is_told_as_such_and_its_reading_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.delta_sync")
    world = World(tmp_path, with_base=False)
    world.model.norm.data[:] = 0
    world.receiver.advance()
    (line,) = lines(caplog)
    timings = world.receiver.status()["timings_ms"]
    assert re.match(r"version 0 \(step \d+\) served: taken whole, [\d.]+ MB; ", line)
    # The line has three digits, and no phase below 0.05 ms; the status has three decimals of each.
    shown = {word: float(number) for word, number in re.findall(r"(\w+) ([\d.]+)", line.partition("; ")[2])}
    assert shown.keys() <= set(updater.PHASES.values())
    for phase, word in updater.PHASES.items():
        expected = timings.get(phase, 0)
        assert shown.get(word, 0) == pytest.approx(expected, rel=0.005, abs=0.05), word
    assert list(timings) == [phase for phase in updater.PHASES if phase in timings]
    assert {"fetch", "verify", "decode", "route"} <= timings.keys()
    assert min(timings["verify"], timings["fetch"], timings["decode"]) > 0


def test_gauges_of_an_older_status_are_never_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of notices changes the status too: its change comes while another's is being written."""
    board = StatusBoard("follow")
    board.export_metrics()
    show, newer = metrics.show, threading.Thread(target=board.set, kwargs={"undo": [0, 1]})

    def slow(*shown: Any) -> None:
        if threading.current_thread() is not newer and newer.ident is None:
            newer.start()
            newer.join(0.5)
        show(*shown)

    monkeypatch.setattr(metrics, "show", slow)
    board.set(undo=[0])
    newer.join()
    assert sample("undo_versions") == 2
