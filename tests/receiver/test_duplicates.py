"""A tensor that a model ties to another, and leaves out though a fresh load would use it: a version is served only if
both have the same bits, on one rank and more, whichever way the version is read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.modules import WIDTH, ModulePort, save_base
from tests.support.world import World, expect_equal
from trainer_side import Publisher
from vllm_delta_sync.engine.model.route_compiler import trace_routes
from vllm_delta_sync.engine.protocol import Done, Outcome, Poll, Repair
from vllm_delta_sync.engine.worker import rank_worker
from vllm_delta_sync.errors import ModelError, TiedTensorError
from vllm_delta_sync.format.table import TensorSpec, TensorTable

HEAD, EMBEDDING, NORM = "head.weight", "embedding.weight", "norm.weight"
ROWS = 48


class Tied(nn.Module):
    """A rank of a model whose head is its embedding.

    Args:
        rows: of the embedding and the head that it has.
        stage: of a pipeline: 0 has no head.
    """

    def __init__(self, rows: slice = slice(0, ROWS), stage: int | None = None) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)

        self.rows, self.stage = rows, stage
        self.embedding = parameter(len(range(ROWS)[rows]), WIDTH)
        self.norm = parameter(WIDTH)
        self.head = self.embedding if stage != 0 else None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == EMBEDDING:
                self.embedding.data.copy_(tensor[self.rows])
            elif name == HEAD and self.head is not None and self.head is not self.embedding:
                self.head.data.copy_(tensor[self.rows])
            elif name == NORM:
                self.norm.data.copy_(tensor)


class Rule:
    """As vLLM's: a checkpoint with a head unties it."""

    remedy = "start it otherwise"

    def unties(self, table: TensorTable) -> bool:
        return any(spec.name == HEAD for spec in table)

    def match(self, replica: Any, live: dict[tuple[str, str], Any]) -> None: ...

    def untie(self, replica: Any) -> dict[str, str]:
        if replica.head is not replica.embedding:
            return {}
        replica.head = nn.Parameter(torch.empty_like(replica.embedding), requires_grad=False)
        return {"head": "embedding"}

    def untied_heads(self, replica: Any) -> dict[str, str | None]:
        return {"head": "embedding"} if replica.head is not replica.embedding else {}


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "one rank": [{}],
    "tensor parallel": [{"rows": slice(0, 20)}, {"rows": slice(20, ROWS)}],
    "pipeline parallel": [{"stage": 0}, {"stage": 1}],
}


class TiedWorld(World):
    """A world whose model ties its head, and whose run has both, with equal bits at first."""

    def __init__(self, root: Path, layout: str = "one rank", codec: str = "plain", with_base: bool = True) -> None:
        self.layout, self.folder = layout, str(root / "base")
        generator = torch.Generator().manual_seed(0)
        embedding = 0.02 * torch.randn((ROWS, WIDTH), generator=generator)
        tensors = {EMBEDDING: embedding, NORM: torch.ones(WIDTH), HEAD: embedding.clone()}
        super().__init__(root, codec=codec, with_base=with_base, tensors=tensors)
        self.step = 0

    def fresh(self) -> list[Any]:
        models = [Tied(**part) for part in LAYOUTS[self.layout]]
        for model in models:
            model.load_weights((name, tensor.bfloat16()) for name, tensor in self.tensors.items())
        return models

    def use(self, port: ModulePort) -> None:
        for rank in port.ranks:
            rank.folder, rank.tie_rule = self.folder, Rule()
        super().use(port)

    def change(self, *names: str, scale: float | None = None, equal: bool = False) -> None:
        """Change these tensors, all in the same way, and publish a version.

        Args:
            scale: multiply every element by it; None: change some. equal: make the head equal the embedding.
        """
        self.step += 1
        for name in names:
            tensor = self.tensors[name]
            generator = torch.Generator().manual_seed(self.step)
            chosen = torch.rand(tensor.shape, generator=generator) < 0.05
            tensor.copy_(tensor + 0.01 * chosen if scale is None else tensor * scale)
        if equal:
            self.tensors[HEAD].copy_(self.tensors[EMBEDDING])
        self.publisher.publish(step=self.step, wait=True)
        self.publisher.flush()

    def follow_exactly(self, version: int) -> None:
        self.receiver.advance()
        assert self.receiver.served_version == version
        self.expect_exact()
        assert self.receiver.verify()["verdict"]

    def expect_refused(self, served: int | None) -> str:
        """The newest version is refused, and not a bit changes; the message."""
        pauses = self.port.log.count("pause")
        error = self.expect_fails("tied")
        assert self.port.log.count("pause") == pauses
        assert self.receiver.served_version == served
        return error.message


@pytest.mark.parametrize(
    ("layout", "codec"),
    [
        ("one rank", "plain"),
        ("one rank", "raw"),
        ("tensor parallel", "plain"),
        ("tensor parallel", "tiled"),
        ("pipeline parallel", "plain"),
        ("pipeline parallel", "tiled"),
    ],
)
def test_a_version_is_served_if_both_are_equal(tmp_path: Path, layout: str, codec: str) -> None:
    world = TiedWorld(tmp_path, layout, codec)
    world.follow_exactly(0)
    assert [HEAD in entry["unloaded"] for entry in world.receiver.status()["ranks"]] == [True] * len(world.models)
    world.change(EMBEDDING, HEAD, NORM)
    world.follow_exactly(1)
    world.change(EMBEDDING, HEAD, scale=-3.0)
    world.follow_exactly(2)
    served = world.bits()
    for names in ((HEAD,), (EMBEDDING,), (NORM,)):
        world.change(*names)
        message = world.expect_refused(2)
        assert f"version {world.step} has other values for tensor {HEAD!r} than for {EMBEDDING!r}" in message
        assert "start it otherwise" in message
    world.expect_bits(served)
    assert world.receiver.verify()["verdict"]
    world.change(NORM, equal=True)
    world.follow_exactly(6)
    # One was sent in full since, the other was not, and both are equal in the end.
    world.change(HEAD, scale=2.0)
    world.change(EMBEDDING, equal=True)
    world.follow_exactly(8)
    world.change(EMBEDDING, scale=2.0)
    world.expect_refused(8)


def test_the_last_version_with_equal_ones_is_served(tmp_path: Path) -> None:
    world = TiedWorld(tmp_path)
    world.receiver.advance()
    world.change(EMBEDDING, HEAD)
    expected = world.fresh()
    for _ in range(3):
        world.change(HEAD)
    with pytest.raises(TiedTensorError, match="version 4 has other values"):
        world.receiver.advance()
    assert world.receiver.served_version == 1
    for model, other in zip(world.models, expected, strict=True):
        expect_equal(model, other)
    status = world.receiver.status()
    assert (status["state"], status["last_error"]["kind"]) == ("idle", "tied")


def test_what_was_refused_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = TiedWorld(tmp_path)
    world.receiver.advance()
    world.change(HEAD)
    world.expect_refused(0)
    monkeypatch.setattr(rank_worker, "stage_update", None)
    world.expect_refused(0)


def test_another_version_that_is_asked_for_is_refused_too(tmp_path: Path) -> None:
    world = TiedWorld(tmp_path)
    world.receiver.advance()
    world.change(HEAD)
    world.change(NORM, equal=True)
    world.follow_exactly(2)
    for _ in range(2):
        with pytest.raises(TiedTensorError, match="version 1 has other values"):
            world.receiver.rollback(1)
    assert world.receiver.served_version == 2
    world.expect_exact()
    world.receiver.rollback(0)
    assert world.receiver.served_version == 0
    with pytest.raises(TiedTensorError, match="version 1 has other values"):
        world.receiver.advance(1)
    assert world.receiver.served_version == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_anchor_is_refused_where_both_differ(tmp_path: Path, layout: str) -> None:
    """The model has other weights than version 0, so that every version is read whole."""
    world = TiedWorld(tmp_path, layout, with_base=False)
    for model in world.models:
        model.embedding.data.fill_(0.5)
    world.use(ModulePort(*world.models))
    world.change(HEAD)
    world.publisher.anchor()
    with pytest.raises(TiedTensorError, match="version 1 has other values"):
        world.receiver.advance()
    assert world.receiver.served_version == 0
    assert world.receiver.verify()["verdict"]
    world.change(NORM, equal=True)
    world.follow_exactly(2)


def test_a_rebuild_is_refused_where_both_differ(tmp_path: Path) -> None:
    world = TiedWorld(tmp_path)
    world.receiver.advance()
    world.change(HEAD)
    manifest = world.receiver.history.run.manifest(1)
    (answer,) = world.port.call(Repair(manifest.to_bytes()))
    assert isinstance(answer, Done)
    while world.port.call(Poll())[0].running:
        pass
    (failure,) = world.port.call(Outcome("repair"))
    assert failure.kind == "tied"
    assert "version 1 has other values" in failure.message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_changed_owner_is_found_under_both_names_and_made_good(tmp_path: Path, layout: str) -> None:
    world = TiedWorld(tmp_path, layout)
    world.receiver.advance()
    world.change(EMBEDDING, HEAD)
    world.receiver.advance()
    world.models[-1].embedding.data.view(torch.int16)[0, 0] ^= 1
    report = world.receiver.verify()
    assert (report["verdict"], report["mismatched"]) == (False, [EMBEDDING, HEAD])
    world.follow_exactly(1)


def test_weights_that_are_another_version_are_not_taken_for_one_whose_head_differs(tmp_path: Path) -> None:
    """The embedding is version 0's, and the head of the model folder is not."""
    world = TiedWorld(tmp_path)
    world.tensors[HEAD].mul_(2.0)
    save_base(tmp_path / "base", world.tensors)
    world.publisher.close()
    world.url = str(tmp_path / "other")
    world.publisher = Publisher(world.pairs, world.url, tmp_path / "base", merge=False)
    world.use(ModulePort(*world.fresh()))
    error = world.expect_fails("chain")
    assert f"first {HEAD!r}" in error.message


def test_a_head_that_only_a_fresh_load_would_load_in_another_way_is_refused() -> None:
    """Of another dtype, or shape: no comparison of bits shows that it would be equal."""
    model = Tied()
    for spec in (TensorSpec(HEAD, "F32", (ROWS, WIDTH)), TensorSpec(HEAD, "BF16", (1, WIDTH))):
        table = TensorTable([TensorSpec(EMBEDDING, "BF16", (ROWS, WIDTH)), TensorSpec(NORM, "BF16", (WIDTH,)), spec])
        with pytest.raises(ModelError, match=r"head\.weight.* used by a fresh load.*start it otherwise"):
            trace_routes(model, table, lambda tensors: {}, tie_rule=Rule())
