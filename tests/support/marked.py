"""Runs with quarantined versions, for receivers and for retention."""

from typing import Any

from tests.support.chains import Chain
from tests.support.collecting import Grown
from tests.support.samples import RunWriter
from vllm_delta_sync.format.manifest import Manifest, Quarantine
from vllm_delta_sync.tensors.bits import Bits

REASON = "it is no good"


class Marking(RunWriter):
    """A writer that can mark what it commits.

    Attributes:
        bad: whether versions committed now are quarantined.
    """

    bad = False

    def _commit(self, bits: list[Bits], objects: list[bytes], kind: str, changed: int, **fields: object) -> Manifest:
        if self.bad:
            sound = self.manifests[-1].sound if self.manifests else None
            fields["quarantine"] = Quarantine(reasons=[REASON], sound=sound)
        return super()._commit(bits, objects, kind, changed, **fields)


class MarkedChain(Marking, Chain):
    """A chain for receivers."""

    def play(self, marks: str, **options: Any) -> None:
        """Commit a delta per character: ``!`` for a quarantined one, anything else for a sound one."""
        for mark in marks:
            self.bad = mark == "!"
            self.grow(1, **options)
        self.bad = False


class MarkedGrown(Marking, Grown):
    """A run for collections."""

    def play(self, marks: str) -> None:
        """As ``MarkedChain.play``."""
        for mark in marks:
            self.bad = mark == "!"
            self.grow()
        self.bad = False
