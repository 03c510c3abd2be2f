"""docs/troubleshooting.md names every kind of error and every alert, with a remedy, and quotes lines that exist.

What a reader sees is in the first column of its tables. A code span there that has a space quotes the program: its
words between ``…`` are in the source, after the kind of error that it may begin with.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.test_docs import anchors
from tests.support.monitoring import alerts
from vllm_delta_sync.cli.main import COMMANDS
from vllm_delta_sync.errors import DeltaSyncError, error_kinds

ROOT = Path(__file__).parents[2]
NAME = "docs/troubleshooting.md"
PAGE = (ROOT / NAME).read_text()
VARIES = "…"
SHORTEST_PROOF = 10
"""Characters of the shortest quoted words that tell one line from others."""
# Sources are parsed once for all of these.
pytestmark = pytest.mark.xdist_group("sources")
_SPAN = re.compile(r"`([^`]+)`")
_PRINTF = re.compile(r"%[-+0 #]*\d*(?:\.\d+)?[sdrgfx]")


def sections(text: str) -> dict[str, str]:
    """Text below each heading, by its anchor."""
    parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)[1:]
    return {next(iter(anchors(f"# {title}"))): body for title, body in zip(parts[::2], parts[1::2], strict=True)}


def tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)


def rows(text: str) -> list[list[str]]:
    """Cells of each row of the tables, without titles."""
    lines = [line for table in tables(text) for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def symptoms(text: str) -> list[list[str]]:
    """Rows of the tables of symptoms."""
    return rows("\n\n".join(table for table in tables(text) if table.startswith("| what you see |")))


@cache
def kinds() -> frozenset[str]:
    """Kinds of all classes of errors, those included that need vLLM to be imported."""
    found = set(error_kinds())
    for tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found |= {
                    item.value.value
                    for item in node.body
                    if isinstance(item, ast.Assign)
                    and [name.id for name in item.targets if isinstance(name, ast.Name)] == ["kind"]
                    and isinstance(item.value, ast.Constant)
                    and isinstance(item.value.value, str)
                }
    return frozenset(found - {DeltaSyncError.kind})


@cache
def sources() -> tuple[ast.Module, ...]:
    paths = [path for folder in ("vllm_delta_sync", "trainer_side") for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(ast.parse(path.read_text()) for path in paths)


@pytest.fixture(scope="module")
def printed() -> str:
    """Every text of the source but docstrings, with ``…`` for what is filled in, and the help of commands."""
    found = [" ".join(command.text.split()) for command in COMMANDS]
    for tree in sources():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else VARIES for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                text = _PRINTF.sub(VARIES, node.value)
            else:
                continue
            found.append(" ".join(text.split()))
    return "\n".join(found)


def quotations(text: str) -> list[str]:
    """What the first column quotes from the program."""
    return [span for row in symptoms(text) for span in _SPAN.findall(row[0]) if " " in span]


def unproven(text: str, printed: str) -> list[str]:
    """Quotations whose words are not in the source, or are too few to be looked for."""
    found = []
    for span in quotations(text):
        kind, colon, message = span.partition(": ")
        words = [part.strip() for part in (message if colon and kind in kinds() else span).split(VARIES)]
        alone = not any(words) and kind in kinds()
        if not all(part in printed for part in words) or not (alone or max(map(len, words)) >= SHORTEST_PROOF):
            found.append(span)
    return found


def test_every_kind_of_error_has_a_remedy_and_a_section() -> None:
    table = rows(sections(PAGE)["by-kind"])
    named = [kind for row in table for kind in _SPAN.findall(row[0])]
    assert len(named) == len(set(named))
    assert set(named) == kinds()
    for name, remedy, more in table:
        assert remedy, name
        assert re.fullmatch(r"\[[^]]+\]\(#[\w-]+\)", more), name


def test_every_kind_is_met_where_the_last_table_sends_the_reader() -> None:
    parts = sections(PAGE)
    for names, _, more in rows(parts["by-kind"]):
        shown = " ".join(row[0] for row in symptoms(parts[more.partition("#")[2].rstrip(")")]))
        for kind in _SPAN.findall(names):
            assert re.search(rf"`{kind}(?:: [^`]*)?`", shown), kind


def test_every_symptom_has_a_cause_and_a_remedy() -> None:
    assert len(symptoms(PAGE)) > 100
    for row in symptoms(PAGE):
        assert len(row) == 3, row
        assert all(row), row


def test_every_alert_is_named_in_the_section_that_it_points_to() -> None:
    parts = sections(PAGE)
    for rule in alerts():
        name = rule["alert"]
        assert any(f"`{name}`" in row[0] for row in symptoms(PAGE)), name
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        if file == NAME:
            assert f"`{name}`" in parts[anchor], name
    assert {span for row in symptoms(PAGE) for span in re.findall(r"`(DeltaSync\w+)`", row[0])} == {
        rule["alert"] for rule in alerts()
    }


def test_quoted_lines_exist(printed: str) -> None:
    assert len(quotations(PAGE)) > 100
    assert unproven(PAGE, printed) == []
