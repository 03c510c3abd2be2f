"""What a file system says of a failure, and what to do about it."""

import errno

_MENDS = {
    errno.ENOSPC: "free some space there and try again",
    errno.EDQUOT: "free some space there or raise the quota, and try again",
    errno.EFBIG: "raise the file size limit (ulimit -f) and try again",
    errno.EACCES: "give this user access to it",
    errno.EPERM: "give this user access to it",
    errno.EROFS: "mount it writable",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
    errno.ENOTDIR: "give a directory as the bucket",
    errno.ESTALE: "its server no longer knows it: mount it again",
}


def failure(action: str, error: OSError) -> str:
    """A message: that ``action`` failed, why, and the mend."""
    mend = _MENDS.get(error.errno or 0, "check the disk or mount it is on and try again")
    return f"cannot {action}: {error.strerror or error}; {mend}"
