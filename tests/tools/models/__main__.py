"""Try architectures and write the table.

``python -m tests.tools.models [--only NAME…] [--json F] [--write docs/models.md]``.
Ends with 1 if a model's weights were wrong.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from tqdm import tqdm

from tests.tools.models import report
from tests.tools.models.sweep import architectures, rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.models", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there, in Markdown")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    options = parser.parse_args()
    names = options.only or architectures()
    found = []
    for row in tqdm(rows(names, options.jobs), total=len(names), unit="model", disable=not sys.stderr.isatty()):
        found.append(row)
        tqdm.write(f"{row.architecture}: {row.outcome}{f': {row.reason}' if row.reason else ''}", file=sys.stdout)
        sys.stdout.flush()
    found = report.ordered(found)
    if options.json is not None:
        options.json.write_text(json.dumps([row.plain() for row in found], indent=1) + "\n")
    if options.write is not None:
        options.write.write_text(report.document(found))
    print(report.counts(found))
    return int(any(row.outcome == "WRONG" for row in found))


if __name__ == "__main__":
    sys.exit(main())
