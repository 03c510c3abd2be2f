"""A key is changed: at once after it was stolen, by a new run, or as planned, while the run goes on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.chains import TABLE, tensors_of
from tests.support.modules import FusedModel, ModulePort
from tests.support.signed import Keys, assert_all_signed, sign_file
from tests.support.world import expect_equal
from trainer_side import Publisher
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.errors import SignatureError
from vllm_delta_sync.format.manifest import HEAD_KEY, Head, Manifest, version_key
from vllm_delta_sync.settings import Settings


class Trainer:
    """Weights that change with every version."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.live = {spec.name: torch.randn(spec.shape, generator=generator).bfloat16() for spec in TABLE}

    def publish(self, publisher: Publisher, times: int) -> None:
        for _ in range(times):
            for tensor in self.live.values():
                tensor.view(-1)[::50] += 1
            publisher.publish(step=1, wait=True)
        publisher.flush()


class Fleet:
    """One server, restarted whenever its settings change; its state outlives that."""

    def __init__(self, folder: Path, keys: Keys) -> None:
        self._folder, self._keys = folder, keys

    def restart(self, url: Path, *trusted: str) -> None:
        self.model = FusedModel()
        self.model.load_weights(tensors_of([_zeros(spec.numel) for spec in TABLE]))
        settings: dict[str, Any] = {
            "trusted_keys": ",".join(str(self._keys.public(name)) for name in trusted),
            "state_dir": self._folder / "state",
        }
        self.receiver = Receiver(ModulePort(self.model), Settings(bucket=str(url), **settings))

    def serves(self, trainer: Trainer, version: int) -> None:
        self.receiver.advance()
        self.holds(trainer, version)
        assert self.receiver.status()["last_error"] is None

    def refuses(self, match: str) -> None:
        before = self.receiver.status()["served"]
        with pytest.raises(SignatureError, match=match):
            self.receiver.advance()
        assert self.receiver.status()["served"] == before

    def holds(self, trainer: Trainer, version: int) -> None:
        assert self.receiver.served_version == version
        assert self.receiver.verify()["verdict"]
        fresh = FusedModel()
        fresh.load_weights(list(trainer.live.items()))
        expect_equal(self.model, fresh)


def _zeros(count: int) -> Any:
    return torch.zeros(count, dtype=torch.int16).numpy().view("uint16")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.mark.parametrize("place", ["another URL", "the same URL"])
def test_a_stolen_key_is_answered_with_a_new_key_and_a_new_run(tmp_path: Path, keys: Keys, place: str) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    trainer, thief, server = Trainer(), Trainer(), Fleet(tmp_path, keys)
    with Publisher(trainer.live, str(run), signing_key=keys.private("old")) as publisher:
        trainer.publish(publisher, 2)
        server.restart(run, "old")
        server.serves(trainer, 2)
    # The thief takes the run over, and is served.
    with Publisher(thief.live, str(run), signing_key=keys.private("old")) as publisher:
        thief.publish(publisher, 5)
    server.serves(thief, 7)
    if place == "the same URL":
        run.rename(moved)
        again, former = run, moved
    else:
        again, former = tmp_path / "again", run
    with Publisher(trainer.live, str(again), signing_key=keys.private("new")) as publisher:
        trainer.publish(publisher, 1)
        # What the server has seen, version 7 of the old run, does not hold it back.
        server.restart(again, "new")
        server.serves(trainer, 1)
        # The thief writes into the new run.
        newest = (again / version_key(1)).read_bytes()
        forged = Manifest.from_bytes(newest).model_copy(update={"version": 2, "base_version": 1, "_raw": None})
        forged = forged.model_copy(update={"parent": Manifest.from_bytes(newest).digest})
        (again / version_key(2)).write_bytes(keys.ring("old").signed(forged).to_bytes())
        server.refuses(f"signed by key {keys.hex('old')[:16]}, which is not trusted")
        (again / version_key(2)).unlink()
        honest = (again / HEAD_KEY).read_bytes()
        sign_file(again, HEAD_KEY, Head, keys.ring("old"))
        server.refuses(f"signed by key {keys.hex('old')[:16]}, which is not trusted")
        (again / HEAD_KEY).write_bytes(honest)
        # Or puts the old run in its place.
        new = tmp_path / "new"
        again.rename(new)
        shutil.copytree(former, again)
        server.refuses(r"run\.json is signed by key .* which is not trusted")
        shutil.rmtree(again)
        new.rename(again)
        trainer.publish(publisher, 1)
        server.serves(trainer, 2)
    # After a restart too; and what was seen of the new run counts as before.
    server.restart(again, "new")
    server.serves(trainer, 2)
    assert server.receiver.status()["trust"]["last_seen"]["version"] == 2
    assert_all_signed(again, keys.hex("new"))


def test_a_key_is_replaced_while_the_run_goes_on(tmp_path: Path, keys: Keys) -> None:
    run = tmp_path / "run"
    trainer, server = Trainer(), Fleet(tmp_path, keys)
    both = [keys.public("old"), keys.public("new")]
    with Publisher(trainer.live, str(run), signing_key=keys.private("old")) as publisher:
        trainer.publish(publisher, 2)
        server.restart(run, "old", "new")
        server.serves(trainer, 2)
    with Publisher(trainer.live, str(run), signing_key=keys.private("new"), trusted_keys=both) as publisher:
        trainer.publish(publisher, 2)
        server.serves(trainer, 4)
    # Both keys sign the history, from run.json on, so a server that drops the old one cannot read the run.
    server.restart(run, "new")
    server.refuses(rf"run\.json is signed by key {keys.hex('old')[:16]}, which is not trusted")
    assert server.receiver.served_version is None
    # Nor one that begins with the old one alone come further than that signed.
    assert open_run(str(run), keys.readers("old")).reachable_head()[0].version == 2
    server.restart(run, "old", "new")
    server.serves(trainer, 4)
    assert open_run(str(run), keys.readers("old", "new")).verify().head == 4
    # The old key is out of use once a new run has begun.
    with Publisher(trainer.live, str(tmp_path / "next"), signing_key=keys.private("new")) as publisher:
        server.restart(tmp_path / "next", "new")
        server.serves(trainer, 0)
    assert [item.key for item in open_bucket(str(tmp_path / "next")).list("claims/")] == []
