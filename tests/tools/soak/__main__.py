"""``python -m tests.tools.soak [--versions N] [--seconds S] [--seed N] [--out FOLDER]``; see the package.

Writes report.json and report.txt, and ends with 0 only if all holds; with 130 after Ctrl-C, all processes ended.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.tools.soak.course import Options, Progress, Report, run

SECONDS_PER_VERSION = 1.2
SHOWN = 20


def text_of(report: Report) -> str:
    """The report for reading."""
    lines = [
        f"{report.options.versions} versions, seed {report.options.seed}, {report.seconds:.0f} s: "
        f"{len(report.wrong) or 'nothing'} wrong",
        f"{report.served} versions were seen served; the server was killed {report.options.kills} times",
        f"{report.answers} answers, {report.crossing} of them across a commit, {report.cut} cut off by kills",
        "acts: " + ", ".join(f"{count} {name}" for name, count in report.acts.items()),
        "memory, MB per 100 versions: "
        + (", ".join(f"{name} {value:+.2f}" for name, value in report.growth.items()) or "too short to tell"),
        "proof: " + ", ".join(f"{name} {value:.4g}" for name, value in report.proof.items()),
        *(f"WRONG: {text}" for text in report.wrong[:SHOWN]),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--versions", type=int, default=300, help="how many are published (default %(default)s)")
    parser.add_argument("--seconds", type=float, help=f"for publishing them ({SECONDS_PER_VERSION} for each)")
    parser.add_argument("--kills", type=int, default=2, help="how often the server is killed (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and chaos (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("soak-out"), help="folder of the report (default %(default)s)")
    chosen = parser.parse_args(arguments)
    seconds = chosen.seconds or SECONDS_PER_VERSION * chosen.versions
    options = Options(chosen.versions, seconds / chosen.versions, chosen.seed, chosen.kills)
    chosen.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp())
    try:
        report = run(options, folder, Progress())
    except KeyboardInterrupt:
        print("\nsoak: interrupted; all processes are ended", file=sys.stderr)
        return 130
    finally:
        for log in folder.glob("*.log"):
            shutil.copy(log, chosen.out / log.name)
        shutil.rmtree(folder, ignore_errors=True)
    (chosen.out / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n")
    (chosen.out / "report.txt").write_text(text_of(report))
    print(text_of(report), end="")
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
