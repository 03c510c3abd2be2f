"""Text for people: columns, sizes, shares, and nothing that could move a terminal's cursor."""

import sys
from collections.abc import Sequence

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def clean(text: object) -> str:
    """``text`` with everything unprintable escaped: names in a bucket are other people's bytes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def size(count: int) -> str:
    """Bytes in decimal units, three digits."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.3g} {UNITS[unit]}"


def percent(part: int, whole: int) -> str:
    """Share with three digits; a dash of nothing."""
    return f"{100 * part / whole:.3g} %" if whole else "-"


def times(full: int, payload: int) -> str:
    """How many times smaller ``payload`` is than ``full``; a dash where there is no payload."""
    return f"{full / payload:.3g}x" if payload else "-"


def shape(sizes: Sequence[int]) -> str:
    """``64x48``; a scalar has none."""
    return "x".join(map(str, sizes)) or "scalar"


def print_columns(titles: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[int] = (0,)) -> None:
    """Print rows under titles, aligned right except for the columns in ``left``."""
    cells = [list(titles), *([clean(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for row in cells:
        aligned = [
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip())


def print_fields(fields: Sequence[tuple[str, object]]) -> None:
    """Print ``name  value`` lines."""
    width = max(len(clean(name)) for name, _ in fields)
    for name, value in fields:
        print(f"{clean(name).ljust(width)}  {clean(value)}")


class ProgressBar:
    """A bar on stderr that is there only while somebody looks at it: nothing is printed unless that is a terminal.

    Args:
        unit: of the total, such as ``versions``; ``bytes`` are shown in kB, MB and so on.
    """

    def __init__(self, total: int, unit: str) -> None:
        # Bars as those of the store's transfers, which make room for each other.
        from vllm_delta_sync.bucket.middleware.progress import bar_class, terminal_size

        columns, rows = terminal_size()
        size = {"unit": "B", "unit_scale": True} if unit == "bytes" else {"unit": f" {unit}"}
        shown = sys.stderr.isatty()
        self._bar = bar_class()(
            total=total, leave=False, disable=not shown, ncols=columns, nrows=rows, file=sys.stderr, **size
        )

    def update(self, done: int, note: str = "") -> None:
        """Draw ``done`` of the total."""
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
