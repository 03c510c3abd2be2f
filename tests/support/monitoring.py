"""Read docker/monitoring/: the queries of alerts and dashboard, and which metrics and labels each one names."""

import json
import re
from dataclasses import dataclass
from typing import Any

from tests.support.compose import FOLDER, documents

MONITORING = FOLDER / "monitoring"
_WORDS = {
    *("and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool"),
    *("sum", "max", "min", "avg", "count", "time", "rate", "increase", "histogram_quantile"),
    *("min_over_time", "max_over_time"),
}
_SELECTOR = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)\s*(?:\{(?P<matchers>[^}]*)\})?")
_MATCHER = re.compile(r"""\s*(?P<label>\w+)\s*(?P<operator>=~|!~|!=|=)\s*"(?P<value>[^"]*)"\s*(?:,|$)""")
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Selector:
    """A metric in a query, and its matchers: (label, operator, value)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]

    def matches(self, labels: dict[str, str]) -> bool:
        """Whether a sample with these labels is selected, as Prometheus matches them."""
        return all(self._holds(operator, labels.get(label, ""), value) for label, operator, value in self.matchers)

    @staticmethod
    def _holds(operator: str, found: str, value: str) -> bool:
        same = re.fullmatch(value, found) is not None if operator in ("=~", "!~") else found == value
        return same != operator.startswith("!")


@dataclass(frozen=True)
class Query:
    """An expression in PromQL.

    Attributes:
        of: the alert or panel. grouped: labels that are named in ``by (…)``, ``ignoring (…)`` and the like.
    """

    of: str
    selectors: tuple[Selector, ...]
    grouped: tuple[str, ...]

    @classmethod
    def parse(cls, of: str, expression: str) -> "Query":
        """Find names and labels. Raises ValueError: a matcher cannot be read."""
        grouped = [label.strip() for found in _GROUPING.finditer(expression) for label in found[2].split(",")]
        rest = re.sub(r"\[[^\]]*\]|\boffset\s+\w+", "", _GROUPING.sub(r"\1", expression))
        selectors = []
        for found in _SELECTOR.finditer(rest):
            if found["matchers"] is None and found["name"] in _WORDS:
                continue
            matchers = tuple(
                (each["label"], each["operator"], each["value"]) for each in _MATCHER.finditer(found["matchers"] or "")
            )
            if _MATCHER.sub("", found["matchers"] or ""):
                raise ValueError(f"{of}: cannot read {found[0]!r}")
            selectors.append(Selector(found["name"], matchers))
        return cls(of, tuple(selectors), tuple(filter(None, grouped)))


def alerts() -> list[dict[str, Any]]:
    (document,) = documents(MONITORING / "alerts.yaml")
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "grafana" / "dashboard.json").read_text())
    return found


def queries() -> list[Query]:
    found = [Query.parse(rule["alert"], rule["expr"]) for rule in alerts()]
    for panel in dashboard()["panels"]:
        found += [Query.parse(panel["title"], target["expr"]) for target in panel.get("targets", [])]
    return found
