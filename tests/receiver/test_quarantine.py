"""Quarantined versions: who is served them and who is not, whatever ways there are to get past them."""

import logging
import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.support.chains import Server
from tests.support.gating import marks
from tests.support.marked import REASON, MarkedChain
from tests.support.seeds import seeds
from tests.support.world import World
from trainer_side import Gate, Publisher
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.cli import run as run_command
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.api.embedded import OfflineSync
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.staging.reconstruct import newest_good_manifest, rebuild
from vllm_delta_sync.errors import ChainError, DeltaSyncError, NotFoundError, SettingsError
from vllm_delta_sync.format.manifest import Quarantine, version_key
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.run.service_policy import ServicePolicy
from vllm_delta_sync.settings import Settings, load_settings
from vllm_delta_sync.tensors.bits import Bits


@pytest.fixture
def chain(tmp_path: Path) -> MarkedChain:
    """Versions 3, 4 and 6 are quarantined; 6 is the head."""
    chain = MarkedChain(tmp_path)
    chain.play("..!!.!")
    return chain


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is said to vLLM's log."""
    caplog.set_level(logging.INFO, logger="vllm.delta_sync")
    return caplog


@pytest.fixture(autouse=True)
def _propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def committed(server: Server) -> list[int]:
    """Versions at which a commit of the receiver ended."""
    return [entry["version"] for entry in server.receiver.status()["recent"]]


def test_setting_is_one_of_two() -> None:
    assert load_settings({"bucket": "/x"}, {}).quarantined == "skip"
    with pytest.raises(SettingsError, match="'quarantined'"):
        load_settings({"bucket": "/x", "quarantined": "yes"}, {})


def spoiled(bits: list[Bits]) -> list[Bits]:
    """Weights that are no version of any run."""
    return [values ^ values.dtype.type(1) for values in bits]


# Following


@pytest.mark.parametrize(("stage_bytes", "commits"), [(2**30, [5]), (0, [1, 2, 5])], ids=["", "little memory"])
def test_head_is_followed_to_the_newest_sound_version(chain: MarkedChain, stage_bytes: int, commits: list[int]) -> None:
    """Little memory does not end a commit at a quarantined version."""
    server = Server(chain, chain.bits[0], stage_bytes=stage_bytes)
    server.reaches(5, len(commits))
    status = server.receiver.status()
    assert (status["state"], status["lag"], status["last_error"]) == ("idle", 0, None)
    assert status["served"]["quarantined"] == []
    assert (status["head"]["version"], status["head"]["quarantined"]) == (6, [REASON])
    server.reaches(5, commits=0)
    chain.play("!.")
    server.reaches(8, commits=1)
    assert committed(server) == [*commits, 8]


def test_lag_counts_to_what_would_be_served(chain: MarkedChain) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    server.receiver.hold()
    chain.play(".!!")
    server.receiver.observe()
    assert server.receiver.status()["lag"] == 2
    server = Server(chain, chain.bits[0], quarantined="serve", policy="manual")
    server.receiver.advance(5)
    assert server.receiver.status()["lag"] == 4


def test_skipped_versions_are_named_once(chain: MarkedChain, told: pytest.LogCaptureFixture) -> None:
    server = Server(chain, chain.bits[0])
    for played, line in (
        ("", f"version 6 is quarantined and skipped: {REASON!r}"),
        ("", None),
        ("!!", f"versions 7 to 8 are quarantined and skipped: {REASON!r}"),
        (".", None),
        ("!", f"version 10 is quarantined and skipped: {REASON!r}"),
    ):
        chain.play(played)
        told.clear()
        server.receiver.advance()
        found = [record.getMessage() for record in told.records if "skipped" in record.getMessage()]
        assert found == ([] if line is None else [line])


def test_reasons_cannot_forge_lines_of_the_log() -> None:
    assert "\n" not in Quarantine(reasons=["a\nERROR b", "c"], sound=None).summary()
    assert len(Quarantine(reasons=["x" * 1000] * 64, sound=None).summary()) < 400


def test_all_are_served_where_the_setting_says_so(chain: MarkedChain) -> None:
    server = Server(chain, chain.bits[0], quarantined="serve")
    server.reaches(6, commits=1)
    status = server.receiver.status()
    assert (status["served"]["quarantined"], status["lag"]) == ([REASON], 0)
    # A server that skips them never goes back to a sound one.
    server.follow(chain)
    server.reaches(6, commits=0)
    status = server.receiver.status()
    assert (status["state"], status["lag"]) == ("idle", 0)
    chain.play("!.")
    server.reaches(8, commits=1)


# Asking for one


def test_version_that_is_asked_for_is_served_and_left_for_the_next_sound_one(chain: MarkedChain) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance(4)
    server.serves(4)
    assert committed(server) == [4]
    server.reaches(5, commits=1)
    server.receiver.advance(6)
    server.serves(6)
    server.reaches(6, commits=0)
    chain.play("!")
    server.reaches(6, commits=0)
    chain.play(".")
    server.reaches(8, commits=1)
    assert committed(server) == [4, 5, 6, 8]


@pytest.mark.parametrize("target", ["4", "tag:bad"])
def test_version_that_the_setting_names_is_served(chain: MarkedChain, target: str) -> None:
    set_tag(open_run(chain.url), "bad", 4)
    server = Server(chain, chain.bits[0], target=target, stage_bytes=0)
    server.reaches(4, commits=4)
    assert committed(server) == [1, 2, 4], "but no other that is quarantined"


def test_offline_goes_where_a_server_goes(chain: MarkedChain) -> None:
    server = Server(chain, chain.bits[0])
    sync = OfflineSync(server.receiver)
    assert sync.to()["served"]["version"] == 5
    assert sync.to(6)["served"]["version"] == 6
    assert sync.to(5)["served"]["version"] == 5


# Nothing that is sound


def test_where_all_is_quarantined_nothing_is_served(tmp_path: Path) -> None:
    chain = MarkedChain(tmp_path, name="bad")
    chain.bad = True
    chain.inside(chain.fresh())
    chain.play("!!")
    server = Server(chain, chain.bits[0])
    server.reaches(0, commits=0)
    assert server.receiver.status()["lag"] == 0
    other = MarkedChain(tmp_path, seed=5)
    foreign = Server(chain, spoiled(other.bits[0]))
    with pytest.raises(NotFoundError, match=r"every version of the run at .* is quarantined"):
        foreign.receiver.advance()
    assert foreign.receiver.target_unavailable
    foreign.holds(spoiled(other.bits[0]))
    chain.play(".")
    foreign.reaches(3, commits=1)


def test_chain_that_ends_in_damage_is_followed_to_a_sound_version(tmp_path: Path) -> None:
    chain = MarkedChain(tmp_path)
    chain.play("..!!.")
    chain.lose(5)
    server = Server(chain, chain.bits[0])
    with pytest.raises(NotFoundError):
        server.receiver.advance()
    server.serves(2)


def test_manifest_that_calls_a_quarantined_version_sound_is_not_believed(tmp_path: Path) -> None:
    chain = MarkedChain(tmp_path)
    chain.play(".!!")
    head = chain.manifests[-1]
    lie = head.model_copy(update={"quarantine": Quarantine(reasons=[REASON], sound=2)})
    chain.bucket.put(version_key(3), lie.to_bytes())
    chain.manifests[-1] = lie
    chain.head(3)
    server = Server(chain, chain.bits[0])
    with suppress(ChainError):
        server.receiver.advance()
    server.serves(server.receiver.served_version or 0)
    assert server.receiver.served_version in (0, 1)


def test_branch_that_begins_at_a_quarantined_version_is_a_run_like_others(chain: MarkedChain) -> None:
    url = str(chain.root / "branch")
    made = branch(open_run(chain.url), 4, url)
    assert made.manifest(0).quarantine is None
    server = Server(chain, chain.bits[2])
    receiver = Receiver(server.port, Settings(bucket=url))
    receiver.advance()
    assert receiver.served_version == 0
    server.holds(chain.bits[4])


@pytest.mark.parametrize("seed", seeds(10, 40))
def test_no_commit_ends_at_a_quarantined_version(seed: int, tmp_path: Path) -> None:
    """Whatever is lost, and however little memory there is: random runs, anchors, merged deltas and losses."""
    chance = random.Random(seed)
    chain = MarkedChain(tmp_path, seed=seed)
    for _ in range(chance.randint(5, 20)):
        head = len(chain.manifests) - 1
        chain.bad = chance.random() < 0.45
        chain.grow(1, base=chance.randrange(head) if head > 1 and chance.random() < 0.1 else None)
    head = len(chain.manifests) - 1
    breaks = {item.version for item in chain.breaks}
    for first in range(0, head - 3, 4):
        if not breaks.intersection(range(first + 1, first + 5)) and chance.random() < 0.4:
            chain.merge(first, first + 4)
    for version in chance.sample(range(1, head + 1), k=2):
        chain.beside_it(version)
    chain.lose(*(version for version in range(1, head + 1) if chance.random() < 0.08))
    start = spoiled(chain.bits[0]) if chance.random() < 0.5 else chain.bits[0]
    asked = chance.choice([None, None, chance.randint(1, head)])
    server = Server(chain, start, stage_bytes=chance.choice([0, 4000, 2**30]))
    for _ in range(3):
        try:
            server.receiver.advance(asked)
        except DeltaSyncError:
            continue
    allowed = {manifest.version for manifest in chain.manifests if manifest.quarantine is None} | {asked}
    assert set(committed(server)) <= allowed
    if server.receiver.served_version is not None:
        server.serves(server.receiver.served_version)
    sound = chain.manifests[-1].sound
    if asked is None and all((chain.folder / ref.key).exists() for item in chain.manifests for ref in item.objects):
        assert server.receiver.served_version == sound


# Cold start


def test_cold_start_loads_the_newest_sound_version(chain: MarkedChain, told: pytest.LogCaptureFixture) -> None:
    run = open_run(chain.url)
    assert newest_good_manifest(run).version == 5
    assert f"version 6 is quarantined and skipped: {REASON!r}" in told.text
    assert newest_good_manifest(run, ServicePolicy(quarantined=True)).version == 6
    chain.lose(5)
    held, _ = rebuild(run, newest_good_manifest(run), "/nowhere")
    assert held.version == 2, "not 3 or 4"
    assert (
        rebuild(
            run, newest_good_manifest(run, ServicePolicy(quarantined=True)), "/nowhere", ServicePolicy(quarantined=True)
        )[0].version
        == 4
    )


def test_cold_start_where_all_is_quarantined(tmp_path: Path) -> None:
    chain = MarkedChain(tmp_path, name="bad")
    chain.bad = True
    chain.inside(chain.fresh())
    with pytest.raises(NotFoundError, match=r"every version of run .* is quarantined; publish a sound one"):
        newest_good_manifest(open_run(chain.url))


# Commands


def test_commands_show_the_mark(chain: MarkedChain, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["log", "--bucket", chain.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["quarantined" in line for line in lines[1:]] == [False, False, False, True, True, False, True]
    for arguments in (["inspect", "--bucket", chain.url, "--version", "4"], ["inspect", "--bucket", chain.url]):
        assert run_command(arguments) == 0
        assert f"quarantined  {REASON}" in capsys.readouterr().out
    assert run_command(["inspect", "--bucket", chain.url, "--version", "5"]) == 0
    assert "quarantined" not in capsys.readouterr().out
    assert run_command(["verify", "--bucket", chain.url]) == 0


# A trainer that breaks


def test_policy_that_breaks_and_is_mended_never_reaches_the_server(tmp_path: Path) -> None:
    world = World(tmp_path, ranks=2)
    world.publisher.close()
    world.publisher = Publisher(world.pairs, world.url, gate=Gate(action="quarantine", max_norm_jump=1.0), merge=False)
    world.train(1)
    world.receiver.advance()
    good, kept = world.bits(), {name: tensor.clone() for name, tensor in world.tensors.items()}
    name = next(iter(world.tensors))
    world.tensors[name].view(-1)[3] = torch.nan
    for step in (2, 3):
        world.train(step)
        world.receiver.advance()
        world.expect_bits(good)
    for key, tensor in kept.items():
        world.tensors[key].copy_(tensor)
    world.train_and_follow(4)
    with open_bucket(world.url) as bucket:
        assert marks(bucket) == [0, 1, 1, 1, 4]
