"""The rows of the codec benchmark as tables: sizes (others' own figures beside them), bounds, speeds, merging."""

import re

from benchmarks.codec.peers import PUBLISHED_RATIOS
from benchmarks.codec.previous import PREVIOUS
from benchmarks.common import real_model
from benchmarks.common.charts import OURS
from benchmarks.common.rows import Row
from benchmarks.common.tables import Place, number, pivot

PASSES = (
    *("memcpy", "compare_and_copy", "compare_and_copy, numpy"),
    *("detect changes, bfloat16", "detect changes, float32"),
)
LEFT_OUT = (
    *("u16 gap + bf16", "u16 gap + bf16 + zstd", "raw", "raw + zstd -3", "xor + zstd -3"),
    *("bound", "bound given old exponent", "bound given exponent, last mask", "bound: positions, 1 threshold"),
    f"packed of {PREVIOUS}",
)
TIMED = ("compare_and_copy", "detect changes, bfloat16", "plain", "tiled")
"""What the page leaves out of sizes, and what it has of speeds: it has to stay short."""
DATA = r"(?:fresh|settled|trained) lr \S+|(?:policy|synthetic) dense [\d.]+%"
MERGED = ("4", "64")
"""Numbers of merged deltas that are on the page."""


def tables(rows: list[Row]) -> list[str]:
    """Markdown lines."""
    shares = {item["case"]: number(item["value"]) for item in rows if item["metric"] == "changed share"}

    def named(case: str) -> str:
        """A pair as a column, with its changed share."""
        return f"{case} ({shares[case]} %)" if " lr " in case else case.replace(" dense", ",")

    def size(item: Row) -> Place:
        if item["case"].startswith("published, ") and "peer" not in item:
            name, _, share = item["case"].removeprefix("published, ").rpartition(" at ")
            return None if name in LEFT_OUT else (name, f"published, {share}")
        match = re.fullmatch(rf"({DATA})(?:, (.+))?", item["case"])
        if match is None:
            return None
        line = match[2] or item["metric"]
        if match[2] in OURS and item.get("peer") == "dense bf16":
            return f"all weights / {match[2]} [x]", named(match[1])
        shown = item["unit"] == "B/changed" and line not in LEFT_OUT
        return (line, named(match[1])) if shown else None

    def speed(item: Row) -> Place:
        match = re.fullmatch(rf"({DATA})(?:, (.+))?", item["case"])
        if match is None or "peer" in item or item["metric"] not in ("encode", "decode", *PASSES):
            return None
        line, metric = match[2] or item["metric"], "decode" if item["metric"] == "decode" else "encode"
        return (line, f"{metric}, {named(match[1])} [{item['unit']}]") if line in TIMED else None

    return [
        f"*fresh*, *settled* and *trained* are SmolLM2-135M, {real_model.ORIGIN}; in brackets, the changed share. "
        "Published: all weights over a version of Qwen3-0.6B, "
        f"{' to '.join(number(item['value']) for item in rows if item['case'] in PUBLISHED_RATIOS)} (TRL's post).",
        "",
        *pivot("B/changed", rows, size),
        "",
        *pivot("speed", rows, speed, lambda column: column.startswith("decode")),
        "",
        *pivot("deltas merged into one", rows, _merged),
    ]


def _merged(item: Row) -> Place:
    match = re.fullmatch(r"(.+), (\d+) merged(?:, (.+))?", item["case"])
    if match is None or match[2] not in MERGED:
        return None
    metric = f"/ {item['peer']}" if "peer" in item else item["metric"]
    return f"{match[1]}, {match[2]}", f"{match[3] + ': ' if match[3] else ''}{metric} [{item['unit']}]"
