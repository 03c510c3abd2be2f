"""A gate for bad policies: bounds on what a new version may be, and what becomes of one that is beyond them."""

import math
from dataclasses import dataclass
from typing import Literal

from vllm_delta_sync.errors import UsageError

Action = Literal["refuse", "quarantine"]
ACTIONS = ("refuse", "quarantine")


@dataclass(frozen=True)
class Gate:
    """What a version must be like to be published as one that servers take.

    Each version is compared with the last *sound* one, which is what servers have: the version it builds on or, if that
    is quarantined, the newest one before that is not. So a model that went bad and comes back is sound again at once,
    and one that stays bad stays quarantined, whether or not what is bad changes any more. What the sound version has
    already counts for nothing: a NaN that a base came with is seen only where it is changed for another. Version 0 has
    nothing to be compared with and is not judged; what is not finite in it is logged.

    To leave quarantine: publish weights that are within the bounds of the sound version, with or without
    ``publisher.rebase(sound)`` before it; or start the publisher again with wider bounds, or with no gate.

    Attributes:
        nonfinite: no element that changed may be NaN or infinite. Concerns every floating-point dtype, and the scales
            of F8_E8M0; integers have neither.
        max_changed_share: the largest part of all elements that may differ, above 0 and at most 1; None: any.
        max_norm_jump: the largest ‖new − sound‖₂ / ‖sound‖₂ over all floating-point tensors together, above 0; in fp64,
            without the elements that are not finite in the sound version. None: any, and no norms are kept.
        action: ``refuse``: the version is not published, and GateError is raised where a failed upload would be: by
            the next call or ``flush``. The changes go out with the next version, which is judged anew. ``quarantine``:
            it is published with the reasons, and servers skip it unless they are told to serve it.

    Raises:
        UsageError: a bound or the action makes no sense.
    """

    nonfinite: bool = True
    max_changed_share: float | None = None
    max_norm_jump: float | None = None
    action: Action = "refuse"

    def __post_init__(self) -> None:
        if not isinstance(self.nonfinite, bool):
            raise UsageError(f"gate: nonfinite is {self.nonfinite!r}; give True or False")
        if not _is_bound(self.max_changed_share, 1.0):
            raise UsageError(
                f"gate: max_changed_share is {self.max_changed_share!r}; give a share above 0 and at most 1, or None"
            )
        if not _is_bound(self.max_norm_jump, math.inf):
            raise UsageError(f"gate: max_norm_jump is {self.max_norm_jump!r}; give a ratio above 0, or None")
        if self.action not in ACTIONS:
            raise UsageError(f"gate: action is {self.action!r}; give one of {', '.join(map(repr, ACTIONS))}")


def _is_bound(value: object, most: float) -> bool:
    if value is None:
        return True
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and 0 < float(value) <= most and math.isfinite(value)  # type: ignore[arg-type]
