"""``UpdatePlan``: what one commit takes. ``WeightPosition``: where it starts. Both run on controller and ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.protocol import PlainPlan, PlainStep
from vllm_delta_sync.format.documents import Anchor, MergedDelta, anchor_key
from vllm_delta_sync.format.manifest import Manifest, version_key
from vllm_delta_sync.run.objects import needs_base_bits
from vllm_delta_sync.run.read_plan import Step

Key = tuple[str, str]
"""Run id and key of a document."""
REBUILD = "rebuild"
"""Stands for a document's key if the version is rebuilt from what the bucket holds."""


@dataclass(frozen=True)
class WeightPosition:
    """A version of a run: what the ranks hold."""

    run: Run
    manifest: Manifest

    @property
    def version(self) -> int:
        return self.manifest.version


@dataclass(frozen=True)
class UpdatePlan:
    """One commit.

    Attributes:
        target: the version of the followed run that it ends at.
        steps: merged into one commit; of several runs, if the path crosses branches. Empty: the target is read whole.
        anchor: the standalone anchor that holds the target; None if the target is an anchor itself.
        rebuild: whether each rank rebuilds the target from what the bucket holds.
    """

    target: Manifest
    steps: list[Step] = field(default_factory=list)
    anchor: Anchor | None = None
    rebuild: bool = False

    @property
    def versions(self) -> int:
        """How many versions the commit spans."""
        spans = (step.high - step.low if isinstance(step.document, MergedDelta) else 1 for step in self.steps)
        return sum(spans) or 1

    @property
    def needs_base_bits(self) -> bool:
        """Whether decoding a step needs the weights held."""
        return any(needs_base_bits(step.document) for step in self.steps)

    @property
    def changed(self) -> int:
        """Changed elements in all steps."""
        return sum(step.changed for step in self.steps) if self.steps else self.target.total

    @property
    def payload_bytes(self) -> int:
        """Bytes of objects to read; 0 for a rebuild, because only the ranks know them."""
        if self.steps:
            return sum(step.payload_bytes for step in self.steps)
        return 0 if self.rebuild else (self.anchor or self.target).payload_bytes

    def key(self, index: int) -> Key:
        """Return the document to avoid if step number ``index`` is bad."""
        if self.steps:
            return step_key(self.steps[index])
        if self.rebuild:
            return self.target.run, REBUILD
        version = self.target.version
        return self.target.run, anchor_key(version) if self.anchor is not None else version_key(version)

    def to_plain(self) -> PlainPlan:
        """Return the plan to send. Runs other than the followed one are named by URL and digest of run.json."""
        return PlainPlan(
            self.target.to_bytes(),
            [
                PlainStep(
                    document=step.document.to_bytes(),
                    merged=isinstance(step.document, MergedDelta),
                    backwards=step.backwards,
                    run=None if step.run.info.run == self.target.run else (step.run.bucket.url, step.run.info.digest),
                )
                for step in self.steps
            ],
            None if self.anchor is None else self.anchor.to_bytes(),
            self.rebuild,
        )

    @classmethod
    def from_plain(cls, plain: PlainPlan, run_at: Callable[[tuple[str, str] | None], Run]) -> "UpdatePlan":
        """Inverse of ``to_plain``.

        Args:
            run_at: the run at a URL, whose run.json has a digest; None means the followed one.
        """
        return cls(
            Manifest.from_bytes(plain.target),
            [
                Step(
                    run_at(step.run),
                    (MergedDelta if step.merged else Manifest).from_bytes(step.document),
                    step.backwards,
                )
                for step in plain.steps
            ],
            None if plain.anchor is None else Anchor.from_bytes(plain.anchor),
            plain.rebuild,
        )


def step_key(step: Step) -> Key:
    """Return the document to avoid if a step is bad."""
    return step.run.info.run, step.key
