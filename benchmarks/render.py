"""Render bench-out/*.json as docs/benchmarks.md: run as ``python -m benchmarks.render``."""

import importlib
import inspect
import json
from pathlib import Path

SOURCE, TARGET = Path("bench-out"), Path("docs/benchmarks.md")


def render(source: Path = SOURCE) -> str:
    """The document's text."""
    lines = ["# Benchmarks", "", "Made by `make bench`; each table is one run on the machine it names.", ""]
    for path in sorted(source.glob("*.json")):
        document = json.loads(path.read_text())
        about = inspect.cleandoc(importlib.import_module(f"benchmarks.{path.stem}").__doc__ or "")
        lines += [f"## {path.stem}", "", about, "", f"Measured on: {document['machine']}.", ""]
        lines += ["| case | metric | value | unit | peer |"]
        lines += ["|---|---|---:|---|---|"]
        lines += [
            f"| {row['case']} | {row['metric']} | {row['value']:.4g} | {row['unit']} | {row.get('peer', '')} |"
            for row in document["rows"]
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    TARGET.write_text(render())


if __name__ == "__main__":
    main()
