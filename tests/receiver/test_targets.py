"""What to serve: the head, a version, a tag, by the settings or while a server runs."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.chains import Chain, Server
from tests.support.hooks import HookedPort, failing
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import BusyError, ChainError, DeltaSyncError, EngineError, NotFoundError, SettingsError
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.settings import load_settings


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    chain.grow(8)
    return chain


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("target", ["latest", "-1", "tag:", "tag:a/b", "5.0", "tag:" + "x" * 101, ""]),
        ("receiver_id", ["", "a b", "../x", "x" * 101]),
    ],
)
def test_settings_that_make_no_sense(setting: str, values: list[str], tmp_path: Path) -> None:
    for value in values:
        with pytest.raises(SettingsError, match=f"'{setting}'"):
            load_settings({"bucket": "/x", setting: value}, {})
    assert load_settings({"bucket": "/x"}, {}).target == "head"
    file = tmp_path / "settings.toml"
    file.write_text('bucket = "/x"\ntarget = 5\n')
    assert load_settings(environment={"DELTA_SYNC_CONFIG": str(file)}).target == "5"


def test_fixed_version_is_served_and_not_left(chain: Chain) -> None:
    server = Server(chain, chain.bits[0], target="4")
    server.reaches(4, commits=1)
    chain.grow(2)
    server.reaches(4, commits=0)
    status = server.receiver.status()
    assert (status["state"], status["target"], status["lag"], status["last_error"]) == ("idle", "4", 6, None)
    # A bad head does not concern it, and asking for a version goes before the setting.
    chain.spoil_manifest(10)
    server.reaches(4, commits=0)
    server.receiver.advance(5)
    server.serves(5)
    with pytest.raises(ChainError):
        server.receiver.advance()
    assert server.receiver.status()["state"] == "held"
    server.serves(5)


def test_tag_is_followed_as_it_moves_forward(chain: Chain) -> None:
    server = Server(chain, chain.bits[0], target="tag:best")
    with pytest.raises(NotFoundError, match="has no tag 'best'"):
        server.receiver.advance()
    server.serves(0)
    run = open_run(chain.url)
    for version in (2, 5):
        set_tag(run, "best", version)
        server.reaches(version, commits=1)
    server.reaches(5, commits=0)
    set_tag(run, "best", 3)
    with pytest.raises(ChainError, match="rollback"):
        server.receiver.advance()
    status = server.receiver.status()
    assert (status["state"], status["served"]["version"], status["holding"]) == ("held", 5, False)
    assert status["last_error"]["kind"] == "chain"
    # Another target, or another version served, ends that at once, not at the next poll.
    server.receiver.target("5")
    assert server.receiver.status()["ready"] == {"ready": True, "reasons": []}
    server.receiver.target("tag:best")
    assert (server.receiver.status()["state"], server.receiver.served_version) == ("idle", 3)
    set_tag(run, "best", 2)
    with pytest.raises(ChainError, match="rollback"):
        server.receiver.advance()
    server.receiver.rollback(1)
    server.receiver.release()
    assert (server.receiver.status()["state"], server.receiver.served_version) == ("idle", 1)
    server.reaches(2, commits=1)
    set_tag(run, "best", 3)
    server.receiver.rollback(2)
    with pytest.raises(BusyError):
        server.receiver.advance()
    server.receiver.release()
    server.reaches(3, commits=1)
    assert server.receiver.status()["state"] == "idle"


def test_tag_of_another_manifest_is_refused(chain: Chain) -> None:
    tag = set_tag(open_run(chain.url), "best", 3)
    chain.bucket.put("tags/best.json", tag.model_copy(update={"manifest": "0" * 64}).to_bytes())
    server = Server(chain, chain.bits[0], target="tag:best")
    with pytest.raises(ChainError, match="names manifest"):
        server.receiver.advance()
    server.serves(0)


def replace_run(chain: Chain) -> None:
    shutil.rmtree(chain.folder)
    Chain(chain.root, seed=1)


def rewrite(chain: Chain) -> None:
    manifest = chain.manifests[8].model_copy(update={"step": 9})
    manifest._raw = None
    (chain.folder / keys.version_key(8)).write_bytes(manifest.to_bytes())


@pytest.mark.parametrize(
    ("spoil", "confirmed", "why"),
    [
        (lambda chain: None, True, None),
        (lambda chain: chain.spoil_manifest(8), False, "0000000008.json"),
        (lambda chain: (chain.folder / keys.version_key(8)).unlink(), False, "0000000008.json"),
        (rewrite, False, "was served"),
        (replace_run, False, "another run"),
        (lambda chain: shutil.rmtree(chain.folder), None, "run.json"),
    ],
    ids=["as it was", "damaged", "gone", "rewritten", "another run", "no bucket"],
)
def test_verify_looks_into_the_bucket_and_keeps_what_is_served(
    chain: Chain, spoil: Callable[[Chain], None], confirmed: bool | None, why: str | None
) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    spoil(chain)
    outcome = server.receiver.verify()
    assert (outcome["verdict"], outcome["chain"]) == (True, confirmed)
    assert outcome["reason"] is None if why is None else why in outcome["reason"]
    status = server.receiver.status()
    assert (status["served"]["version"], status["state"]) == (8, "idle")


# Changed while a server runs: forward, back, to a tag


@pytest.mark.parametrize("ranks", [1, 2])
def test_target_goes_forward_and_back_and_follows_on(chain: Chain, ranks: int) -> None:
    server = Server(chain, chain.bits[0], ranks)
    server.receiver.advance()
    set_tag(open_run(chain.url), "best", 3)
    for named, version in (("5", 5), ("tag:best", 3), ("head", 8), ("2", 2)):
        pauses = server.commits
        server.receiver.target(named)
        assert server.commits == pauses + 1
        server.serves(version)
        status = server.receiver.status()
        assert (status["target"], status["state"], status["holding"]) == (named, "idle", False)
        server.reaches(version, commits=0)
    server.receiver.target("tag:best")
    set_tag(open_run(chain.url), "best", 6)
    server.reaches(6, commits=1)
    server.receiver.target("head")
    chain.grow(1)
    server.reaches(9, commits=1)


@pytest.mark.parametrize(
    ("named", "error"), [("9", NotFoundError), ("tag:none", NotFoundError), ("4", DeltaSyncError)], ids=str
)
def test_target_that_cannot_be_served_changes_nothing(chain: Chain, named: str, error: type[DeltaSyncError]) -> None:
    server = Server(chain, chain.bits[0], target="6")
    server.receiver.advance()
    server.receiver.hold()
    # Neither back nor anew.
    chain.lose(4, 5)
    chain.remove(chain.manifests[0])
    with pytest.raises(error):
        server.receiver.target(named)
    status = server.receiver.status()
    assert (status["target"], status["state"], status["served"]["version"]) == ("6", "held", 6)
    server.serves(6)


def test_version_that_was_let_go_of_is_refused_by_name(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    chain.beside_it(7)
    collect(open_run(chain.url), RetentionPolicy(keep_last=1, min_age=0), now=time.time() + 1e6)
    with pytest.raises(NotFoundError, match="version 3 is no longer retained"):
        server.receiver.rollback(3)
    server.serves(8)


@pytest.mark.parametrize("what", ["raw", "anchor", "break"])
def test_back_across_what_cannot_be_taken_back(tmp_path: Path, what: str) -> None:
    chain = Chain(tmp_path)
    chain.grow(3)
    if what == "raw":
        chain.grow(1, codec="raw")
    elif what == "anchor":
        chain.inside(chain.bits[-1])
    else:
        chain.grow(1, base=1)
    chain.grow(2)
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    for version in (4, 2, 3, 0):
        if version > (server.receiver.served_version or 0):
            server.receiver.release()
            server.receiver.advance(version)
        else:
            pauses = server.commits
            server.receiver.rollback(version)
            assert server.commits == pauses + 1
        server.serves(version)


@pytest.mark.parametrize("why", ["damaged", "little memory"])
def test_back_is_rebuilt_where_steps_cannot_be_taken(chain: Chain, why: str) -> None:
    server = Server(chain, chain.bits[0], stage_bytes=0 if why == "little memory" else 2**30)
    server.receiver.advance()
    if why == "damaged":
        chain.damage(chain.manifests[6])
    pauses = server.commits
    server.receiver.rollback(4)
    assert server.commits == pauses + 1
    server.serves(4)


@pytest.mark.parametrize("named", ["head", "6"])
def test_the_target_in_force_that_fails_is_no_success(chain: Chain, named: str) -> None:
    server = Server(chain, chain.bits[0], port=HookedPort, target=named)
    port = server.port
    server.receiver.advance(4)
    server.receiver.hold()
    port.before = failing("start")
    with pytest.raises(EngineError):
        server.receiver.target(named)
    status = server.receiver.status()
    assert (status["target"], status["served"]["version"], status["state"]) == (named, 4, "held")
    head = chain.folder / "HEAD.json"
    head.rename(chain.folder / "away")
    (chain.folder / "versions").rename(chain.folder / "gone")
    with pytest.raises(DeltaSyncError):
        server.receiver.target(named)
    (chain.folder / "away").rename(head)
    (chain.folder / "gone").rename(chain.folder / "versions")
    server.receiver.target(named)
    server.serves(8 if named == "head" else 6)


def test_head_that_fails_while_nothing_is_served_does_not_become_the_target(chain: Chain) -> None:
    server = Server(chain, [np.roll(bits, 1) for bits in chain.bits[0]], target="3")
    hidden = {ref.key: (chain.folder / ref.key).read_bytes() for ref in chain.manifests[0].objects}
    for key in hidden:
        (chain.folder / key).unlink()
    with pytest.raises(DeltaSyncError):
        server.receiver.target("head")
    for key, data in hidden.items():
        (chain.folder / key).write_bytes(data)
    server.receiver.advance()
    server.serves(3)
    assert server.receiver.status()["target"] == "3"


@pytest.mark.parametrize("policy", ["follow", "manual"])
def test_a_backup_that_was_restored_shows_once_the_head_has_the_served_number(tmp_path: Path, policy: str) -> None:
    """Other weights under the number that is served, and nothing after them."""
    chain = Chain(tmp_path)
    chain.grow(3)
    shutil.copytree(chain.folder, tmp_path / "backup")
    manifests, bits = list(chain.manifests), list(chain.bits)
    chain.grow(2)
    server = Server(chain, chain.bits[0], policy=policy)
    receiver = server.receiver
    receiver.advance()
    shutil.rmtree(chain.folder)
    shutil.copytree(tmp_path / "backup", chain.folder)
    chain.manifests[:], chain.bits[:] = manifests, bits
    look = receiver.advance if policy == "follow" else receiver.observe
    look()
    chain.grow(2)
    with pytest.raises(ChainError, match="history was rewritten"):
        look()
    error = receiver.status()["last_error"]
    assert error is not None
    assert error["kind"] == "chain"
    again = Server(chain, chain.bits[0], policy=policy)
    again.receiver.advance()
    again.serves(5)
