"""Runs with versions that are quarantined or not exact, for receivers and for retention."""

from typing import Any

from tests.support.chains import Chain
from tests.support.collecting import Grown
from tests.support.samples import RunWriter
from vllm_delta_sync.format.manifest import HeldBack, Manifest, Quarantine
from vllm_delta_sync.tensors.changes import Bits

REASON = "it is no good"


class Marking(RunWriter):
    """A writer that can mark what it commits.

    Attributes:
        bad: whether versions committed now are quarantined. inexact: whether they hold something back.
    """

    bad = inexact = False

    def mark(self, sign: str) -> None:
        """What is committed now: ``!`` quarantined, ``~`` not exact, ``?`` both, anything else neither."""
        self.bad, self.inexact = sign in "!?", sign in "~?"

    def _commit(self, bits: list[Bits], objects: list[bytes], kind: str, changed: int, **fields: object) -> Manifest:
        if self.bad:
            sound = self.manifests[-1].sound if self.manifests else None
            fields["quarantine"] = Quarantine(reasons=[REASON], sound=sound)
        if self.inexact:
            fields["held_back"] = HeldBack(elements=7, relative_norm=0.25, exact=self.manifests[-1].exact)
        return super()._commit(bits, objects, kind, changed, **fields)


class MarkedChain(Marking, Chain):
    """A chain for receivers."""

    def play(self, marks: str, **options: Any) -> None:
        """Commit a delta per character, see ``mark``."""
        for sign in marks:
            self.mark(sign)
            self.grow(1, **options)
        self.mark(".")


class MarkedGrown(Marking, Grown):
    """A run for collections."""

    def play(self, marks: str) -> None:
        """As ``MarkedChain.play``."""
        for sign in marks:
            self.mark(sign)
            self.grow()
        self.mark(".")
