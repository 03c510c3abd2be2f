"""Write docs/benchmarks.md and the tables of ``PAGES`` from benchmarks/results/*.json.

``python -m benchmarks.render [--charts]``. A benchmark says in its ``__main__`` how its rows are shown: with
``tables(rows)`` → Markdown lines, and ``CHARTS``, {file name: (what it shows, function that draws rows to a path)},
which ``--charts`` draws anew. ``blocks(rows)`` → {name: Markdown lines} is for the pages in ``PAGES``: each replaces
what a page has between ``<!-- BENCH NAME -->`` and ``<!-- end -->``. ``<!-- claims readme -->`` has the claims
marked so. A benchmark with a ``PAGE`` of its own, a file in docs/, has no section in docs/benchmarks.md, only a link.
"""

import argparse
import importlib
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.claims import CLAIMS, Claim
from benchmarks.common import real_model
from benchmarks.common.charts import Chart
from benchmarks.common.tables import number, pivot, value_of

ROOT = Path(__file__).parents[1]
SOURCE, TARGET = ROOT / "benchmarks/results", ROOT / "docs/benchmarks.md"
PAGES = (ROOT / "README.md", *(ROOT / f"docs/{page}.md" for page in ("how-it-works", "scale", "sparsity", "when-not")))
BLOCK = re.compile(r"(<!-- (\w+) (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = f"""\
# Benchmarks

Made by `python -m benchmarks.render` from `benchmarks/results/`, which `make bench` writes and which has more rows than
these tables. What is measured, and how, is said by the first lines of each benchmark's `__main__.py`.
*Settled* is SmolLM2-135M, {real_model.ORIGIN}, as after hundreds of steps of AdamW."""


def render(source: Path = SOURCE) -> str:
    """The document's text."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(source.glob("*.json"))}
    notes = dict.fromkeys(str(document["note"]) for document in results.values() if "note" in document)
    apart = {name: str(_module(name).PAGE) for name in results if hasattr(_module(name), "PAGE")}
    elsewhere = "".join(f" [{page}]({page}) has those of `{name}`." for name, page in apart.items())
    lines = [f"{HEAD}{elsewhere}\n", *(f"{note}\n" for note in notes)]
    known = [claim for claim in CLAIMS if claim.bench in results]
    if known:
        lines += _claims(known, results)
    for name, document in results.items():
        if name not in apart:
            lines += ["", *_section(name, document)]
    return "\n".join(lines) + "\n"


def _claims(claims: list[Claim], results: dict[str, Any]) -> list[str]:
    head = ["| claim | figure | command | date |", "|---|---|---|---|"]
    return head + [_claim(claim, results[claim.bench]) for claim in claims]


def _claim(claim: Claim, document: dict[str, Any]) -> str:
    values = [number(value_of(document["rows"], *pick)) for pick in claim.picks]
    command = f"`python -m benchmarks.{claim.bench} --json FILE`"
    return f"| {claim.text} | {claim.figure.format(*values)} | {command} | {document['date']} |"


def _section(name: str, document: dict[str, Any]) -> list[str]:
    module = _module(name)
    about = inspect.cleandoc(module.__doc__ or "").partition("\n\n")[0]
    lines = [f"## {name}", "", f"{about} {_measured(document)}", ""]
    charts = [f"![{shown}]({file})" for file, (shown, _) in _charts(module).items()]
    lines += [" ".join(charts), ""] if charts else []
    if hasattr(module, "tables"):
        return lines + list(module.tables(document["rows"]))
    return lines + pivot("case", document["rows"], lambda item: (item["case"], f"{item['metric']} [{item['unit']}]"))


def _measured(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in document["versions"].items())
    commit = f", commit {document['commit'][:7]}" if document["commit"] else ""
    return f"Measured on {document['date']}{commit}, {document['machine']}, {versions}."


def fill(page: str, source: Path = SOURCE) -> str:
    """A page's text with its tables made anew."""

    def block(found: re.Match[str]) -> str:
        if found[2] == "claims":
            shown = [claim for claim in CLAIMS if claim.readme]
            results = {claim.bench: json.loads((source / f"{claim.bench}.json").read_text()) for claim in shown}
            return found[1] + "\n".join([*_claims(shown, results), found[4]])
        document = json.loads((source / f"{found[2]}.json").read_text())
        lines = {"measured": [_measured(document)], **_module(found[2]).blocks(document["rows"])}[found[3]]
        return found[1] + "\n".join([*lines, found[4]])

    return BLOCK.sub(block, page)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}.__main__")


def _charts(module: ModuleType) -> dict[str, Chart]:
    return getattr(module, "CHARTS", {})


def draw(source: Path = SOURCE, folder: Path = TARGET.parent) -> None:
    """Draw every chart of every benchmark that has results."""
    for path in sorted(source.glob("*.json")):
        for file, (_, chart) in _charts(_module(path.stem)).items():
            chart(json.loads(path.read_text())["rows"], folder / file)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__)
    parser.add_argument("--charts", action="store_true", help="draw the charts too")
    options = parser.parse_args()
    TARGET.write_text(render())
    for page in PAGES:
        page.write_text(fill(page.read_text()))
    if options.charts:
        draw()


if __name__ == "__main__":
    main()
