"""docker/monitoring/: alerts and dashboard name what exists and say what to do, and compose mounts all of it."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_docs import anchors
from tests.support.compose import FOLDER, documents
from tests.support.monitoring import MONITORING, Query, alerts, dashboard, queries
from vllm_delta_sync.engine.observe import metrics
from vllm_delta_sync.engine.observe.states import STATES
from vllm_delta_sync.errors import error_kinds

ROOT = FOLDER.parent
OF_A_TARGET = {"instance", "job"}
"""Labels that Prometheus adds."""
OF_OTHERS = {
    "up": OF_A_TARGET,
    "ALERTS": {"alertname", "alertstate", "severity", "kind", *OF_A_TARGET},
    "vllm:num_requests_running": OF_A_TARGET,
    "vllm:num_requests_waiting": OF_A_TARGET,
    "vllm:generation_tokens_total": OF_A_TARGET,
}
"""Metrics of Prometheus and of vLLM. tests/e2e/test_operations.py finds those of vLLM at a server."""
VALUES: dict[str, set[str]] = {
    **{label: set(values) for label, values in metrics.LABELS.values() if values},
    "state": set(STATES),
    "kind": set(error_kinds()),
}


def labels_of(name: str) -> set[str] | None:
    """Labels of a metric by its name in queries; None if there is no such metric."""
    if name in OF_OTHERS:
        return OF_OTHERS[name]
    found = re.fullmatch(rf"{metrics.PREFIX}(\w+?)(_bucket|_sum|_count)?", name)
    if found is None or found[1] not in (metrics.HISTOGRAMS if found[2] else metrics.COUNTERS | metrics.GAUGES):
        return None
    own = {metrics.LABELS[found[1]][0]} if found[1] in metrics.LABELS else set()
    return own | OF_A_TARGET | ({"le"} if found[2] == "_bucket" else set())


def labels_of_query(query: Query) -> set[str]:
    return set().union(*(labels_of(selector.name) or set() for selector in query.selectors))


def named_of(text: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, text))


def by_name(query: Query) -> str:
    return query.of


@pytest.mark.parametrize("query", queries(), ids=by_name)
def test_metrics_labels_and_their_values_exist(query: Query) -> None:
    assert query.selectors
    for name, matchers in ((selector.name, selector.matchers) for selector in query.selectors):
        labels = labels_of(name)
        assert labels is not None, name
        for label, _, value in matchers:
            assert label in labels, (name, label)
            if label in VALUES:
                assert set(value.split("|")) <= VALUES[label], (name, label, value)
    assert set(query.grouped) <= labels_of_query(query)


def test_every_alert_says_what_to_do_and_where_more_is_said() -> None:
    for rule in alerts():
        assert rule["labels"].keys() == {"severity"}, rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}, rule["alert"]
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert anchor in anchors((ROOT / file).read_text()), rule["alert"]
        shown = named_of(" ".join(rule["annotations"].values()), r"\$labels\.(\w+)")
        assert shown <= labels_of_query(Query.parse("", rule["expr"])), rule["alert"]
        assert "instance" in shown, rule["alert"]


def test_alerts_are_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `(DeltaSync\w+)` \| (\w+) \|", text, re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"]) for rule in alerts()]


def test_dashboard_names_labels_and_variables_that_exist() -> None:
    document = dashboard()
    variables = {variable["name"] for variable in document["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    for panel in document["panels"]:
        for target in panel.get("targets", []):
            assert named_of(target["expr"], r"\$(\w+)") <= variables
            known = labels_of_query(Query.parse("", target["expr"]))
            assert named_of(target["legendFormat"], r"\{\{(\w+)\}\}") <= known, panel["title"]


def compose() -> dict[str, Any]:
    (document,) = documents(FOLDER / "compose.yaml")
    return {name: entry for name, entry in document["services"].items() if entry.get("profiles") == ["monitoring"]}


def mounts(service: dict[str, Any]) -> dict[str, Path]:
    """Path in the container → file of this repository; only what is mounted from here."""
    parts = [volume.split(":") for volume in service["volumes"] if volume.startswith("./")]
    assert all(mode == "ro" for _, _, mode in parts)
    return {inside: FOLDER / outside for outside, inside, _ in parts}


def test_prometheus_finds_servers_and_rules() -> None:
    service = compose()["prometheus"]
    found = mounts(service)
    (config_path,) = [word.partition("=")[2] for word in service["command"] if word.startswith("--config.file=")]
    (config,) = documents(found[config_path])
    for rules in config["rule_files"]:
        assert found[str(Path(config_path).parent / rules)] == MONITORING / "alerts.yaml"
    (job,) = config["scrape_configs"]
    (targets,) = job["static_configs"]
    (document,) = documents(FOLDER / "compose.yaml")
    servers = [name for name in document["services"] if name.startswith("server-")]
    assert targets["targets"] == [f"{server}:8000" for server in servers]
    jobs = {
        value
        for query in queries()
        for selector in query.selectors
        for label, _, value in selector.matchers
        if label == "job"
    }
    assert jobs == {job["job_name"]}


# Alerts over time, by Prometheus's own program.

FREE, HELD = ('delta_sync_state{state="held"}', "0x400"), ('delta_sync_state{state="held"}', "1x400")
# Whether the server reads the bucket: one that is held, refused or lost does not, nor one whose store is unreachable.
READS, DEAF = ("delta_sync_look_timestamp_seconds", "0+60x400"), ("delta_sync_look_timestamp_seconds", "0x400")


def lag(values: str) -> tuple[str, str]:
    return "delta_sync_lag_versions", values


def failures(kind: str, values: str) -> tuple[str, str]:
    return f'delta_sync_failures_total{{kind="{kind}"}}', values


def pauses(below_a_second: int) -> list[tuple[str, str]]:
    """Ten pauses a minute, so many of them below a second and all below 2.5."""
    counts = {"1.0": below_a_second, "2.5": 10, "+Inf": 10}
    return [(f'delta_sync_pause_seconds_bucket{{le="{le}"}}', f"0+{count}x30") for le, count in counts.items()]


@dataclass(frozen=True)
class Case:
    """Whether an alert fires after so many minutes.

    Attributes:
        series: metric and its values, one a minute, as promtool reads them. value: as the annotations show it.
        labels: that the alert has beside those of its target; None if it does not fire.
    """

    alert: str
    minutes: int
    series: list[tuple[str, str]]
    labels: dict[str, str] | None = None
    value: str = ""


CASES = [
    Case("DeltaSyncServerDown", 3, [("up", "1 0x5")], {}),
    Case("DeltaSyncServerDown", 5, [("up", "1 0 1x5")]),
    Case("DeltaSyncLost", 5, [('delta_sync_state{state="lost"}', "0 1x9")], {"state": "lost"}),
    Case("DeltaSyncLost", 5, [('delta_sync_state{state="lost"}', "0x9")]),
    Case("DeltaSyncRefused", 5, [('delta_sync_state{state="refused"}', "0 1x9")], {"state": "refused"}),
    Case("DeltaSyncRefused", 5, [('delta_sync_state{state="refused"}', "0 1 0x9")]),
    Case("DeltaSyncNotReady", 16, [("delta_sync_ready", "0x20"), FREE], {}),
    Case("DeltaSyncNotReady", 16, [("delta_sync_ready", "0x20"), HELD]),
    Case("DeltaSyncNotReady", 16, [("delta_sync_ready", "0x10 1 0x9"), FREE]),
    Case("DeltaSyncLagging", 12, [lag("0 6x20"), FREE], {}, "6"),
    Case("DeltaSyncLagging", 12, [lag("0 5x20"), FREE]),
    Case("DeltaSyncLagging", 12, [lag("NaN " * 20), FREE]),
    Case("DeltaSyncLagging", 12, [lag("0 6x20"), HELD]),
    Case("DeltaSyncLagGrowing", 60, [lag("0+1x60"), FREE], {}),
    Case("DeltaSyncLagGrowing", 60, [lag("4x60"), FREE]),
    Case("DeltaSyncLagGrowing", 60, [lag("0 9 " * 30), FREE]),
    Case("DeltaSyncLagGrowing", 60, [lag("0+1x60"), HELD]),
    Case("DeltaSyncHeldForLong", 360, [HELD], {"state": "held"}),
    Case("DeltaSyncHeldForLong", 300, [HELD]),
    Case("DeltaSyncNotPolling", 12, [("delta_sync_look_timestamp_seconds", "0x20"), FREE], {}, "12m 0s"),
    Case("DeltaSyncNotPolling", 9, [("delta_sync_look_timestamp_seconds", "0x20"), FREE]),
    Case("DeltaSyncNotPolling", 20, [("delta_sync_look_timestamp_seconds", "0+60x20"), FREE]),
    Case("DeltaSyncNotPolling", 20, [("delta_sync_look_timestamp_seconds", "0x20"), HELD]),
    Case("DeltaSyncHeadExpired", 10, [failures("expired", "0x4 1+30x9")], {"kind": "expired"}),
    Case("DeltaSyncHeadExpired", 30, [failures("expired", "0 9x40")]),
    Case("DeltaSyncUntrusted", 5, [failures("signature", "0 0 1x9")], {"kind": "signature"}),
    Case("DeltaSyncUntrusted", 5, [failures("replay", "0 0 1x9")], {"kind": "replay"}),
    Case("DeltaSyncUntrusted", 5, [failures("fork", "0 0 1x9")], {"kind": "fork"}),
    Case("DeltaSyncUntrusted", 5, [failures("store", "0 0 1x9")]),
    Case("DeltaSyncFailing", 20, [failures("store", "0 0+1x30")], {"kind": "store"}),
    Case("DeltaSyncFailing", 20, [failures("store", "0 0 1x9 2x20")]),
    Case("DeltaSyncFailing", 20, [failures("expired", "0+9x30")]),
    Case("DeltaSyncRepaired", 10, [('delta_sync_commits_total{move="repair"}', "0 0 1x20")], {"move": "repair"}),
    Case("DeltaSyncRepaired", 10, [('delta_sync_commits_total{move="forward"}', "0+1x20")]),
    Case("DeltaSyncPauseTooLong", 20, pauses(below_a_second=9), {}, "2.35s"),
    Case("DeltaSyncPauseTooLong", 20, pauses(below_a_second=10)),
    Case("DeltaSyncQuarantined", 2, [("delta_sync_head_quarantined", "0 1x5")], {}),
    Case("DeltaSyncQuarantined", 2, [("delta_sync_head_quarantined", "1 0x5")]),
    Case("DeltaSyncQuarantined", 9, [("delta_sync_head_quarantined", "0 1x9"), DEAF]),
    Case("DeltaSyncPublisherSilent", 70, [("delta_sync_head_version", "7x80"), READS], {}, "7"),
    Case("DeltaSyncPublisherSilent", 70, [("delta_sync_head_version", "7x30 8x50"), READS]),
    Case("DeltaSyncPublisherSilent", 70, [("delta_sync_head_version", "_x30 7x50"), READS]),
    Case("DeltaSyncPublisherSilent", 70, [("delta_sync_head_version", "7x80"), DEAF]),
]
TARGET = {"instance": "server:8000", "job": "delta-sync"}


def for_promtool(case: Case) -> dict[str, Any]:
    """The case as promtool's file of unit tests has it."""
    (rule,) = (rule for rule in alerts() if rule["alert"] == case.alert)
    fired = []
    if case.labels is not None:
        labels = {**rule["labels"], **TARGET, **case.labels}
        fired.append({"exp_labels": labels, "exp_annotations": filled(rule["annotations"], labels, case.value)})
    own = ", ".join(f'{label}="{value}"' for label, value in TARGET.items())
    series = [
        {"series": f"{name.partition('{')[0]}{{{own}, {name.partition('{')[2] or '}'}", "values": values}
        for name, values in case.series
    ]
    check = {"eval_time": f"{case.minutes}m", "alertname": case.alert, "exp_alerts": fired}
    return {"interval": "1m", "input_series": series, "alert_rule_test": [check]}


def filled(annotations: dict[str, str], labels: dict[str, str], value: str) -> dict[str, str]:
    """Annotations with labels and the value put in."""

    def put(text: str) -> str:
        text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
        return re.sub(r"\{\{ \$value[^}]*\}\}", value, text)

    return {name: put(text) for name, text in annotations.items()}


def newest_quarantined() -> dict[str, Any]:
    """What the dashboard says of the newest version, where a held server still has an older one as the newest."""
    (panel,) = (panel for panel in dashboard()["panels"] if panel["title"] == "Newest version")
    expression = panel["targets"][1]["expr"].replace('{instance=~"$instance"}', "")
    series = [
        {"series": f'delta_sync_head_{name}{{instance="{instance}"}}', "values": values}
        for instance, versions, marks in (("held", "8 8", "1 1"), ("other", "8 20", "1 0"))
        for name, values in (("version", versions), ("quarantined", marks))
    ]
    checks = [
        {"expr": expression, "eval_time": when, "exp_samples": found}
        for when, found in (("0m", [{"labels": "{}", "value": 8}]), ("1m", []))
    ]
    return {"interval": "1m", "input_series": series, "promql_expr_test": checks}


def test_alerts_fire_when_they_should_and_else_not(tmp_path: Path) -> None:
    every = {rule["alert"] for rule in alerts()}
    assert {case.alert for case in CASES if case.labels is not None} == every
    assert {case.alert for case in CASES if case.labels is None} == every
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, of Debian's package prometheus, is not installed")
    cases = tmp_path / "cases.json"  # JSON is YAML
    rules = [str(MONITORING / "alerts.yaml")]
    tests = [*map(for_promtool, CASES), newest_quarantined()]
    cases.write_text(json.dumps({"rule_files": rules, "tests": tests}))
    for arguments in (("check", "config", MONITORING / "prometheus.yaml"), ("test", "rules", cases)):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
