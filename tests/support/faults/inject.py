"""Make faults happen in real processes that were started with ``environment``; see tests/support/faults/site."""

import os
from pathlib import Path

SITE = Path(__file__).parent / "site"


class Faults:
    """The faults of one server.

    Attributes:
        file: where the next one is named.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "fault"
        self._taken = folder / "fault.taken"

    @property
    def environment(self) -> dict[str, str]:
        """What the server's processes need."""
        path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
        return {"PYTHONPATH": path, "FAULT_FILE": str(self.file)}

    def arm(self, at: str, do: str, rank: int = 0) -> None:
        """Let it happen once, from now on."""
        self._taken.unlink(missing_ok=True)
        draft = self.file.with_suffix(".draft")
        draft.write_text(f"{at} {do} {rank}")
        draft.rename(self.file)

    def disarm(self) -> None:
        """Let nothing happen any more, and end a fault that waits."""
        self.file.unlink(missing_ok=True)
        self._taken.unlink(missing_ok=True)

    @property
    def happened(self) -> bool:
        """Whether the fault that was armed last has happened."""
        return self._taken.exists()

    def let_go(self) -> None:
        """End a fault that waits."""
        self._taken.unlink()
