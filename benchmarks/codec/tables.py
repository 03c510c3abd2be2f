"""The rows of the codec benchmark as tables: sizes (others' own figures beside them), speeds, merging."""

import re

from benchmarks.common.rows import Row
from benchmarks.common.tables import Place, pivot

PASSES = (
    *("memcpy", "compare_and_copy", "compare_and_copy, numpy"),
    *("detect changes, bfloat16", "detect changes, float32"),
)

LEFT_OUT = (
    *("u16 gap + bf16", "u16 gap + bf16 + zstd", "raw + zstd -3", "compare_and_copy, numpy"),
    *("bound given exponent, last mask", "detect changes, float32", "xor + zstd -3", "context, 2 threads"),
)
"""Rows of the results that the page leaves out, which has to stay short."""
MERGED = ("1", "8", "64")
"""Numbers of merged deltas that are on the page."""


def tables(rows: list[Row]) -> list[str]:
    """Markdown lines."""
    lines = [*pivot("B/changed", rows, _size), ""]
    lines += [*pivot("synthetic weights", rows, _speed, lambda column: column.startswith("decode")), ""]
    return [*lines, *pivot("deltas merged into one (real weights, 1 %)", rows, _merged)]


def _size(item: Row) -> Place:
    if item["case"].startswith("published, "):
        name, _, share = item["case"].removeprefix("published, ").rpartition(" at ")
        return _shown(name, f"published, {share}")
    match = re.fullmatch(r"(real|synthetic) dense ([\d.]+%)(?:, (.+))?", item["case"])
    if match is None or item["unit"] != "B/changed" or ": " in item["metric"]:
        return None
    return _shown(match[3] or item["metric"], f"{match[1]}, {match[2]}")


def _shown(line: str, column: str) -> Place:
    return None if line in LEFT_OUT else (line, column)


def _speed(item: Row) -> Place:
    match = re.fullmatch(r"synthetic dense ([\d.]+%)(?:, (.+))?", item["case"])
    if match is None or "peer" in item or item["metric"] not in ("encode", "decode", *PASSES):
        return None
    metric = "decode" if item["metric"] == "decode" else "encode"
    return _shown(match[2] or item["metric"], f"{metric}, {match[1]} [{item['unit']}]")


def _merged(item: Row) -> Place:
    match = re.fullmatch(r"real dense 1%, (\d+) merged(?:, (.+))?", item["case"])
    if match is None or match[1] not in MERGED:
        return None
    metric = f"/ {item['peer']}" if "peer" in item else item["metric"]
    return match[1], f"{match[2] + ': ' if match[2] else ''}{metric} [{item['unit']}]"
