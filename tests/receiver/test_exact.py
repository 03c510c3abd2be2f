"""Versions of a publisher with a byte budget: who is served those that are not exact, and who waits for the next."""

import random
from pathlib import Path

import pytest

from tests.support.chains import Server
from tests.support.marked import MarkedChain
from tests.support.seeds import seeds
from tests.support.world import World
from trainer_side import Budget, Publisher
from vllm_delta_sync.cli import run as run_command
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.staging.reconstruct import newest_good_manifest, rebuild
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.run.service_policy import ServicePolicy, newest_to_serve

HELD = {"elements": 7, "relative_norm": 0.25, "exact": 2}


@pytest.fixture
def chain(tmp_path: Path) -> MarkedChain:
    """Versions 3, 4 and 6 are not exact; 6 is the head."""
    chain = MarkedChain(tmp_path)
    chain.play("..~~.~")
    return chain


def committed(server: Server) -> list[int]:
    """Versions at which a commit of the receiver ended."""
    return [entry["version"] for entry in server.receiver.status()["recent"]]


def test_they_are_served_and_shown_by_default(chain: MarkedChain) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance(4)
    assert server.receiver.status()["served"]["held_back"] == HELD
    server.reaches(6, commits=1)
    status = server.receiver.status()
    assert status["served"]["held_back"] == status["head"]["held_back"] == HELD | {"exact": 5}
    chain.play(".")
    server.reaches(7, commits=1)
    assert server.receiver.status()["served"]["held_back"] is None


@pytest.mark.parametrize(("stage_bytes", "commits"), [(2**30, [5]), (0, [1, 2, 5])], ids=["", "little memory"])
def test_exact_versions_only(chain: MarkedChain, stage_bytes: int, commits: list[int]) -> None:
    """Little memory does not end a commit at another version."""
    server = Server(chain, chain.bits[0], stage_bytes=stage_bytes, require_exact=True)
    server.reaches(5, len(commits))
    status = server.receiver.status()
    assert (status["state"], status["lag"], status["last_error"]) == ("idle", 0, None)
    assert (status["head"]["version"], status["served"]["held_back"]) == (6, None)
    server.reaches(5, commits=0)
    chain.play("~.")
    server.reaches(8, commits=1)
    assert committed(server) == [*commits, 8]


@pytest.mark.parametrize("target", ["4", "tag:held"])
def test_version_that_is_named_is_served(chain: MarkedChain, target: str) -> None:
    set_tag(open_run(chain.url), "held", 4)
    server = Server(chain, chain.bits[0], target=target, require_exact=True, stage_bytes=0)
    server.reaches(4, commits=3)
    assert committed(server) == [1, 2, 4]
    server = Server(chain, chain.bits[0], require_exact=True)
    server.receiver.advance(3)
    server.serves(3)
    server.reaches(5, commits=1)


@pytest.mark.parametrize(
    ("marks", "both", "exact", "sound"),
    # Quarantined, not exact, and both: the newest that is neither, that is exact, and that is sound.
    [(".~!~", 1, 3, 4), ("~!~!", 0, 4, 3), (".?.~?", 3, 3, 4), ("?", 0, 0, 0), (".!~!~", 1, 4, 5)],
)
def test_beside_quarantined_versions(marks: str, both: int, exact: int, sound: int, tmp_path: Path) -> None:
    chain = MarkedChain(tmp_path)
    chain.play(marks)
    run = open_run(chain.url)
    head = run.head()
    assert newest_to_serve(run, head, ServicePolicy(exact=True)) == both
    assert newest_to_serve(run, head, ServicePolicy(quarantined=True, exact=True)) == exact
    assert newest_to_serve(run, head, ServicePolicy()) == sound
    for quarantined, version in (("skip", both), ("serve", exact)):
        server = Server(chain, chain.bits[0], require_exact=True, quarantined=quarantined)
        server.reaches(version, commits=1 if version else 0)


@pytest.mark.parametrize("seed", seeds(10, 40))
def test_no_commit_ends_at_another_version(seed: int, tmp_path: Path) -> None:
    """Whatever is lost, and however little memory there is: random runs, anchors, merged deltas and losses."""
    chance = random.Random(seed)
    chain = MarkedChain(tmp_path, seed=seed)
    for _ in range(chance.randint(5, 20)):
        head = len(chain.manifests) - 1
        chain.mark(chance.choice("..~~?!"))
        chain.grow(1, base=chance.randrange(head) if head > 1 and chance.random() < 0.1 else None)
    head = len(chain.manifests) - 1
    chain.lose(*(version for version in range(1, head + 1) if chance.random() < 0.08))
    server = Server(chain, chain.bits[0], stage_bytes=chance.choice([0, 4000, 2**30]), require_exact=True)
    for _ in range(3):
        try:
            server.receiver.advance()
        except DeltaSyncError:
            continue
    allowed = {item.version for item in chain.manifests if item.quarantine is None and item.held_back is None}
    assert set(committed(server)) <= allowed
    if all((chain.folder / ref.key).exists() for item in chain.manifests for ref in item.objects):
        assert server.receiver.served_version == max(allowed)


def test_cold_start(chain: MarkedChain) -> None:
    run = open_run(chain.url)
    assert newest_good_manifest(run).version == 6
    assert newest_good_manifest(run, ServicePolicy(exact=True)).version == 5
    chain.lose(5)
    held, _ = rebuild(run, newest_good_manifest(run, ServicePolicy(exact=True)), "/nowhere", ServicePolicy(exact=True))
    assert held.version == 2, "not 3 or 4"


def test_commands_show_it(chain: MarkedChain, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["log", "--bucket", chain.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["not exact" in line for line in lines[1:]] == [False, False, False, True, True, False, True]
    for arguments, exact in (
        (["inspect", "--bucket", chain.url, "--version", "4"], 2),
        (["inspect", "--bucket", chain.url], 5),
    ):
        assert run_command(arguments) == 0
        shown = f"held back    7 elements, relative distance 0.25; exact: version {exact}"
        assert shown.split() in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert run_command(["inspect", "--bucket", chain.url, "--version", "5"]) == 0
    assert "held back" not in capsys.readouterr().out
    assert run_command(["verify", "--bucket", chain.url]) == 0


def test_publisher_with_a_budget_and_two_servers(tmp_path: Path) -> None:
    """One server holds each version bit for bit, the other only those that are the trainer's state."""
    world = World(tmp_path, ranks=2)
    world.publisher.close()
    budget = Budget(max_share=0.01, exact_every=3)
    world.publisher = Publisher(world.pairs, world.url, budget=budget, merge=False)
    world.receiver.advance()
    for step in range(1, 7):
        world.train(step)
        world.receiver.advance()
        assert world.receiver.served_version == step
        assert world.receiver.verify()["verdict"]
        if step % 3 == 0:
            world.expect_exact()
        else:
            assert world.receiver.status()["served"]["held_back"]["elements"] > 0
    world.follow(require_exact=True)
    world.receiver.advance()
    for step in range(7, 10):
        world.train(step)
        world.receiver.advance()
        assert world.receiver.served_version == (9 if step == 9 else 6)
    world.expect_exact()
