"""docs/architecture.md lists every package, pictures are drawn from pages' tables, and no imports form a circle."""

from graphlib import TopologicalSorter
from pathlib import Path

import grimp

from tests.support.running import run_python

ROOT = Path(__file__).parents[2]
WITHIN = {
    "vllm_delta_sync",
    "vllm_delta_sync/engine",
    "vllm_delta_sync/codec/tiles",
    "vllm_delta_sync/bucket/hub",
    "vllm_delta_sync/bucket/middleware",
    "vllm_delta_sync/maintenance/gc",
    "vllm_delta_sync/maintenance/repair",
}
"""Packages that are described with the one they belong to, or hold the others."""


def test_every_package_is_listed() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for tree in ("vllm_delta_sync", "trainer_side"):
        for path in sorted((ROOT / tree).rglob("__init__.py")):
            package = path.parent.relative_to(ROOT).as_posix()
            assert package in WITHIN or f"| `{package}` |" in text, f"{package} is missing in docs/architecture.md"


def test_the_pictures_are_up_to_date() -> None:
    run_python("docs/draw_architecture.py", "--check")


def test_no_imports_form_a_circle() -> None:
    # Imports inside functions and under TYPE_CHECKING count too.
    graph = grimp.build_graph("vllm_delta_sync", "trainer_side", cache_dir=None)
    # Raises CycleError, which names the modules of a circle.
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
