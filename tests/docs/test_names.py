"""One name, one thing: no two classes of the product share a name, and a module's name says which module it is."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("vllm_delta_sync", "trainer_side")
SAME_ON_PURPOSE = {
    "__init__",
    "__main__",
    "base",  # of buckets, and of what wraps them
    "errors",  # of the product, and of the Hub's clients
    "limits",  # of the format, and of requests to a store
}
"""Names of modules that stand in several packages of one tree. Commands in ``cli`` are named as what they call."""


def modules() -> Iterator[Path]:
    for tree in TREES:
        yield from sorted((ROOT / tree).rglob("*.py"))


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_two_modules_of_a_tree_share_a_name() -> None:
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in modules():
        inside = path.relative_to(ROOT)
        if path.stem not in SAME_ON_PURPOSE and inside.parts[1] != "cli":
            places[inside.parts[0], path.stem].append(str(inside))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_package_says_what_it_is_for() -> None:
    for path in modules():
        if path.name == "__init__.py":
            text = ast.get_docstring(ast.parse(path.read_text()))
            assert text, f"{path.relative_to(ROOT)} has no docstring"
