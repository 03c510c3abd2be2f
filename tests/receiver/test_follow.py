"""A receiver follows a real run on plain modules, refuses bad versions, and keeps weights whole: one rank and more."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forge import BAD_VERSIONS, BadVersion
from tests.support.hooks import failing, hooked
from tests.support.modules import SHAPES, FusedModel, ModulePort, save_base
from tests.support.world import World
from trainer_side import Publisher
from vllm_delta_sync.engine.commit import transaction
from vllm_delta_sync.engine.follow import identify
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.errors import (
    BusyError,
    EngineError,
    FingerprintError,
    FormatError,
    ModelError,
    NotFoundError,
    WeightsLostError,
)
from vllm_delta_sync.settings import Settings


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(transaction, "WAIT_S", 0.0)
    return World(tmp_path)


@pytest.mark.parametrize(
    ("codec", "ranks"), [("plain", 1), ("tiled", 1), ("raw", 1), ("plain", 4), ("tiled", 2), ("raw", 2)]
)
def test_follows_every_version(tmp_path: Path, codec: str, ranks: int) -> None:
    """The third version sends tensors in full."""
    world = World(tmp_path, codec=codec, ranks=ranks)
    world.receiver.advance()
    assert world.receiver.served_version == 0
    for step in range(1, 5):
        if step == 3:
            for tensor in world.tensors.values():
                tensor.mul_(-3.0)
        world.train_and_follow(step)
        assert world.receiver.served_version == step
        assert world.receiver.verify()["verdict"]
    assert world.port.log.count("pause") == world.port.log.count("resume") == 4
    assert world.port.log[-5:] == ["pause", "commit", "label 4", "resume", "confirm"]
    assert [rank["rank"] for rank in world.receiver.status()["ranks"]] == list(range(ranks))


@pytest.mark.parametrize("ranks", [1, 2])
def test_anchor_replaces_other_weights(tmp_path: Path, ranks: int) -> None:
    world = World(tmp_path, with_base=False, ranks=ranks)
    world.models[-1].norm.data.fill_(7.0)
    world.receiver.advance()
    assert world.receiver.served_version == 0
    world.expect_exact()
    world.train_and_follow(1)


# What is refused


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_base_is_refused_by_name(tmp_path: Path, ranks: int) -> None:
    """On several ranks it may be one copy only that differs."""
    world = World(tmp_path, ranks=ranks)
    world.models[-1].norm.data[3] = 9.0
    error = world.expect_fails("chain")
    assert "model.norm.weight" in error.message
    assert world.receiver.status()["state"] == "refused"
    assert world.receiver.status()["served"] is None


@pytest.mark.parametrize("bad", BAD_VERSIONS, ids=lambda bad: bad.name)
def test_bad_version_is_refused_and_healed(tmp_path: Path, bad: BadVersion) -> None:
    """By all ranks; what is wrong is found before the pause, or taken back within it, and not tried twice."""
    world = World(tmp_path, ranks=1 + BAD_VERSIONS.index(bad) % 2)
    world.follow_each(1)
    forgery = bad.write(Path(world.url))
    world.expect_fails(bad.kind)
    pauses = world.port.log.count("pause")
    assert pauses == world.port.log.count("resume")
    world.expect_fails(bad.kind)
    assert world.port.log.count("pause") == pauses
    forgery.remove()
    world.receiver.advance()
    assert world.receiver.status()["last_error"] is None
    world.train_and_follow(2)


def test_damaged_newest_version_does_not_hide_the_good_ones(world: World) -> None:
    world.train(1, 2)
    damaged = Path(world.url) / "versions" / "0000000003.json"
    damaged.write_bytes(b"{}")
    with pytest.raises(FormatError):
        world.receiver.advance()
    assert world.receiver.served_version == 2
    world.expect_exact()
    assert world.receiver.status()["last_error"]["kind"] == "format"
    world.receiver.advance(2)
    assert world.receiver.status()["last_error"] is None


def test_no_run_yet(tmp_path: Path) -> None:
    receiver = Receiver(ModulePort(FusedModel()), Settings(bucket=str(tmp_path / "later")))
    with pytest.raises(NotFoundError):
        receiver.advance()
    assert receiver.status()["state"] == "waiting_for_run"
    for call in (receiver.verify, lambda: receiver.rollback(0)):
        with pytest.raises(BusyError, match="no version is served yet"):
            call()


def test_what_a_loader_leaves_out_is_listed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publisher.close()
    world.tensors["head.weight"] = world.tensors["embedding.weight"].clone()
    save_base(tmp_path / "base2", world.tensors)
    url = str(tmp_path / "run2")
    world.publisher = Publisher(world.pairs, bucket=url, base=tmp_path / "base2")
    world.receiver = Receiver(world.port, Settings(bucket=url))
    world.receiver.advance()
    assert world.receiver.status()["ranks"][0]["unloaded"] == ["head.weight"]
    world.train_and_follow(1)
    assert world.receiver.verify()["verdict"]


class Stage(torch.nn.Module):
    """What a rank has of a model that is spread over ranks by tensors: stages of layers, or experts."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.held = torch.nn.ParameterList(torch.zeros(SHAPES[name], dtype=torch.bfloat16) for name in names)
        self.held.requires_grad_(False)
        self.names = names

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.names:
                self.held[self.names.index(name)].data.copy_(tensor)


def test_what_other_ranks_load_is_not_listed_and_a_list_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with 50,000 experts, the status of 16 ranks had 40 MB, and API servers could not send it."""
    monkeypatch.setattr(identify, "SHOWN_TENSORS", 1)
    world = World(tmp_path)
    stages = [Stage("q.weight", "k.weight"), Stage("v.weight", "out.weight")]
    for stage in stages:
        stage.load_weights((name, tensor.bfloat16()) for name, tensor in world.tensors.items())
    world.use(ModulePort(*stages))
    world.receiver.advance()
    assert world.receiver.served_version == 0
    assert [rank["unloaded"] for rank in world.receiver.status()["ranks"]] == [["embedding.weight"]] * 2


# Weights that are changed from outside


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_changed_from_outside_are_noticed(tmp_path: Path, ranks: int) -> None:
    """Found by the commit itself, where no rescan found them before; on two ranks it is a copy on one of them."""
    world = World(tmp_path, ranks=ranks)
    world.follow(rescan_bytes=0)
    world.receiver.advance()
    world.train(1)
    world.models[-1].norm.data.mul_(2.0)
    with pytest.raises(FingerprintError, match="taken back: the weights held were changed from outside"):
        world.receiver.advance()
    expected = ["pause", "commit", "revert", "label 0", "resume", "label None"]
    assert world.port.log[-len(expected) :] == expected
    status = world.receiver.status()
    assert (status["served"], status["state"], status["last_error"]["kind"]) == (None, "refused", "fingerprint")


def test_rescan_goes_round(world: World) -> None:
    """With little room only some tensors are looked at beside each staging; all of them in the end."""
    world.follow(rescan_bytes=1)
    world.receiver.advance()
    world.model.transposed.data.view(torch.int16)[0, 0] ^= 1
    seen = 0

    def follow() -> None:
        nonlocal seen
        for step in range(1, 8):
            world.train(step, scale=0.0)
            world.receiver.advance()
            seen = step

    with pytest.raises(FingerprintError, match=r"out\.weight"):
        follow()
    assert 0 < seen < 6


@pytest.mark.parametrize("found_by", ["verify", "advance"])
def test_parameter_replaced_between_two_versions_is_refused(world: World, found_by: str) -> None:
    world.receiver.advance()
    world.model.qkv.data = world.model.qkv.data.clone()
    if found_by == "verify":
        assert world.receiver.verify()["mismatched"] == ["k.weight", "q.weight", "v.weight"]
        return
    world.train(1)
    with pytest.raises(ModelError, match="'qkv' was replaced"):
        world.receiver.advance()
    assert world.receiver.status()["served"] is None


def test_parameter_derived_from_another_is_refused(world: World) -> None:
    world.model.absorbed = torch.nn.Parameter(world.model.norm.data * 2, requires_grad=False)
    assert "'absorbed'" in world.expect_fails("model").message


# Engines that fail in the pause


@pytest.mark.parametrize("call", ["pause", "commit", "label"])
def test_failure_in_the_pause_is_taken_back(world: World, call: str) -> None:
    """The engine does what is asked, and then reports failure."""
    port = hooked(world)
    world.receiver.advance(0)
    world.train(1)
    port.after = failing(call)
    world.expect_fails("engine")
    assert port.log[-2:] == ["label 0", "resume"]
    assert world.receiver.status()["state"] == "idle"
    world.receiver.advance()
    assert world.receiver.status()["last_error"] is None
    world.expect_exact()


def test_engine_that_does_not_resume_is_lost_with_the_new_version(world: World) -> None:
    port = hooked(world)
    world.receiver.advance()
    world.train(1)
    port.before = failing("resume", times=99)
    with pytest.raises(WeightsLostError, match="does not resume"):
        world.receiver.advance()
    status = world.receiver.status()
    assert (status["state"], status["served"]["version"]) == ("lost", 1)
    with pytest.raises(WeightsLostError):
        world.receiver.verify()
    assert world.receiver.status()["state"] == "lost"


def test_engine_that_cannot_tell_stays_paused_and_is_ended(world: World) -> None:
    port = hooked(world)
    world.receiver.advance(0)
    world.train(1)

    def fail(method: str, arguments: dict[str, Any]) -> None:
        if method == "commit" or (method == "describe" and "commit" in port.log):
            raise EngineError(f"{method} timed out")

    port.after = fail
    with pytest.raises(WeightsLostError):
        world.receiver.advance()
    assert "resume" not in port.log
    assert len(port.ended) == 1
    assert world.receiver.status()["state"] == "lost"
    port.after = failing("nothing")
    with pytest.raises(WeightsLostError):
        world.receiver.advance()
    assert world.receiver.status()["last_error"]["kind"] == "weights_lost"


@pytest.mark.parametrize("fault", ["weights are lost", "pause expired without an answer"])
def test_engine_whose_weights_are_unknown_is_ended_and_not_resumed_again(world: World, fault: str) -> None:
    port = hooked(world)
    world.receiver.advance(0)
    world.train(1)

    def lose(method: str, arguments: dict[str, Any]) -> None:
        if method == "commit":
            raise WeightsLostError("injected")

    def expire() -> bool:
        port.before = failing("describe", times=99)
        return True

    if fault == "weights are lost":
        port.before = lose
    else:
        port.on_resume = expire
    with pytest.raises(WeightsLostError, match="must be started again"):
        world.receiver.advance()
    assert port.log.count("resume") == (0 if fault == "weights are lost" else 1)
    assert len(port.ended) == 1
    assert world.receiver.status()["state"] == "lost"
