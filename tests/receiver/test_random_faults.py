"""Random faults at random calls: after every action, what status claims is what every rank holds."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.modules import ModulePort
from tests.support.seeds import seeds
from tests.support.world import World
from vllm_delta_sync.engine import transaction
from vllm_delta_sync.engine.lease import common_version, is_settled
from vllm_delta_sync.errors import DeltaSyncError, EngineError

SEEDS = (*seeds(12, 25), 105)


ACTIONS = ("train", "train", "grow", "advance", "advance", "advance", "rollback", "hold", "release", "verify")


LOOKED_AT = ("poll", "describe")


class FaultyPort(ModulePort):
    """An engine with a lease on its pause, whose calls fail by chance: before they act, after, or as a whole."""

    def __init__(self, chance: random.Random, *models: Any) -> None:
        super().__init__(*models)
        self.chance = chance
        self.rate = 0.0
        self.paused = False
        self.expired = False
        self.labelled: int | None = None

    def fails(self, part: float = 1.0) -> bool:
        return self.chance.random() < part * self.rate

    def watchdog(self) -> None:
        """As the engine core's: once the pause has expired it brings all ranks to one version and goes on."""
        if not self.paused or not self.fails():
            return
        held = [self.call_rank(rank, "describe", {}) for rank in self.ranks]
        version = common_version(held)
        if not is_settled(held, version):
            for rank in self.ranks:
                rank.revert(version)
        self.labelled, self.paused, self.expired = version, False, True

    def call(self, method: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        self.watchdog()
        moves = method in ("commit", "revert")
        if moves and not self.paused:
            raise EngineError(f"the pause expired before {method}")
        answers = [self.ask(index, method, arguments) for index in range(len(self.ranks))]
        self.watchdog()
        # How often it is polled is a matter of time: asked of chance, no story would be told twice alike.
        if not moves and method != "poll" and self.fails(1 / 3):
            raise EngineError(f"the answer to {method} was lost")
        return answers

    def ask(self, index: int, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        fault = {"error": {"kind": "engine", "message": f"injected at {method} of rank {index}"}}
        if method not in LOOKED_AT and self.fails():
            return fault
        answer = self.call_rank(self.ranks[index], method, arguments)
        return fault if method not in LOOKED_AT and self.fails() else answer

    def pause(self) -> None:
        if self.fails():
            raise EngineError("the pause failed")
        self.paused, self.expired = True, False
        if self.fails():
            raise EngineError("the pause timed out, and took effect")

    def resume(self) -> bool:
        self.watchdog()
        expired, self.expired, self.paused = self.expired, False, False
        return expired

    def label(self, version: int | None) -> None:
        if self.fails(1 / 3):
            raise EngineError("the label failed")
        self.labelled = version

    def label_paused(self, version: int | None) -> None:
        self.watchdog()
        if not self.paused:
            raise EngineError("the pause expired before its label")
        self.labelled = version
        self.watchdog()


class Story:
    """One world, and what every version's bits are."""

    def __init__(self, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rate = self.chance.choice([0.02, 0.05, 0.1])
        self.world = World(root, ranks=1 + seed % 2, codec=self.chance.choice(["packed", "raw"]))
        self.port = FaultyPort(self.chance, *self.world.models)
        self.world.use(self.port)
        self.world.follow(
            rescan_bytes=0,
            undo_bytes=self.chance.choice([0, 20_000, 10**9]),
            stage_bytes=self.chance.choice([0, 80_000, 10**9]),
        )
        self.bits = [self.world.bits()]

    def train(self, grow: bool) -> None:
        if grow:
            for tensor in list(self.world.tensors.values())[:3]:
                tensor.mul_(-1.5)
        self.world.train(len(self.bits))
        fresh = [parameter for model in self.world.fresh() for parameter in model.parameters()]
        self.bits.append([parameter.view(torch.int16).clone() for parameter in fresh])

    def act(self, action: str) -> DeltaSyncError | None:
        receiver, versions = self.world.receiver, len(self.bits)
        try:
            if action == "rollback":
                receiver.rollback(self.chance.randrange(versions))
            elif action == "advance":
                receiver.advance(self.chance.choice([None, None, self.chance.randrange(versions)]))
            else:
                getattr(receiver, action)()
        except DeltaSyncError as error:
            return error
        return None

    def expect_honest(self, done: list[str]) -> None:
        status = self.world.receiver.status()
        assert not self.port.paused, done
        served = status["served"]
        if served is None:
            assert self.port.labelled is None, done
            assert status["state"] not in ("idle", "held"), done
            return
        assert status["state"] in ("idle", "held"), done
        assert self.port.labelled == served["version"], done
        for now, right in zip(self.world.bits(), self.bits[served["version"]], strict=True):
            assert torch.equal(now, right), done


@pytest.mark.parametrize("seed", SEEDS)
def test_status_tells_the_truth_whatever_fails(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "WAIT_S", 0.0)
    story = Story(tmp_path, seed)
    done: list[str] = []
    for _ in range(25):
        action = story.chance.choice(ACTIONS)
        if action in ("train", "grow"):
            story.train(action == "grow")
            continue
        story.port.rate = story.rate
        error = story.act(action)
        story.port.rate = 0.0
        done.append(f"{action}: {error}")
        if story.world.receiver.status()["state"] == "lost":
            assert story.port.ended, done
            return
        story.expect_honest(done)
    story.world.receiver.release()
    newest = len(story.bits) - 1
    deadline = time.monotonic() + 120
    while story.world.receiver.served_version != newest:
        assert time.monotonic() < deadline, done
        done.append(f"at last: {story.act('advance')}")
        story.expect_honest(done)
    story.world.expect_exact()
