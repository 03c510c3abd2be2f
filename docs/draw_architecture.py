"""Draw pictures from tables of pages: ``python docs/draw_architecture.py [--check]``.

The README's picture comes from how-it-works.md, the others come from architecture.md.
"""

import argparse
import html
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("architecture.md")
OVERVIEW_SOURCE = Path(__file__).with_name("how-it-works.md")
OVERVIEW = Path(__file__).with_name("overview.svg")
PACKAGES = Path(__file__).with_name("architecture.svg")
STATES = Path(__file__).with_name("receiver-states.svg")
COLUMNS = {"trainer_side": 0, "vllm_delta_sync": 1, "vllm_delta_sync/engine": 2}
TITLES = ("trainer: trainer_side", "shared: vllm_delta_sync", "server: vllm_delta_sync.engine")
WIDTH, BOX, GAP, TOP, LINE = 350, 46, 10, 56, 21
SIZES = {"title": 13, "label": 12, "step": 12, "small": 11, "badge": 11}
"""Class of a text → size of its font."""
BOLD = ("title", "label", "badge")
STYLE = f"""
text {{ font-family: system-ui, sans-serif; fill: #1f2328 }}
{" ".join(f".{name} {{ font-size: {size}px }}" for name, size in SIZES.items())}
{", ".join(f".{name}" for name in BOLD)} {{ font-weight: 600 }} .small {{ fill: #59636e }}
rect {{ fill: #f6f8fa; stroke: #d1d9e0; rx: 6 }} .ground {{ fill: #ffffff; stroke: none }}
.publish {{ fill: #0969da }} .apply {{ fill: #1a7f37 }} .badge {{ fill: #ffffff }}
.group {{ fill: none; stroke-dasharray: 4 3 }} .head {{ fill: #59636e }}
.arrow {{ fill: none; stroke: #59636e; marker-end: url(#head) }} .optional {{ stroke-dasharray: 4 3 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #f0f6fc }} .small {{ fill: #9198a1 }}
rect {{ fill: #151b23; stroke: #3d444d }} .ground {{ fill: #0d1117 }}
.publish {{ fill: #1f6feb }} .apply {{ fill: #238636 }}
.head {{ fill: #9198a1 }} .arrow {{ stroke: #9198a1 }}
}}
"""
"""The ground has a color in both themes, so a picture can be read on a page of either."""
PART, PART_GAP, CHARACTERS = 216, 36, 30
"""Of the overview: width of a part, gap between two parts, and the most characters in a line."""

Box = tuple[int, int, int, int]
"""Left, top, width, height."""
BOXES: dict[str, Box] = {
    "waiting_for_run": (30, 45, 150, 40),
    "identifying": (410, 115, 150, 40),
    "idle": (350, 260, 110, 40),
    "held": (510, 260, 110, 40),
    "staging": (790, 115, 110, 40),
    "draining": (880, 230, 110, 40),
    "committing": (790, 330, 110, 40),
    "refused": (30, 345, 150, 40),
    "repairing": (30, 440, 150, 40),
    "verifying": (490, 440, 150, 40),
    "lost": (790, 540, 130, 40),
}
GROUPS: dict[str, tuple[Box, tuple[str, ...]]] = {
    "serving": ((330, 225, 310, 95), ("idle", "held")),
    "updating": ((770, 35, 230, 365), ("staging", "draining", "committing")),
    "any": ((10, 10, 1000, 490), ()),
}
"""Boxes around states: an arrow from or to all states of a group is drawn once. ``any`` has all but ``lost``."""


def main(arguments: Sequence[str]) -> int:
    """Write the pictures, or with ``--check`` say (exit status 1) that one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a picture is out of date")
    options = parser.parse_args(arguments)
    text = SOURCE.read_text()
    pictures = {
        OVERVIEW: draw_overview(OVERVIEW_SOURCE.read_text()),
        PACKAGES: draw_packages(text),
        STATES: draw_states(text),
    }
    if not options.check:
        for path, picture in pictures.items():
            path.write_text(picture)
        return 0
    return 0 if all(path.exists() and path.read_text() == picture for path, picture in pictures.items()) else 1


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def draw_overview(text: str) -> str:
    """The README's picture as SVG: trainer, bucket and servers side by side, and below them the way of a notice."""
    table = rows(text, "Trainer, bucket, servers")
    parts = [row for row in table if " → " not in row[0]]
    (notice,) = [row[1] for row in table if " → " in row[0]]
    columns = [_part_lines(steps) for _, _, steps in parts]
    high = TOP + max(map(len, columns)) * 18
    width, height = 2 * GAP + len(parts) * PART + (len(parts) - 1) * PART_GAP + 8, GAP + high + 60
    out = _opening(width, height, "A trainer, a bucket and vLLM servers, and what passes between them")
    last = len(parts) - 1
    for number, ((name, program, _), lines) in enumerate(zip(parts, columns, strict=True)):
        left = GAP + number * (PART + PART_GAP)
        for behind in (8, 4, 0) if number == last else (0,):  # there can be any number of servers
            out.append(f'<rect x="{left + behind}" y="{GAP + behind}" width="{PART}" height="{high}"/>')
        out.append(f'<text class="title" x="{left + 10}" y="{GAP + 22}">{html.escape(name)}</text>')
        out.append(f'<text class="small" x="{left + 10}" y="{GAP + 39}">{html.escape(program)}</text>')
        for place, (style, line) in enumerate(lines):
            y = GAP + TOP + 8 + place * 18
            out.append(f'<text class="{style}" x="{left + 10}" y="{y}">{html.escape(line)}</text>')
        if number < last:
            x1, x2, y = left + PART + 4, left + PART + PART_GAP - 4, GAP + high // 2
            out.append(f'<line class="arrow" x1="{x1}" y1="{y}" x2="{x2}" y2="{y}"/>')
    start, end, bottom = GAP + PART // 2, GAP + last * (PART + PART_GAP) + PART // 2, GAP + high + 40
    path = f"M{start},{GAP + high + 2} V{bottom} H{end} V{GAP + high + 11}"
    out.append(f'<path class="arrow optional" d="{path}"/>')
    x, y = width // 2, bottom - 8
    out.append(f'<text class="step" x="{x}" y="{y}" text-anchor="middle">{html.escape(notice)}</text>')
    return "\n".join([*out, "</svg>", ""])


def draw_packages(text: str) -> str:
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
    out = _opening(total, height, "Packages, and the paths of a publish and of an apply")
    for number, (title, column) in enumerate(zip(TITLES, columns, strict=True)):
        left = GAP + number * (WIDTH + GAP)
        out.append(f'<text class="title" x="{left + 4}" y="24">{title}</text>')
        out.append(f'<text class="small" x="{left + 4}" y="42">imports point down</text>')
        for place, row in enumerate(reversed(column)):
            y = TOP + place * (BOX + GAP)
            out.append(f'<rect x="{left}" y="{y}" width="{WIDTH}" height="{BOX}"/>')
            out.append(f'<text class="title" x="{left + 10}" y="{y + 19}">{html.escape(_short(row[0]))}</text>')
            out.append(f'<text class="small" x="{left + 10}" y="{y + 36}">{html.escape(row[1])}</text>')
            x = left + WIDTH - 14
            for path in ("apply", "publish"):
                for step in reversed([step[0] for step in paths[path] if _package(step[2], packages) == row[0]]):
                    out.append(f'<circle class="{path}" cx="{x}" cy="{y + 14}" r="9"/>')
                    out.append(f'<text class="badge" x="{x}" y="{y + 18}" text-anchor="middle">{step}</text>')
                    x -= 21
    for number, (name, of_path) in enumerate(paths.items()):
        left = GAP + number * (total // 2)
        y = bottom + 24
        out.append(f'<circle class="{name}" cx="{left + 9}" cy="{y - 4}" r="9"/>')
        out.append(f'<text class="title" x="{left + 26}" y="{y}">{name}</text>')
        for step, what, module in of_path:
            y += LINE
            line = f"{step}. {what} · {module.rpartition('/')[2]}"
            out.append(f'<text class="step" x="{left + 4}" y="{y}">{html.escape(line)}</text>')
    return "\n".join([*out, "</svg>", ""])


def draw_states(text: str) -> str:
    """The states of a receiver as SVG: an arrow for each change, with the number of its row in the table."""
    table = rows(text, "The states of a receiver")
    width, legend = 1020, 620
    height = legend + (len(table) + 1) // 2 * LINE + 20
    out = _opening(width, height, "The states of a receiver and the changes between them")
    for name, ((left, top, wide, high), _) in sorted(GROUPS.items(), key=lambda item: -item[1][0][2]):
        out.append(f'<rect class="group" x="{left}" y="{top}" width="{wide}" height="{high}"/>')
        out.append(f'<text class="small" x="{left + 8}" y="{top + 16}">{name}</text>')
    for name, (left, top, wide, high) in BOXES.items():
        out.append(f'<rect x="{left}" y="{top}" width="{wide}" height="{high}"/>')
        x, y = left + wide // 2, top + high // 2 + 5
        out.append(f'<text class="title" x="{x}" y="{y}" text-anchor="middle">{name}</text>')
    badges = []
    for step, starts, ends, _ in table:
        for start in _grouped(starts):
            for end in _grouped(ends):
                line, x, y = _arrow(_box(start), _box(end))
                out.append(line)
                badges.append(f'<circle class="publish" cx="{x}" cy="{y}" r="9"/>')
                badges.append(f'<text class="badge" x="{x}" y="{y + 4}" text-anchor="middle">{step}</text>')
    for number, (step, starts, ends, when) in enumerate(table):
        column, line_number = divmod(number, (len(table) + 1) // 2)
        names = f"{' · '.join(_grouped(starts))} → {' · '.join(_grouped(ends))}: {when}"
        x, y = 14 + column * width // 2, legend + line_number * LINE
        out.append(f'<text class="small" x="{x}" y="{y}">{html.escape(f"{step}. {names}")}</text>')
    return "\n".join([*out, *badges, "</svg>", ""])


def _opening(width: int, height: int, title: str) -> list[str]:
    """The first lines of a picture: its size, title, style, arrowhead and ground."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        '<marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        '<path class="head" d="M0,0 L9,4 L0,8 z"/></marker>',
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]


def _part_lines(cell: str) -> list[tuple[str, str]]:
    """Class and text of each line of a part: a line for each phrase, and one for a label before its colon."""
    lines = []
    for phrase in cell.split("; "):
        label, _, rest = phrase.rpartition(": ")
        lines += [("label", f"{label}:")] if label else []
        lines += [("step", line) for line in textwrap.wrap(rest, CHARACTERS, break_long_words=False)]
    return lines


def _grouped(cell: str) -> list[str]:
    """Names of boxes for the states in a cell: a group's where the cell has all of its states."""
    names = cell.split(", ")
    for group, (_, members) in GROUPS.items():
        if members and set(members) <= set(names):
            names = [group, *(name for name in names if name not in members)]
    return names


def _box(name: str) -> Box:
    return GROUPS[name][0] if name in GROUPS else BOXES[name]


def _arrow(start: Box, end: Box) -> tuple[str, int, int]:
    """An arrow from edge to edge of two boxes, beside the one that goes the other way; and where its number stands."""
    (x1, y1), (x2, y2) = _nearest(start, end), _nearest(end, start)
    length = max(1.0, math.hypot(x2 - x1, y2 - y1))
    aside_x, aside_y = -7 * (y2 - y1) / length, 7 * (x2 - x1) / length
    x1, y1, x2, y2 = (round(value) for value in (x1 + aside_x, y1 + aside_y, x2 + aside_x, y2 + aside_y))
    line = f'<line class="arrow" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'
    return line, round(x1 + 0.25 * (x2 - x1)), round(y1 + 0.25 * (y2 - y1))


def _nearest(box: Box, other: Box) -> tuple[float, float]:
    """The point of a box's edge towards the middle of the part that lies opposite another box."""

    def along(low: int, size: int, other_low: int, other_size: int) -> float:
        if low + size < other_low:
            return low + size
        if other_low + other_size < low:
            return low
        return (max(low, other_low) + min(low + size, other_low + other_size)) / 2

    return along(box[0], box[2], other[0], other[2]), along(box[1], box[3], other[1], other[3])


def _short(package: str) -> str:
    return re.sub(r"^(vllm_delta_sync/engine/|vllm_delta_sync/|trainer_side/)", "", package)


def _package(module: str, packages: list[list[str]]) -> str | None:
    found = [row[0] for row in packages if module.startswith(row[0] + "/")]
    return max(found, key=len) if found else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
