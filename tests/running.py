"""Which processes run: what a test has started, and what of it is left."""

from pathlib import Path


def mentioning(path: Path) -> set[int]:
    """Processes that were started with that path in their arguments or variables."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            started = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if str(path).encode() in started:
            found.add(int(folder.name))
    return found
