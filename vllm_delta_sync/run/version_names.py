"""``match_name`` recognizes the names of versions that are no numbers, such as ``head~2`` and ``step:400``."""

import re

from vllm_delta_sync import units
from vllm_delta_sync.settings import HEAD

NAMES = f"{HEAD}~N, tag:NAME, step:N, ago:TIME"
"""What ``match_name`` recognizes, for messages."""
MOVING = (f"{HEAD}~", "step:", "ago:")
"""Beginnings of names that may mean another version whenever one is published."""
_NAME = re.compile(
    rf"{HEAD}(?:~(?P<before>[0-9]{{1,10}}))?|tag:(?P<tag>.*)|step:(?P<step>[0-9]{{1,18}})|ago:(?P<ago>.*)",
    re.DOTALL,
)


def match_name(text: str) -> "re.Match[str] | None":
    """Return the parts of a name, of which at most one is not None; None if it is no name.

    The groups are ``before``, the versions before the head; ``tag``; ``step``; and ``ago``, which
    ``units.duration`` reads.
    """
    found = _NAME.fullmatch(text)
    if found is None or found["ago"] is None or units.duration(found["ago"]) is not None:
        return found
    return None
