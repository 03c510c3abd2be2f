"""Render bench-out/*.json as docs/benchmarks.md and its charts: run as ``python -m benchmarks.render``.

Sections of benchmarks that were not run again stay as they are. A benchmark may say how its rows are shown: with
``tables(rows)`` → Markdown lines, and ``CHARTS``, {file name: (what it shows, function that draws rows to a path)}.
"""

import importlib
import inspect
import json
import re
from pathlib import Path

from benchmarks.charts import Chart
from benchmarks.tables import listing

SOURCE, TARGET = Path("bench-out"), Path("docs/benchmarks.md")
HEAD = "# Benchmarks\n\nMade by `make bench`; each section is one run on the machine it names.\n"


def render(source: Path = SOURCE, before: str = "") -> str:
    """The document's text, with what ``before`` has of benchmarks that are not in ``source``."""
    sections = {text.partition("\n")[0]: text.rstrip() for text in re.split(r"^## ", before, flags=re.MULTILINE)[1:]}
    for path in source.glob("*.json"):
        sections[path.stem] = _section(path)
    return "\n".join([HEAD, *(f"## {sections[name]}\n" for name in sorted(sections))])


def _section(path: Path) -> str:
    document = json.loads(path.read_text())
    module = importlib.import_module(f"benchmarks.{path.stem}")
    about = inspect.cleandoc(module.__doc__ or "")
    lines = [path.stem, "", about, "", f"Measured on: {document['machine']}.", ""]
    charts: dict[str, Chart] = getattr(module, "CHARTS", {})
    for name, (shown, _) in charts.items():
        lines += [f"![{shown}]({name})", ""]
    return "\n".join([*lines, *getattr(module, "tables", listing)(document["rows"])]).rstrip()


def draw(source: Path = SOURCE, folder: Path = TARGET.parent) -> None:
    """Draw every chart of every benchmark that has been run."""
    for path in sorted(source.glob("*.json")):
        charts: dict[str, Chart] = getattr(importlib.import_module(f"benchmarks.{path.stem}"), "CHARTS", {})
        for name, (_, chart) in charts.items():
            chart(json.loads(path.read_text())["rows"], folder / name)


def main() -> None:
    TARGET.write_text(render(before=TARGET.read_text() if TARGET.exists() else ""))
    draw()


if __name__ == "__main__":
    main()
