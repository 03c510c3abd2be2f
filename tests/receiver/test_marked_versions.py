"""Versions that are quarantined, or that hold changes back for a byte budget: who is served them and who waits for the
next, whatever ways there are to get past them."""

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.chains import Server
from tests.support.marked import REASON, MarkedChain
from tests.support.seeds import seeds
from tests.support.world import World
from trainer_side import Budget, Publisher
from vllm_delta_sync.cli import run as run_command
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.staging.reconstruct import newest_good_manifest, rebuild
from vllm_delta_sync.errors import ChainError, DeltaSyncError, NotFoundError
from vllm_delta_sync.format.manifest import Quarantine, version_key
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.run.service_policy import ServicePolicy, newest_to_serve
from vllm_delta_sync.tensors.changes import Bits


@dataclass(frozen=True)
class Mark:
    """A reason not to serve a version.

    Attributes:
        sign: of ``MarkedChain``. skips, serves: settings of servers that leave such versions out, or take them.
        skipping, serving: the same for a cold start.
        shown_as: what the status shows of a version under ``name``, by the version that could be served in its place;
            None: of one that is not marked.
        logged: in the output of ``log``. inspected: in that of ``inspect``, by the same version.
    """

    sign: str
    skips: dict[str, Any]
    serves: dict[str, Any]
    skipping: ServicePolicy
    serving: ServicePolicy
    name: str
    shown_as: Callable[[int | None], Any]
    logged: str
    inspected: Callable[[int], str]


QUARANTINED = Mark(
    sign="!",
    skips={},
    serves={"quarantined": "serve"},
    skipping=ServicePolicy(),
    serving=ServicePolicy(quarantined=True),
    name="quarantined",
    shown_as=lambda sound: [] if sound is None else [REASON],
    logged="quarantined",
    inspected=lambda sound: f"quarantined {REASON}",
)
INEXACT = Mark(
    sign="~",
    skips={"require_exact": True},
    serves={},
    skipping=ServicePolicy(exact=True),
    serving=ServicePolicy(),
    name="held_back",
    shown_as=lambda exact: None if exact is None else {"elements": 7, "relative_norm": 0.25, "exact": exact},
    logged="not exact",
    inspected=lambda exact: f"held back 7 elements, relative distance 0.25; exact: version {exact}",
)


@pytest.fixture(params=[QUARANTINED, INEXACT], ids=["quarantined", "not exact"])
def mark(request: pytest.FixtureRequest) -> Mark:
    found: Mark = request.param
    return found


def chain_of(root: Path, mark: Mark) -> MarkedChain:
    """Versions 3, 4 and 6 are marked; 6 is the head."""
    chain = MarkedChain(root)
    chain.play("..!!.!".replace("!", mark.sign))
    return chain


@pytest.fixture
def chain(tmp_path: Path, mark: Mark) -> MarkedChain:
    return chain_of(tmp_path, mark)


@pytest.fixture
def quarantined(tmp_path: Path) -> MarkedChain:
    return chain_of(tmp_path, QUARANTINED)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is said to vLLM's log."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.delta_sync")
    return caplog


def committed(server: Server) -> list[int]:
    """Versions at which a commit of the receiver ended."""
    return [entry["version"] for entry in server.receiver.status()["recent"]]


def spoiled(bits: list[Bits]) -> list[Bits]:
    """Weights that are no version of any run."""
    return [values ^ values.dtype.type(1) for values in bits]


# Following


@pytest.mark.parametrize(("stage_bytes", "commits"), [(2**30, [5]), (0, [1, 2, 5])], ids=["", "little memory"])
def test_head_is_followed_to_the_newest_that_is_not_marked(
    chain: MarkedChain, mark: Mark, stage_bytes: int, commits: list[int]
) -> None:
    """Little memory does not end a commit at a marked version."""
    server = Server(chain, chain.bits[0], stage_bytes=stage_bytes, **mark.skips)
    server.reaches(5, len(commits))
    status = server.receiver.status()
    assert (status["state"], status["lag"], status["last_error"]) == ("idle", 0, None)
    assert status["served"][mark.name] == mark.shown_as(None)
    assert (status["head"]["version"], status["head"][mark.name]) == (6, mark.shown_as(5))
    server.reaches(5, commits=0)
    chain.play(f"{mark.sign}.")
    server.reaches(8, commits=1)
    assert committed(server) == [*commits, 8]


def test_all_are_served_and_shown_where_the_setting_says_so(chain: MarkedChain, mark: Mark) -> None:
    server = Server(chain, chain.bits[0], **mark.serves)
    server.receiver.advance(4)
    assert server.receiver.status()["served"][mark.name] == mark.shown_as(2)
    server.reaches(6, commits=1)
    status = server.receiver.status()
    assert (status["served"][mark.name], status["lag"]) == (mark.shown_as(5), 0)
    # A server that skips them never goes back to one that is not marked.
    server.follow(chain, **mark.skips)
    server.reaches(6, commits=0)
    status = server.receiver.status()
    assert (status["state"], status["lag"]) == ("idle", 0)
    chain.play(f"{mark.sign}.")
    server.reaches(8, commits=1)
    assert server.receiver.status()["served"][mark.name] == mark.shown_as(None)


def test_lag_counts_to_what_would_be_served(quarantined: MarkedChain) -> None:
    server = Server(quarantined, quarantined.bits[0])
    server.receiver.advance()
    server.receiver.hold()
    quarantined.play(".!!")
    server.receiver.observe()
    assert server.receiver.status()["lag"] == 2
    server = Server(quarantined, quarantined.bits[0], quarantined="serve", policy="manual")
    server.receiver.advance(5)
    assert server.receiver.status()["lag"] == 4


def test_skipped_versions_are_named_once(quarantined: MarkedChain, said: pytest.LogCaptureFixture) -> None:
    server = Server(quarantined, quarantined.bits[0])
    for played, line in (
        ("", f"quarantined and skipped: version 6: {REASON!r}"),
        ("", None),
        ("!!", f"quarantined and skipped: versions 7 to 8: {REASON!r}"),
        (".", None),
        ("!", f"quarantined and skipped: version 10: {REASON!r}"),
    ):
        quarantined.play(played)
        said.clear()
        server.receiver.advance()
        found = [record.getMessage() for record in said.records if "skipped" in record.getMessage()]
        assert found == ([] if line is None else [line])


def test_reasons_cannot_forge_lines_of_the_log() -> None:
    assert "\n" not in Quarantine(reasons=["a\nERROR b", "c"], sound=None).summary()
    assert len(Quarantine(reasons=["x" * 1000] * 64, sound=None).summary()) < 400


@pytest.mark.parametrize(
    ("marks", "both", "exact", "sound"),
    # Quarantined, not exact, and both: the newest that is neither, that is exact, and that is sound.
    [(".~!~", 1, 3, 4), ("~!~!", 0, 4, 3), (".?.~?", 3, 3, 4), ("?", 0, 0, 0), (".!~!~", 1, 4, 5)],
)
def test_quarantined_versions_beside_others_that_are_not_exact(
    marks: str, both: int, exact: int, sound: int, tmp_path: Path
) -> None:
    chain = MarkedChain(tmp_path)
    chain.play(marks)
    run = open_run(chain.url)
    head = run.head()
    assert newest_to_serve(run, head, ServicePolicy(exact=True)) == both
    assert newest_to_serve(run, head, ServicePolicy(quarantined=True, exact=True)) == exact
    assert newest_to_serve(run, head, ServicePolicy()) == sound
    for setting, version in (("skip", both), ("serve", exact)):
        server = Server(chain, chain.bits[0], require_exact=True, quarantined=setting)
        server.reaches(version, commits=1 if version else 0)


# Asking for one


def test_version_that_is_asked_for_is_served_and_left_for_the_next(chain: MarkedChain, mark: Mark) -> None:
    server = Server(chain, chain.bits[0], **mark.skips)
    server.receiver.advance(4)
    server.serves(4)
    assert committed(server) == [4]
    server.reaches(5, commits=1)
    server.receiver.advance(6)
    server.serves(6)
    server.reaches(6, commits=0)
    chain.play(mark.sign)
    server.reaches(6, commits=0)
    chain.play(".")
    server.reaches(8, commits=1)
    assert committed(server) == [4, 5, 6, 8]


@pytest.mark.parametrize("target", ["4", "tag:bad"])
def test_version_that_the_setting_names_is_served(chain: MarkedChain, mark: Mark, target: str) -> None:
    set_tag(open_run(chain.url), "bad", 4)
    server = Server(chain, chain.bits[0], target=target, stage_bytes=0, **mark.skips)
    server.reaches(4, commits=3)
    assert committed(server) == [1, 2, 4], "but no other that is marked"


# Nothing that is sound


def test_where_all_is_quarantined_nothing_is_served(tmp_path: Path) -> None:
    chain = MarkedChain(tmp_path, name="bad")
    chain.bad = True
    chain.inside(chain.fresh())
    chain.play("!!")
    server = Server(chain, chain.bits[0])
    server.reaches(0, commits=0)
    assert server.receiver.status()["lag"] == 0
    with pytest.raises(NotFoundError, match=r"every version of run .* is quarantined; publish a sound one"):
        newest_good_manifest(open_run(chain.url))
    other = MarkedChain(tmp_path, seed=5)
    foreign = Server(chain, spoiled(other.bits[0]))
    with pytest.raises(NotFoundError, match=r"every version of the run at .* is quarantined"):
        foreign.receiver.advance()
    assert foreign.receiver.target_unavailable
    foreign.holds(spoiled(other.bits[0]))
    chain.play(".")
    foreign.reaches(3, commits=1)


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


@pytest.mark.parametrize("require_exact", [False, True])
@pytest.mark.parametrize("seed", seeds(10, 40))
def test_no_commit_ends_at_a_marked_version(seed: int, require_exact: bool, tmp_path: Path) -> None:
    """Whatever is lost, and however little memory there is: random runs, anchors, merged deltas and losses."""
    chance = random.Random(seed)
    chain = MarkedChain(tmp_path, seed=seed)
    for _ in range(chance.randint(5, 20)):
        head = len(chain.manifests) - 1
        chain.mark(chance.choice("..~~?!" if require_exact else "...!!"))
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
    server = Server(chain, start, stage_bytes=chance.choice([0, 4000, 2**30]), require_exact=require_exact)
    for _ in range(3):
        try:
            server.receiver.advance(asked)
        except DeltaSyncError:
            continue
    wanted = {
        item.version
        for item in chain.manifests
        if item.quarantine is None and not (require_exact and item.held_back is not None)
    }
    assert set(committed(server)) <= wanted | {asked}
    if server.receiver.served_version is not None:
        server.serves(server.receiver.served_version)
    if asked is None and all((chain.folder / ref.key).exists() for item in chain.manifests for ref in item.objects):
        assert server.receiver.served_version == max(wanted)


def test_cold_start_loads_the_newest_that_is_not_marked(
    chain: MarkedChain, mark: Mark, said: pytest.LogCaptureFixture
) -> None:
    run = open_run(chain.url)
    assert newest_good_manifest(run, mark.skipping).version == 5
    assert (f"quarantined and skipped: version 6: {REASON!r}" in said.text) is (mark is QUARANTINED)
    assert newest_good_manifest(run, mark.serving).version == 6
    chain.lose(5)
    for policy, version in ((mark.skipping, 2), (mark.serving, 4)):
        held, _ = rebuild(run, newest_good_manifest(run, policy), "/nowhere", policy)
        assert held.version == version


def test_commands_show_the_mark(chain: MarkedChain, mark: Mark, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["log", "--bucket", chain.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [mark.logged in line for line in lines[1:]] == [False, False, False, True, True, False, True]
    for arguments, instead in ((["--version", "4"], 2), ([], 5), (["--version", "5"], None)):
        assert run_command(["inspect", "--bucket", chain.url, *arguments]) == 0
        shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        if instead is None:
            assert mark.name.replace("_", " ") not in "\n".join(shown)
        else:
            assert mark.inspected(instead) in shown
    assert run_command(["verify", "--bucket", chain.url]) == 0


# Trainers


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
