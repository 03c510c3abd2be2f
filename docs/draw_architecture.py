"""Draw docs/architecture.svg from the tables of architecture.md: ``python docs/draw_architecture.py [--check]``."""

import argparse
import html
import re
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("architecture.md")
TARGET = Path(__file__).with_name("architecture.svg")
COLUMNS = {"trainer_side": 0, "vllm_delta_sync": 1, "vllm_delta_sync/engine": 2}
TITLES = ("trainer: trainer_side", "shared: vllm_delta_sync", "server: vllm_delta_sync.engine")
WIDTH, BOX, GAP, TOP, LINE = 330, 46, 10, 56, 21
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .small { font-size: 11px; fill: #59636e } .step { font-size: 12px }
rect { fill: #f6f8fa; stroke: #d1d9e0; rx: 6 } .ground { fill: #ffffff; stroke: none }
.publish { fill: #0969da } .apply { fill: #1a7f37 } .badge { font: 600 11px system-ui, sans-serif; fill: #ffffff }
"""


def main(arguments: Sequence[str]) -> int:
    """Write the picture, or with ``--check`` say (exit status 1) that it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the picture is out of date")
    options = parser.parse_args(arguments)
    picture = draw(SOURCE.read_text())
    if not options.check:
        TARGET.write_text(picture)
        return 0
    return 0 if TARGET.exists() and TARGET.read_text() == picture else 1


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def draw(text: str) -> str:
    """The picture as SVG: packages in three columns, imports pointing down, and a badge for each step of a path."""
    packages = rows(text, "Packages, from the ground up")
    paths = {"publish": rows(text, "The path of a publish"), "apply": rows(text, "The path of an apply")}
    columns: list[list[list[str]]] = [[], [], []]
    for row in packages:
        owner = max((name for name in COLUMNS if row[0].startswith(name)), key=len)
        columns[COLUMNS[owner]].append(row)
    tallest = max(map(len, columns))
    bottom = TOP + tallest * (BOX + GAP)
    steps = max(map(len, paths.values()))
    height = bottom + 40 + (steps + 1) * LINE + 20
    total = 3 * WIDTH + 4 * GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" role="img">',
        "<title>Packages, and the paths of a publish and of an apply</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{total}" height="{height}"/>',
    ]
    for number, (title, column) in enumerate(zip(TITLES, columns, strict=True)):
        left = GAP + number * (WIDTH + GAP)
        out.append(f'<text class="title" x="{left + 4}" y="24">{title}</text>')
        out.append(f'<text class="small" x="{left + 4}" y="42">imports point down</text>')
        for place, row in enumerate(reversed(column)):
            y = TOP + place * (BOX + GAP)
            out.append(f'<rect x="{left}" y="{y}" width="{WIDTH}" height="{BOX}"/>')
            out.append(f'<text class="title" x="{left + 10}" y="{y + 19}">{html.escape(_short(row[0]))}</text>')
            out.append(f'<text class="small" x="{left + 10}" y="{y + 36}">{html.escape(_clipped(row[1]))}</text>')
            x = left + WIDTH - 14
            for path in ("apply", "publish"):
                for step in reversed([step[0] for step in paths[path] if _package(step[2], packages) == row[0]]):
                    out.append(f'<circle class="{path}" cx="{x}" cy="{y + 14}" r="9"/>')
                    out.append(f'<text class="badge" x="{x}" y="{y + 18}" text-anchor="middle">{step}</text>')
                    x -= 21
    for number, (name, path) in enumerate(paths.items()):
        left = GAP + number * (total // 2)
        y = bottom + 24
        out.append(f'<circle class="{name}" cx="{left + 9}" cy="{y - 4}" r="9"/>')
        out.append(f'<text class="title" x="{left + 26}" y="{y}">{name}</text>')
        for step, what, module in path:
            y += LINE
            line = f"{step}. {what} · {module.rpartition('/')[2]}"
            out.append(f'<text class="step" x="{left + 4}" y="{y}">{html.escape(line)}</text>')
    return "\n".join([*out, "</svg>", ""])


def _short(package: str) -> str:
    return re.sub(r"^(vllm_delta_sync/engine/|vllm_delta_sync/|trainer_side/)", "", package)


def _clipped(text: str) -> str:
    return text if len(text) <= 54 else text[:53].rstrip(" ,;") + "…"


def _package(module: str, packages: list[list[str]]) -> str | None:
    found = [row[0] for row in packages if module.startswith(row[0] + "/")]
    return max(found, key=len) if found else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
