"""The output directory, made anew: everything the example writes, and nothing of anybody else's."""

import json
import shutil
from pathlib import Path
from typing import Any

from examples.demo.processes import DemoError

MARKER = ".delta-sync-fleet"
SUMMARY, TABLE = "summary.json", "fleet.md"


def prepare_output(path: Path, marker: str = MARKER) -> Path:
    """Make the directory, or clear what an earlier run of the example left there; its absolute path.

    Args:
        marker: name of the empty file by which an example knows its own directory.

    Raises:
        DemoError: the directory is not the example's own, or cannot be written.
    """
    path = path.resolve()
    try:
        if path.exists() and not path.is_dir():
            raise DemoError(f"{path} is a file; give another directory with --out")
        if path.exists() and any(path.iterdir()) and not (path / marker).exists():
            raise DemoError(f"{path} holds files that the example did not write; give another directory with --out")
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
        (path / marker).touch()
    except OSError as error:
        raise DemoError(f"cannot prepare {path}: {error.strerror}; give another directory with --out") from error
    return path


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Write summary.json."""
    (path / SUMMARY).write_text(json.dumps(content, indent=2) + "\n")
