"""Drafts of speculative decoding: weights of the run are patched in them too, and what the run lacks stays as it is.

On plain modules that load, share and change weights as vLLM's do; tests/e2e/test_draft_heads.py has the same on vLLM.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.modules import WIDTH, ModulePort
from tests.support.world import World, expect_equal
from vllm_delta_sync.engine.model import load_record
from vllm_delta_sync.engine.model.draft import Draft

ROWS = 64
Tensors = dict[str, torch.Tensor]


class Packed(nn.Module):
    """A layer whose weight a step after loading replaces by another layout of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16), False)

    def pack(self) -> None:
        assert self.weight is not None
        self.packed = nn.Parameter(self.weight.data.float() * 3, requires_grad=False)
        self.weight = None


class Served(nn.Module):
    """Refuses tensors that it does not know, but for those that begin with ``mtp.``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, dtype=torch.bfloat16)
        self.layer = Packed()
        self.head = nn.Linear(WIDTH, ROWS, bias=False, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if not name.startswith("mtp."):
                self.get_parameter(name).data.copy_(tensor)


class Head(nn.Module):
    """Loads its layers under its own names or, as part of the served checkpoint, under ``mtp.``; and the embedding and
    the output head where it gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, dtype=torch.bfloat16)
        self.fc = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.layer = Packed()
        self.head = nn.Linear(WIDTH, ROWS, bias=False, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name.removeprefix("mtp.")).data.copy_(tensor)


class MtpHead(Head):
    """Of the served checkpoint it takes its own tensors, the embedding and the output head."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(pair for pair in weights if pair[0].startswith(("mtp.", "embed.", "head.")))


def finish(model: nn.Module, paths: Iterable[str] | None) -> None:
    for path, module in list(model.named_modules()):
        if isinstance(module, Packed) and (paths is None or path in list(paths)):
            module.pack()


def tensors(prefix: str, *more: str) -> Tensors:
    """What a trainer holds: a served model, and a head whose names begin so; with ``more`` tensors of the head."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (ROWS, WIDTH), "layer.weight": (WIDTH, WIDTH), "head.weight": (ROWS, WIDTH)}
    own = {"fc.weight": (WIDTH, 2 * WIDTH), "layer.weight": (WIDTH, WIDTH)} | {name: shapes[name] for name in more}
    shapes |= {f"{prefix}{name}": shape for name, shape in own.items()}
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class DraftWorld(World):
    """A world whose engine drafts.

    Args:
        prefix: of the head's names in the run: ``mtp.``, ``draft.``, or none, if the run lacks the head.
        own: what the head has of its own beside its layers.
        shares: whether vLLM lets it use the served embedding and output head where it has none.
        recorded: whether it was recorded how the models were loaded.
    """

    def __init__(
        self, root: Path, prefix: str, *own: str, shares: bool = True, recorded: bool = True, is_head: bool = True
    ) -> None:
        self.root, self.prefix, self.own = root, prefix, own
        self.shares, self.recorded, self.is_head = shares, recorded, is_head
        self.drafts: list[Any] = []
        everything = tensors(prefix or "draft.", *own)
        self.without = {name: everything.pop(name) for name in list(everything) if not prefix and "draft." in name}
        super().__init__(root, tensors=everything)

    def fresh(self) -> list[Any]:
        model, draft = Served(), Head() if self.prefix != "mtp." else MtpHead()
        now = {name: tensor.bfloat16() for name, tensor in (self.tensors | self.without).items()}
        served = {name: tensor for name, tensor in now.items() if not name.startswith("draft.")}
        model.load_weights(served.items())
        if self.prefix == "mtp.":
            draft.load_weights(served.items())
        else:
            draft.load_weights((n.removeprefix("draft."), t) for n, t in now.items() if n.startswith("draft."))
        for each in (model, draft):
            if self.recorded:
                load_record.record_load(each, finish)
            else:
                finish(each, None)
        if self.shares:
            for name in ("embed", "head"):
                own = f"{name}.weight" in self.own
                if not own or torch.equal(getattr(model, name).weight, getattr(draft, name).weight):
                    setattr(draft, name, getattr(model, name))
        self.drafts.append(draft)
        return [model]

    def use(self, port: ModulePort) -> None:
        (rank,) = port.ranks
        self.draft = self.drafts[-1]
        rank.folder = str(self.root / "base")
        rank.draft = Draft(self.draft, str(self.root / "base" / "draft"), self.prefix != "mtp.", self.is_head)
        super().use(port)

    def bits(self) -> list[torch.Tensor]:
        found = [*self.model.parameters(), *self.draft.parameters()]
        return [parameter.data.reshape(-1).view(torch.int16).clone() for parameter in found]

    def expect_exact(self) -> None:
        (model,) = self.fresh()
        expect_equal(self.model, model)
        expect_equal(self.draft, self.drafts[-1])


@pytest.mark.parametrize(
    ("prefix", "own", "shares"),
    [
        ("mtp.", (), True),
        ("mtp.", (), False),
        ("draft.", (), True),
        ("draft.", ("embed.weight",), True),
        ("draft.", ("embed.weight", "head.weight"), False),
    ],
)
def test_a_draft_of_the_run_is_followed_and_taken_back(
    tmp_path: Path, prefix: str, own: tuple[str, ...], shares: bool
) -> None:
    world = DraftWorld(tmp_path, prefix, *own, shares=shares)
    seen = world.follow_each(3)
    world.expect_exact()
    assert world.receiver.verify()["verdict"]
    assert not world.receiver.status()["ranks"][0].get("unloaded")
    # Parameters of the draft that are its own: its layers, and what it does not share.
    assert all(not torch.equal(first, last) for first, last in zip(seen[0], seen[-1], strict=True))
    world.receiver.rollback(1)
    world.expect_bits(seen[1])
    world.receiver.release()
    world.receiver.advance()
    world.expect_bits(seen[3])


def test_a_draft_that_changed_from_outside_is_found_and_made_good(tmp_path: Path) -> None:
    world = DraftWorld(tmp_path, "draft.")
    world.receiver.advance()
    world.train_and_follow(1)
    for name, memory in (("draft.fc.weight", world.draft.fc.weight), ("draft.layer.weight", world.draft.layer.packed)):
        memory.data.view(-1)[3] += 1
        report = world.receiver.verify()
        assert (report["verdict"], report["mismatched"]) == (False, [name])
        world.receiver.advance()
        world.expect_exact()


@pytest.mark.parametrize("is_head", [True, False])
def test_a_draft_that_the_run_lacks_stays_as_it_is(
    tmp_path: Path, is_head: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = DraftWorld(tmp_path, "", is_head=is_head)
    before = [parameter.clone() for parameter in (world.draft.fc.weight, world.draft.layer.packed)]
    with caplog.at_level(logging.WARNING):
        world.follow_each(2)
    world.expect_exact()
    assert all(map(torch.equal, before, (world.draft.fc.weight, world.draft.layer.packed)))
    said = [record.message for record in caplog.records if "fewer of its drafts" in record.message]
    assert len(said) == is_head


def test_a_server_that_does_not_draft_leaves_the_tensors_of_a_draft_out(tmp_path: Path) -> None:
    world = DraftWorld(tmp_path, "draft.")
    world.port.ranks[0].draft = None
    world.receiver.advance()
    world.train(1)
    world.receiver.advance()
    expect_equal(world.model, world.fresh()[0])


def test_a_tensor_of_a_draft_that_shares_the_served_one_is_refused(tmp_path: Path) -> None:
    world = DraftWorld(tmp_path, "draft.", "embed.weight")
    world.tensors["draft.embed.weight"].copy_(world.tensors["embed.weight"])
    world.models = world.fresh()
    (world.model,) = world.models
    world.use(ModulePort(world.model))
    message = world.expect_fails("model").message
    assert "'draft.embed.weight' is of the draft" in message
    assert "publish the draft without it" in message


def test_a_draft_whose_loading_was_not_observed_is_refused(tmp_path: Path) -> None:
    world = DraftWorld(tmp_path, "mtp.", recorded=False)
    assert "VLLM_PLUGINS" in world.expect_fails("model").message
