"""The rows of the codec benchmark as tables: codec × changed share, exponents, folding."""

from benchmarks.charts import series
from benchmarks.rows import Row
from benchmarks.tables import grid

SIZES = ("size", "/ dense bf16", "/ bound")
SPEEDS = ("encode", "decode", "encode: extra memory", "decode: extra memory", "/ compare_and_copy", "/ memcpy")
PAIR = (
    "weights",
    "changed share",
    "learning rate",
    "bound",
    "bound given old exponent",
    "bound given exponent, last mask",
    "memcpy",
    "compare_and_copy",
    "compare_and_copy, numpy",
    "detect changes, bfloat16",
    "detect changes, float32",
)
FOLDS = ("changed share", "fold", "fold per change", "object", "/ sum of single deltas")


def tables(rows: list[Row]) -> list[str]:
    """Markdown lines."""
    lines: list[str] = []
    for title, start in (("Real weights", "real dense"), ("Synthetic weights", "synthetic dense")):
        mine = [item for item in rows if item["case"].startswith(start)]
        mine = [item for item in mine if "folded" not in item["case"] and ", 2^" not in item["case"]]
        lines += ["", f"### {title}", "", *grid("weights", [item for item in mine if "," not in item["case"]], PAIR)]
        lines += ["", *grid("object", [item for item in mine if "," in item["case"]], (*SIZES, *SPEEDS))]
    others = [item for item in rows if item["case"].startswith("Qwen3")]
    if others:
        lines += ["", "### The shape of Qwen3-0.6B", ""]
        lines += grid(
            "object", others, ("weights", "changed share", "object", *SIZES[:2], "object, least", "object, most")
        )
    lines += ["", "### As others published", "", "What projects give for themselves, beside what we measure:", ""]
    lines += ["| format | source | published [B/changed] | measured on real weights | on synthetic weights |"]
    lines += ["|---|---|---:|---:|---:|"]
    for item in (item for item in rows if item["case"].startswith("published")):
        name, _, at = item["case"].removeprefix("published, ").rpartition(" at ")
        found = [_measured(rows, data, name, float(at.rstrip("%"))) for data in ("real", "synthetic")]
        lines.append(f"| {name} | {item['metric']} | {item['value']:g} at {at} | {' | '.join(found)} |")
    lines += ["", "### Which weights change", "", "By power of two of the old weight's magnitude.", ""]
    exponents = [item for item in rows if ", 2^" in item["case"]]
    lines += grid("weights with magnitude from", exponents, ("weights", "changed", "of all changes"))
    lines += ["", "### Folding", "", "The first versions of a run of consecutive ones, folded into one delta.", ""]
    return lines + grid("delta", [item for item in rows if "folded" in item["case"]], FOLDS)


def _measured(rows: list[Row], data: str, name: str, share: float) -> str:
    """Sizes at the measured shares next to a published one."""
    sizes = series(rows, rf"{data} dense (?P<x>[\d.]+)%, (?P<name>.+)", "size").get(name, [])
    here = [point for point in sizes if point[0] == share]
    around = [*[point for point in sizes if point[0] < share][-1:], *[point for point in sizes if point[0] > share][:1]]
    return ", ".join(f"{size:.2f} at {at:g}%" for at, size in here or around)
