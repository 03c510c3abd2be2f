"""A whole small world in one process: a trainer, a run in a directory, and the real receiver on real modules."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.support.modules import ModulePort, ShardedModel, checkpoint_tensors, save_base
from trainer_side import Publisher
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.settings import Settings


class World:
    """A trainer's tensors, a run, and a receiver that serves a model of one or several ranks from the base.

    Attributes:
        made: those of this process that are not closed; tests/conftest.py closes what a test has made.
    """

    made: ClassVar[list["World"]] = []

    def __init__(
        self,
        root: Path,
        with_base: bool = True,
        codec: str = "tiled",
        ranks: int = 1,
        url: str | None = None,
        notice: str | None = None,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.url = url or str(root / "run")
        self.with_base = with_base
        self.tensors = checkpoint_tensors() if tensors is None else tensors
        base = save_base(root / "base", self.tensors) if with_base else None
        # No merged deltas: how many versions a commit takes must not be a matter of time.
        self.publisher = Publisher(self.pairs, self.url, base, codec=codec, notice=notice, merge=False)  # type: ignore[arg-type]
        self.made.append(self)
        self.ranks = ranks
        self.models = self.fresh()
        self.model: Any = self.models[0]
        self.use(ModulePort(*self.models))

    def close(self) -> None:
        """End the publisher's threads; what it has not made durable is lost to nobody."""
        self.made.remove(self)
        self.publisher.close(finish=False)

    def fresh(self) -> list[Any]:
        """Models with the trainer's tensors as they are now, loaded by their own loaders."""
        models: list[Any] = [ShardedModel(rank, self.ranks) for rank in range(self.ranks)]
        for model in models:
            model.load_weights((name, tensor.to(torch.bfloat16)) for name, tensor in self.tensors.items())
        return models

    def bits(self) -> list[torch.Tensor]:
        """A copy of what every rank holds."""
        return [parameter.view(torch.int16).clone() for model in self.models for parameter in model.parameters()]

    def use(self, port: ModulePort) -> None:
        """Start over with a receiver on another port."""
        self.port: Any = port
        self.follow()

    def follow(self, **settings: Any) -> None:
        """Start over with a receiver of other settings."""
        self.receiver = Receiver(self.port, Settings(bucket=self.url, **settings))

    def pairs(self) -> list[tuple[str, torch.Tensor]]:
        # Without a base nothing but the tensors themselves says which dtype is served.
        return [(name, tensor if self.with_base else tensor.bfloat16()) for name, tensor in self.tensors.items()]

    def train(self, *steps: int, scale: float = 1e-4) -> None:
        """Publish a version for each step."""
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for tensor in self.tensors.values():
                chosen = torch.rand(tensor.shape, generator=generator) < 0.05
                tensor += chosen * scale * torch.randn(tensor.shape, generator=generator)
            self.publisher.publish(step=step, wait=True)
            self.publisher.flush()

    def train_and_follow(self, *steps: int) -> None:
        """Publish versions, follow them in one go, and hold the last one bit for bit."""
        self.train(*steps)
        self.receiver.advance()
        self.expect_exact()

    def follow_each(self, last: int) -> list[list[torch.Tensor]]:
        """Publish and follow versions 1 … last one by one; what every version's bits are."""
        self.receiver.advance()
        seen = [self.bits()]
        for step in range(1, last + 1):
            self.train(step)
            self.receiver.advance()
            seen.append(self.bits())
        return seen

    def expect_bits(self, expected: list[torch.Tensor]) -> None:
        """The ranks hold those bits."""
        for now, right in zip(self.bits(), expected, strict=True):
            assert torch.equal(now, right)

    def expect_exact(self) -> None:
        """The model holds bit for bit what a fresh load of the trainer's tensors gives."""
        for model, other in zip(self.models, self.fresh(), strict=True):
            expect_equal(model, other)

    def expect_fails(self, kind: str) -> DeltaSyncError:
        """Following fails with that kind, status says so, and not a bit of the model changes."""
        before = self.bits()
        served = self.receiver.served_version
        with pytest.raises(DeltaSyncError) as caught:
            self.receiver.advance()
        assert caught.value.kind == kind
        status = self.receiver.status()
        assert status["last_error"] == {"kind": kind, "message": caught.value.message}
        assert self.receiver.served_version == served
        self.expect_bits(before)
        return caught.value


def expect_equal(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16)), name
