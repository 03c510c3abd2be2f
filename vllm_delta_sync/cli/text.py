"""Output of the commands: the one form of ``--json``, columns, sizes, shares, progress bars.

``clean`` escapes control characters.
"""

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TextIO

from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.units import rounded

_printing = threading.Lock()
UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


class OutputError(OSError):
    """Standard output cannot be written, as on a full disk."""


def clean(text: object) -> str:
    """Escape unprintable characters, because names in a bucket are untrusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def pick(source: object, names: str) -> dict[str, Any]:
    """Return some attributes of a report or document for ``--json``. Args: names: of them, separated by spaces."""
    return {name: getattr(source, name) for name in names.split()}


def print_json(command: str | None, data: dict[str, Any] | None, error: DeltaSyncError | None = None) -> None:
    """Print one line of ``--json``: ``{"ok", "command", "data", "error"}``.

    Args:
        command: its whole name, such as ``tag set``; None if the command line could not be parsed.
        data: what the command found or did; None leaves the member out.
        error: why ``ok`` is false; None leaves the member out.
    """
    line: dict[str, Any] = {"ok": error is None, "command": command}
    if data is not None:
        line["data"] = data
    if error is not None:
        line["error"] = {"kind": error.kind, "message": error.message}
    print(json.dumps(line), flush=True)


def print_event(options: argparse.Namespace, data: dict[str, Any], show: Callable[[], object]) -> None:
    """Print one event of a command that runs until it is interrupted: a line of JSON, or what ``show`` prints.

    Raises:
        OSError: as ``writing``.
    """
    with writing():
        if options.json:
            print_json(options.command, data)
        else:
            show()


@contextmanager
def writing() -> Iterator[None]:
    """Print at once what the block prints, while the command goes on; lines of several threads stay whole.

    Raises:
        OutputError: it cannot be written. BrokenPipeError: its reader has gone.
    """
    try:
        with _printing:
            yield
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(*error.args) from error


def print_error(error: DeltaSyncError) -> None:
    """Print an error as one line on stderr. Where that cannot be written, the exit code has to do."""
    try:
        print(clean(f"delta-sync: {error.kind}: {error.message}"), file=sys.stderr, flush=True)
    except OSError:
        discard_output(sys.stderr)


def discard_output(*streams: TextIO) -> None:
    """Write to nowhere what is printed to streams, by default both: Python would report a failure again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams or (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def size(count: int) -> str:
    """Format bytes in decimal units with three digits."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.3g} {UNITS[unit]}"


def percent(part: int, whole: int) -> str:
    """Format a share in percent with three digits; a dash if ``whole`` is 0."""
    return f"{100 * part / whole:.3g} %" if whole else "-"


def many(count: int, noun: str) -> str:
    """Format a count with its noun: ``no objects``, ``1 object``, ``1,000 objects``."""
    return f"{count:,} {noun}" if count == 1 else f"{f'{count:,}' if count else 'no'} {noun}s"


def times(full: int, payload: int) -> str:
    """Format how many times smaller ``payload`` is than ``full``; a dash if there is no payload."""
    return f"{rounded(full / payload)}x" if payload else "-"


def known(value: object, form: str = "{}") -> str:
    """Format a value; a dash if it is None."""
    return "-" if value is None else form.format(value)


def shape(sizes: Sequence[int]) -> str:
    """Format a shape such as ``64x48``, or ``scalar``."""
    return "x".join(map(str, sizes)) or "scalar"


def print_columns(
    titles: Sequence[str],
    rows: Iterable[Sequence[object]],
    left: Sequence[int] = (0,),
    most: int | None = None,
    hint: str = "--json",
) -> None:
    """Print rows under titles, aligned right except for the columns in ``left``.

    Args:
        most: rows to print; a last line then counts the others. hint: what lists them.
    """
    rows = list(rows)
    cells = [list(titles), *([clean(value) for value in row] for row in rows[:most])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    for row in cells:
        aligned = [
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip())
    if most is not None and len(rows) > most:
        print(f"… {len(rows) - most} more; {hint} lists them")


def print_fields(*fields: tuple[str, object], notes: Iterable[str] = ()) -> None:
    """Print ``name  value`` lines, without those whose value is None, and then the notes."""
    lines = [
        (clean(name), value) for name, value in (*fields, *(("note", note) for note in notes)) if value is not None
    ]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name.ljust(width)}  {clean(value)}")


class ProgressBar:
    """A progress bar on stderr, shown from the first update on; prints nothing unless stderr is a terminal.

    Args:
        unit: of the total, such as ``versions``; ``bytes`` are shown in kB, MB and so on.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._bar: Any = None

    def update(self, done: int, total: int, note: str = "") -> None:
        """Show ``done`` of the total, and a note."""
        if self._bar is None:
            # The same bars as those of the store's transfers, so that both can be shown at once.
            from vllm_delta_sync.bucket.middleware.progress import new_bar

            unit = {"unit": "B", "unit_scale": True} if self._unit == "bytes" else {"unit": f" {self._unit}"}
            self._bar = new_bar(total=total, disable=not sys.stderr.isatty(), **unit)
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
