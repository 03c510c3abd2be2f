"""What a directory over NFS does that a local one does not: forgotten handles, lost replies, silly names."""

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

STALE_TRIES = 5
"""How often a call looks everything up after the server said that it no longer knows a handle."""

# What clients call a file that was removed while somebody had it open.
_SILLY = re.compile(r"\.nfs[0-9A-Fa-f.]{4,}")
_Result = TypeVar("_Result")


def is_silly(name: str) -> bool:
    """Whether a file of this name is the remains of a removed one."""
    return _SILLY.fullmatch(name) is not None


def again(call: Callable[[], _Result]) -> _Result:
    """Call until the server knows every handle that is met; ``call`` looks them up afresh each time.

    Raises:
        OSError: what ``call`` raises, ESTALE only after STALE_TRIES.
    """
    for _ in range(STALE_TRIES - 1):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return call()


@dataclass(frozen=True)
class StagedFile:
    """A file that waits for its name: what it is called meanwhile, and which file it is.

    If the reply to a link or a rename is lost, the client asks again and is told that there is nothing left to do.
    Then the name shows whether it was done.
    """

    name: str
    device: int
    inode: int

    @classmethod
    def of(cls, name: str, descriptor: int) -> "StagedFile":
        found = os.fstat(descriptor)
        return cls(name, found.st_dev, found.st_ino)

    def is_at(self, name: str, folder: int) -> bool:
        """Whether ``name`` in an open directory is this file."""
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)
