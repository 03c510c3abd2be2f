"""The output directory: everything the demo writes, and nothing of anybody else's."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.processes import DemoError

MARKER = ".delta-sync-demo"
WRITTEN = (
    *("base", "checkpoint", "bucket"),
    *("server.log", "fresh-server.log", "trainer.log"),
    *("summary.json", "details.json", "demo.png"),
)


@dataclass(frozen=True)
class Output:
    """``path`` exists, is marked as the demo's, and holds nothing of an earlier run."""

    path: Path

    @property
    def bucket(self) -> Path:
        """Where the run lies unless the caller names another place."""
        return self.path / "bucket"

    @property
    def picture(self) -> Path:
        return self.path / "demo.png"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file."""
        (self.path / name).write_text(json.dumps(content, indent=2) + "\n")


def prepare_output(path: Path) -> Output:
    """Make the directory, or clear what an earlier run of the demo wrote into it.

    Raises:
        DemoError: the directory is not the demo's own, or cannot be written.
    """
    path = path.resolve()
    try:
        if path.exists() and not path.is_dir():
            raise DemoError(f"{path} is a file; give another directory with --out")
        if path.exists() and any(path.iterdir()) and not (path / MARKER).exists():
            raise DemoError(f"{path} holds files that the demo did not write; give another directory with --out")
        path.mkdir(parents=True, exist_ok=True)
        (path / MARKER).touch()
        for name in WRITTEN:
            _remove(path / name)
    except OSError as error:
        raise DemoError(f"cannot prepare {path}: {error.strerror}; give another directory with --out") from error
    return Output(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
