"""The receiver against a real run and a plain module: follows it, refuses bad versions, keeps weights whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forge import BAD_VERSIONS, BadVersion
from tests.support.modules import FusedModel, ModulePort, save_base
from tests.support.world import World
from trainer_side import Publisher
from vllm_delta_sync.config import Settings
from vllm_delta_sync.engine.receiver import Receiver
from vllm_delta_sync.errors import (
    ChainError,
    EngineError,
    FingerprintError,
    FormatError,
    ModelError,
    NotFoundError,
    WeightsLostError,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("codec", ["packed", "context", "raw"])
def test_follows_every_version(tmp_path: Path, codec: str) -> None:
    world = World(tmp_path, codec=codec)
    world.receiver.advance()
    assert world.receiver.served_version == 0
    for step in range(1, 7):
        world.train(step)
        world.receiver.advance()
        assert world.receiver.served_version == step
        world.expect_exact()
        assert world.receiver.verify()["verdict"]
    assert world.port.log.count("pause") == world.port.log.count("resume") == 6
    assert world.port.log[-5:] == ["pause", "commit", "label 6", "resume", "trim"]


def test_float32_run_is_refused_with_the_mend(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publisher.close()
    world.receiver = Receiver(world.port, Settings(bucket=str(tmp_path / "float32")))
    with Publisher(list(world.tensors.items()), bucket=str(tmp_path / "float32")):
        error = world.expect_fails("model")
    assert "base=" in error.message


def test_late_joiner_catches_up(world: World) -> None:
    for step in range(1, 5):
        world.train(step)
    world.receiver.advance(3)
    assert world.receiver.served_version == 3
    world.receiver.advance()
    world.expect_exact()


def test_dense_step_sends_tensors_in_full(world: World) -> None:
    world.receiver.advance()
    world.train(1)
    for tensor in world.tensors.values():
        tensor.mul_(-3.0)
    world.train(2)
    world.receiver.advance()
    world.expect_exact()
    assert world.receiver.verify()["verdict"]


def test_anchor_replaces_other_weights(tmp_path: Path) -> None:
    world = World(tmp_path, with_base=False)
    for parameter in world.model.parameters():
        parameter.data.fill_(7.0)
    world.model.embedding.data[50:].fill_(0)
    world.receiver.advance()
    assert world.receiver.served_version == 0
    world.expect_exact()
    world.train(1)
    world.receiver.advance()
    world.expect_exact()


def test_wrong_base_is_refused_by_name(world: World) -> None:
    world.model.norm.data[3] = 9.0
    error = world.expect_fails("chain")
    assert "model.norm.weight" in error.message
    assert world.receiver.status()["state"] == "refused"
    assert world.receiver.status()["served"] is None


def test_weights_changed_from_outside_are_noticed(world: World) -> None:
    """Found by the commit itself, where no rescan found them before."""
    world.follow(rescan_bytes=0)
    world.receiver.advance()
    world.train(1)
    world.model.qkv.data[:] += 1.0
    with pytest.raises(FingerprintError, match="taken back: the weights held were changed from outside"):
        world.receiver.advance()
    expected = ["pause", "commit", "revert", "label 0", "resume", "label None"]
    assert world.port.log[-len(expected) :] == expected
    status = world.receiver.status()
    assert status["served"] is None
    assert status["state"] == "refused"
    assert status["last_error"]["kind"] == "fingerprint"


def test_one_weight_changed_from_outside_is_found_while_staging(world: World) -> None:
    world.receiver.advance()
    world.train(1)
    world.model.norm.data.view(torch.int16)[3] ^= 1
    with pytest.raises(FingerprintError, match=r"model\.norm\.weight"):
        world.receiver.advance()
    assert "pause" not in world.port.log
    assert world.receiver.status()["served"] is None


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


class FaultyPort(ModulePort):
    """Does what is asked, then reports failure: an engine that dies or times out at a chosen call."""

    def __init__(self, model: FusedModel, failing: set[str]) -> None:
        super().__init__(model)
        self.failing = failing

    def call(self, method: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        answers = super().call(method, arguments)
        if method in self.failing and (method != "describe" or "commit" in self.log):
            raise EngineError(f"{method} timed out")
        return answers

    def label(self, version: int | None) -> None:
        super().label(version)
        if "label" in self.failing and version not in (None, 0):
            raise EngineError("label timed out")

    def pause(self) -> None:
        super().pause()
        if "pause" in self.failing:
            raise EngineError("pause timed out, and took effect")

    def resume(self) -> bool:
        if "resume" in self.failing:
            raise EngineError("resume timed out")
        return super().resume()


@pytest.mark.parametrize("failing", ["pause", "commit", "label"])
def test_failure_in_the_pause_is_taken_back(world: World, failing: str) -> None:
    port = FaultyPort(world.model, {failing})
    world.use(port)
    world.receiver.advance(0)
    world.train(1)
    world.expect_fails("engine")
    assert port.log[-2:] == ["label 0", "resume"]
    assert world.receiver.status()["state"] == "idle"
    port.failing.clear()
    world.receiver.advance()
    assert world.receiver.status()["last_error"] is None
    world.expect_exact()


def test_interrupt_in_the_pause_is_taken_back(world: World) -> None:
    class Interrupted(FaultyPort):
        def label(self, version: int | None) -> None:
            super().label(version)
            if version == 1 and self.failing:
                self.failing.clear()
                raise KeyboardInterrupt

    port = Interrupted(world.model, {"once"})
    world.use(port)
    world.receiver.advance()
    world.train(1)
    with pytest.raises(KeyboardInterrupt):
        world.receiver.advance()
    assert port.log[-2:] == ["label 0", "resume"]
    assert world.receiver.status()["state"] == "idle"
    world.receiver.advance()
    world.expect_exact()


def test_engine_that_does_not_resume_is_lost_with_the_new_version(world: World) -> None:
    port = FaultyPort(world.model, {"resume"})
    world.use(port)
    world.receiver.advance()
    world.train(1)
    with pytest.raises(WeightsLostError, match="does not resume"):
        world.receiver.advance()
    status = world.receiver.status()
    assert (status["state"], status["served"]["version"]) == ("lost", 1)
    with pytest.raises(WeightsLostError):
        world.receiver.verify()
    assert world.receiver.status()["state"] == "lost"


def test_engine_that_cannot_tell_stays_paused_and_is_ended(world: World) -> None:
    port = FaultyPort(world.model, {"commit", "describe"})
    world.use(port)
    world.receiver.advance(0)
    world.train(1)
    with pytest.raises(WeightsLostError):
        world.receiver.advance()
    assert "resume" not in port.log
    assert len(port.ended) == 1
    assert world.receiver.status()["state"] == "lost"
    port.failing.clear()
    with pytest.raises(WeightsLostError):
        world.receiver.advance()
    assert world.receiver.status()["last_error"]["kind"] == "weights_lost"


def test_anchor_that_appears_late_is_taken(tmp_path: Path) -> None:
    world = World(tmp_path, with_base=False)
    world.model.norm.data[:] = 0
    (anchor,) = (tmp_path / "run" / "objects").iterdir()
    hidden = anchor.rename(tmp_path / "hidden")
    world.expect_fails("not_found")
    assert world.receiver.status()["state"] == "waiting_for_run"
    hidden.rename(anchor)
    world.receiver.advance()
    world.expect_exact()


def test_verify_names_the_tensor_that_differs(world: World) -> None:
    world.receiver.advance()
    world.model.transposed.data[5, 7] += 1.0
    outcome = world.receiver.verify()
    assert outcome["verdict"] is False
    assert outcome["mismatched"] == ["out.weight"]
    status = world.receiver.status()
    assert status["last_error"]["kind"] == "fingerprint"
    assert (status["served"], status["state"]) == (None, "refused")
    assert world.port.log[-1] == "label None"


def test_replaced_parameter_is_noticed(world: World) -> None:
    world.receiver.advance()
    world.model.qkv.data = world.model.qkv.data.clone()
    assert world.receiver.verify()["mismatched"] == ["k.weight", "q.weight", "v.weight"]


def test_parameter_replaced_between_two_versions_is_refused(world: World) -> None:
    world.receiver.advance()
    world.model.qkv.data = world.model.qkv.data.clone()
    world.train(1)
    with pytest.raises(ModelError, match="'qkv' was replaced"):
        world.receiver.advance()
    assert world.receiver.status()["served"] is None


def test_parameter_derived_from_another_is_refused(world: World) -> None:
    world.model.absorbed = torch.nn.Parameter(world.model.norm.data * 2, requires_grad=False)
    error = world.expect_fails("model")
    assert "'absorbed'" in error.message


def test_wrong_version_is_not_tried_twice(world: World) -> None:
    world.receiver.advance()
    forgery = next(bad for bad in BAD_VERSIONS if bad.name == "made against other weights").write(Path(world.url))
    world.expect_fails("fingerprint")
    pauses = world.port.log.count("pause")
    world.expect_fails("fingerprint")
    assert world.port.log.count("pause") == pauses
    forgery.remove()
    world.train(1)
    world.receiver.advance()
    world.expect_exact()


def test_damaged_newest_version_does_not_hide_the_good_ones(world: World) -> None:
    for step in (1, 2):
        world.train(step)
    damaged = Path(world.url) / "versions" / "0000000003.json"
    damaged.write_bytes(b"{}")
    with pytest.raises(FormatError):
        world.receiver.advance()
    assert world.receiver.served_version == 2
    world.expect_exact()
    assert world.receiver.status()["last_error"]["kind"] == "format"
    world.receiver.advance(2)
    assert world.receiver.status()["last_error"] is None


@pytest.mark.parametrize("bad", BAD_VERSIONS, ids=lambda bad: bad.name)
def test_bad_version_is_refused_and_healed(world: World, bad: BadVersion) -> None:
    world.receiver.advance()
    world.train(1)
    world.receiver.advance()
    forgery = bad.write(Path(world.url))
    world.expect_fails(bad.kind)
    assert world.port.log.count("pause") == world.port.log.count("resume")
    forgery.remove()
    world.receiver.advance()
    assert world.receiver.status()["last_error"] is None
    world.train(2)
    world.receiver.advance()
    world.expect_exact()


def test_no_run_yet(tmp_path: Path) -> None:
    receiver = Receiver(ModulePort(FusedModel()), Settings(bucket=str(tmp_path / "later")))
    with pytest.raises(NotFoundError):
        receiver.advance()
    assert receiver.status()["state"] == "waiting_for_run"
    with pytest.raises(EngineError):
        receiver.verify()


def test_versions_that_are_not_there_or_lie_behind(world: World) -> None:
    world.train(1)
    world.receiver.advance()
    with pytest.raises(NotFoundError):
        world.receiver.advance(9)
    with pytest.raises(ChainError):
        world.receiver.advance(0)
    assert world.receiver.served_version == 1


def test_run_made_again_in_the_same_place(world: World, tmp_path: Path) -> None:
    import shutil

    world.receiver.advance()
    first = world.receiver.run_id
    world.publisher.close()
    shutil.rmtree(world.url)
    world.publisher = Publisher(world.pairs, bucket=world.url, base=tmp_path / "base")
    world.train(1)
    world.receiver.advance()
    assert world.receiver.run_id not in (None, first)
    world.expect_exact()


def test_tied_head_is_listed_as_not_loaded(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publisher.close()
    world.tensors["head.weight"] = world.tensors["embedding.weight"].clone()
    save_base(tmp_path / "base2", world.tensors)
    url = str(tmp_path / "run2")
    world.publisher = Publisher(world.pairs, bucket=url, base=tmp_path / "base2")
    receiver = Receiver(world.port, Settings(bucket=url))
    receiver.advance()
    assert receiver.status()["ranks"][0]["unloaded"] == ["head.weight"]
    world.receiver = receiver
    world.train(1)
    world.receiver.advance()
    world.expect_exact()
    assert receiver.verify()["verdict"]
