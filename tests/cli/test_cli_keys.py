"""``delta-sync keygen`` and ``keys``, and the keys that other commands take."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import answer, delta_sync, kind, refusal, shown
from tests.support.damage import TABLE
from tests.support.samples import RunWriter
from tests.support.signed_runs import Signed
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import ConflictError, SettingsError, SignatureError, UsageError
from vllm_delta_sync.format import manifest as names
from vllm_delta_sync.format.documents import KEYS_KEY, KeyEntry, KeyFile
from vllm_delta_sync.maintenance.keys import change_key, change_keys
from vllm_delta_sync.notice import curve
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import generate, load_public


class KeyedRun:
    """A run in a directory, and keys in files beside it: root (which servers trust), trainer, next."""

    def __init__(self, folder: Path, first: str = "trainer") -> None:
        self.folder = folder
        self.url = str(folder / "run")
        self.public = {name: generate(self.path(name)) for name in ("root", "trainer", "next", "stranger")}
        self.run = Signed(self.keyring(first), open_bucket(self.url))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def pub(self, name: str) -> str:
        return f"{self.path(name)}.pub"

    def keyring(self, name: str, *trusted: str) -> Keyring:
        return Keyring.load([self.pub(known) for known in trusted] or None, self.path(name))

    def keys(self, *arguments: str) -> Any:
        return answer("keys", *arguments, "--bucket", self.url, "--signing-key", str(self.path("root")))

    def refused(self, *arguments: str, code: int) -> Any:
        return refusal("keys", *arguments, "--bucket", self.url, "--signing-key", str(self.path("root")), code=code)

    def verify(self, code: int = 0) -> Any:
        return answer("verify", "--bucket", self.url, "--all", "--trusted-keys", self.pub("root"), code=code)

    def change(self, signing: str = "root", trusted: tuple[str, ...] = (), **change: Any) -> Any:
        return change_keys(open_bucket(self.url), self.keyring(signing, *trusted), **change)


@pytest.fixture
def world(tmp_path: Path) -> KeyedRun:
    return KeyedRun(tmp_path)


def test_keygen(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    assert shown("keygen", path) == load_public(Path(f"{path}.pub")) + "\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "PRIVATE" in path.read_text()
    kept = path.read_bytes()
    assert kind(5, "keygen", path) == "conflict"
    assert path.read_bytes() == kept
    assert delta_sync("keygen", tmp_path / "no" / "a.key").code == 4
    document = answer("keygen", tmp_path / "b.key")
    assert document["key"] == load_public(tmp_path / "b.key.pub")
    assert Path(document["public"]).is_file()
    notice = tmp_path / "notice.key"
    document = answer("keygen", notice, "--notice")
    assert document["key"] == curve.load_secret(notice).public.decode()
    assert curve.load_public(tmp_path / "notice.key.pub").decode() == document["key"]
    assert stat.S_IMODE(notice.stat().st_mode) == 0o600
    assert kind(5, "keygen", notice, "--notice") == "conflict"


def test_the_life_of_keys(world: KeyedRun) -> None:
    """Listed, rotated, stolen, revoked: what verify says at each turn, and what mends it."""
    run = world.run
    run.deltas(*["plain"] * 3)
    # The servers trust the root alone, and nobody has listed the trainer yet.
    verify = ("verify", "--bucket", world.url, "--all", "--trusted-keys", world.pub("root"))
    assert kind(1, *verify) == "signature"
    added = world.keys("add", world.pub("trainer"))
    assert (added["sequence"], [row["key"] for row in added["keys"]]) == (1, [world.public["trainer"]])
    run.merged_deltas()
    assert world.verify()["signatures_checked"] is True

    # Rotated: the new key publishes on, and what the old one signed holds.
    world.keys("add", world.pub("next"))
    rotated = world.keys("retire", world.pub("trainer"))
    assert (rotated["sequence"], rotated["versions"], rotated["documents"]) == (3, [], [])
    run.writer.keyring = world.keyring("next")
    run.deltas(*["plain"] * 3)
    run.merged_deltas()
    verified = world.verify()
    assert (verified["head"], verified["merged_deltas"]) == (6, 1)
    listed = answer("keys", "list", "--bucket", world.url, "--trusted-keys", world.pub("root"))
    states = {row["key"]: (row["trusted"], row["state"]) for row in listed["keys"]}
    assert states == {
        world.public["root"]: (True, "in use"),
        world.public["trainer"]: (False, "retired"),
        world.public["next"]: (False, "in use"),
    }
    assert "up to version 3" in shown("keys", "list", "--bucket", world.url, "--trusted-keys", world.pub("root"))

    # Stolen after version 6: the thief publishes 7 and 8.
    run.deltas("plain", "plain")
    run.merged_deltas()
    revoked = world.keys("revoke", world.pub("next"), "--version", "head~2")
    assert (revoked["sequence"], revoked["versions"], revoked["head"]) == (4, [7, 8], 6)
    world.keys("add", world.pub("stranger"))
    assert revoked["documents"] == ["merged/0000000000-0000000004.json", "merged/0000000004-0000000008.json"]
    notes = "\n".join(revoked["notes"])
    for word in ("REVOKED", "versions no longer valid: 7, 8", "delta-sync compact --signing-key", "another"):
        assert word in notes
    found = world.verify(code=1)
    problems = {row["key"] for row in found["findings"]}
    assert {names.version_key(7), names.version_key(8), *revoked["documents"]} <= problems
    assert found["head"] == 6

    # A publisher with another key goes past; compact makes again what it can, repair removes what is of no use.
    run.writer.keyring = world.keyring("stranger")
    run.delta(base=6)
    keys = ("--bucket", world.url, "--signing-key", str(world.path("stranger")), "--trusted-keys", world.pub("root"))
    # The range over the thief's versions is refused.
    assert answer("compact", *keys, code=1)["merged_deltas"] == [{"first": 0, "last": 4}]
    assert answer("repair", *keys)["verdict"] is True
    after = world.verify()
    assert (after["verdict"], after["head"], after["refused"], after["merged_deltas"]) == (True, 9, [7, 8], 1)
    assert answer("log", "--bucket", world.url, code=0)["versions"][9]["signed_by"] == world.public["stranger"]


def test_the_head_is_signed_again_when_its_key_is_revoked(world: KeyedRun) -> None:
    run = world.run
    run.deltas("plain", "plain")
    world.change(add=[world.public["trainer"]])
    change = world.change(revoke=[world.public["trainer"]])
    assert (change.head, change.versions) == (2, [])
    opened = open_run(world.url, Keyring.load(world.pub("root")))
    assert opened.head().version == 2
    assert opened.pointer is not None
    assert opened.pointer.expires_at is not None
    assert opened.verify().findings == []


def test_changes_that_make_no_sense_are_refused(world: KeyedRun) -> None:
    world.run.deltas("plain", "plain")
    trainer, root, other = (world.public[name] for name in ("trainer", "root", "next"))
    world.change(add=[trainer])
    before = open_bucket(world.url).get(KEYS_KEY)
    for expected, change in (
        (UsageError, {}),
        (UsageError, {"add": [other, other]}),
        (UsageError, {"add": [other], "revoke": [other]}),
        (UsageError, {"revoke": [root]}),
        (UsageError, {"retire": [trainer], "version": "none"}),
        (SignatureError, {"signing": "stranger", "add": [other]}),
        (SignatureError, {"signing": "trainer", "add": [other]}),
        (SettingsError, {"signing": "trainer", "trusted": ("root",), "add": [other]}),
    ):
        with pytest.raises(expected):
            world.change(**change)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="--signing-key"):
        change_keys(open_bucket(world.url), Keyring.load(world.pub("root")), add=[other])
    assert world.refused("revoke", world.pub("trainer"), "--version", "9", code=3)["kind"] == "not_found"
    assert open_bucket(world.url).get(KEYS_KEY) == before
    world.change(revoke=[trainer], version=1)
    with pytest.raises(UsageError, match="is revoked"):
        world.change(add=[trainer])
    # A later version would believe more again.
    assert world.change(revoke=[trainer], version=0).file.entry(trainer).last.version == 0
    with pytest.raises(SignatureError, match="revoked after version 0"):
        world.change(revoke=[trainer], version=1)
    world.change(add=[other])
    world.run.writer.keyring = world.keyring("next")
    world.run.delta(base=0)
    assert world.change(retire=[trainer]).file.entry(trainer) == KeyEntry(
        key=trainer, last=world.run.last_word(0), revoked=True
    )


def test_a_run_that_is_not_signed_has_no_list(tmp_path: Path) -> None:
    world = KeyedRun(tmp_path)
    url = str(tmp_path / "plain")
    RunWriter(open_bucket(url), TABLE)
    signing = ("--signing-key", str(world.path("root")))
    refused = refusal("keys", "add", world.pub("next"), "--bucket", url, *signing, code=2)
    assert "is not signed" in refused["message"]
    assert "the run is not signed" in answer("keys", "list", "--bucket", url)["notes"]


class Racing:
    """Between another operator's look at the list and the change, somebody else changes it."""

    def __init__(self, world: KeyedRun) -> None:
        self.bucket = open_bucket(world.url)
        self.world = world
        self.url = self.bucket.url
        self.raced = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bucket, name)

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        if key.startswith("keys/") and not self.raced:
            self.raced = True
            self.world.change(add=[self.world.public["next"]])
        self.bucket.put(key, data, if_absent=if_absent)


def test_of_two_changes_at_once_one_is_told(world: KeyedRun) -> None:
    world.change(add=[world.public["trainer"]])
    with pytest.raises(ConflictError, match="came first"):
        change_keys(Racing(world), world.keyring("root"), add=[world.public["stranger"]])  # type: ignore[arg-type]
    file = KeyFile.from_bytes(open_bucket(world.url).get(KEYS_KEY))
    assert file.sequence == 2
    assert {entry.key for entry in file.keys} == {world.public["trainer"], world.public["next"]}
    assert world.change(add=[world.public["stranger"]]).file.sequence == 3


def test_a_change_that_was_cut_off_is_gone_on_with(world: KeyedRun) -> None:
    """It had been put, and keys.json not yet: the next change builds on it."""
    world.change(add=[world.public["trainer"]])
    bucket = open_bucket(world.url)
    older = bucket.get(KEYS_KEY)
    world.change(add=[world.public["next"]])
    bucket.put(KEYS_KEY, older)
    file = world.change(add=[world.public["stranger"]]).file
    assert (file.sequence, len(file.keys)) == (3, 3)
    # What a stranger puts in the way of a change does not stop it.
    bucket.put(change_key(4), b"{}")
    assert world.change(retire=[world.public["trainer"]]).file.sequence == 4
    assert KeyFile.from_bytes(bucket.get(KEYS_KEY)).sequence == 4


@pytest.mark.parametrize("command", ["tag set best", "compact", "branch --to {folder}/branch"])
def test_what_writes_into_a_signed_run_asks_for_a_key(command: str, tmp_path: Path) -> None:
    world = KeyedRun(tmp_path, first="root")
    world.run.deltas(*["plain"] * 4)
    before = set(tmp_path.rglob("*.json"))
    arguments = [*command.format(folder=tmp_path).split(), "--bucket", world.url]
    refused = refusal(*arguments, code=2)
    assert refused["kind"] == "settings"
    assert "--signing-key" in refused["message"]
    stranger = {"DELTA_SYNC_SIGNING_KEY": str(world.path("stranger"))}
    assert kind(1, *arguments, **stranger) == "signature"
    assert kind(2, *arguments, **stranger, DELTA_SYNC_TRUSTED_KEYS=world.pub("root")) == "settings"
    assert set(tmp_path.rglob("*.json")) == before
    answer(*arguments, DELTA_SYNC_SIGNING_KEY=str(world.path("root")))
    written = set(tmp_path.rglob("*.json")) - before
    assert written
    for file in written:
        assert b'"signature":{' in file.read_bytes() or file.name == "tensors.json"
    assert world.verify()["verdict"] is True


def test_what_only_reads_or_removes_needs_no_key(tmp_path: Path) -> None:
    world = KeyedRun(tmp_path, first="root")
    world.run.deltas(*["plain"] * 4)
    world.run.tag("best", 2)
    for arguments in (("compact", "--dry-run"), ("gc", "--keep-last", "1"), ("tag", "rm", "best")):
        answer(*arguments, "--bucket", world.url)


READERS = (
    *("log --bucket {url}", "inspect --bucket {url}", "inspect --bucket {url} --version 1", "verify --bucket {url}"),
    *(
        "gc --bucket {url} --yes",
        "tag list --bucket {url}",
        "compact --bucket {url} --dry-run",
        "repair --bucket {url}",
    ),
    "keys list --bucket {url}",
)


def test_every_reader_refuses_what_is_not_trusted(tmp_path: Path) -> None:
    world = KeyedRun(tmp_path, first="root")
    world.run.deltas("plain")
    for command in READERS:
        arguments = command.format(url=world.url).split()
        answer(*arguments, "--trusted-keys", world.pub("root"))
        refused = refusal(*arguments, "--trusted-keys", world.pub("stranger"), code=1)
        assert refused["kind"] == "signature"
        assert refusal(*arguments, code=1, DELTA_SYNC_TRUSTED_KEYS=world.pub("stranger")) == refused
        assert kind(2, *arguments, "--trusted-keys", tmp_path / "nowhere") == "settings"


def test_log_and_inspect_say_who_signed(tmp_path: Path) -> None:
    world = KeyedRun(tmp_path, first="root")
    world.run.deltas("plain")
    short = world.public["root"][:16]
    text = shown("log", "--bucket", world.url)
    assert text.splitlines()[0].endswith("signed by")
    assert text.splitlines()[2].endswith(short)
    assert "signatures were not checked" in text
    assert "not checked" not in shown("log", "--bucket", world.url, "--trusted-keys", world.pub("root"))
    assert f"by key {short}, not checked" in shown("inspect", "--bucket", world.url)
    for version in ([], ["--version", "1"]):
        text = shown("inspect", "--bucket", world.url, *version, "--trusted-keys", world.pub("root"))
        assert f"by key {short}, valid" in text
    row = answer("log", "--bucket", world.url, "--trusted-keys", world.pub("root"))["versions"][1]
    assert (row["signed_by"], row["signature_holds"]) == (world.public["root"], True)


def test_a_key_that_others_can_read_is_refused(world: KeyedRun) -> None:
    os.chmod(world.path("root"), 0o644)
    assert "chmod 600" in world.refused("add", world.pub("next"), code=2)["message"]
    os.chmod(world.path("root"), 0o600)
    # A private key is no public one, and a revoked key's file may be lost.
    assert world.refused("add", str(world.path("next")), code=2)["kind"] == "settings"
    world.keys("add", world.pub("trainer"))
    gone = world.keys("revoke", world.public["trainer"], "--version", "none")
    assert (gone["versions"], gone["head"]) == ([0], None)
    assert any("no version of the run has a valid signature any more" in note for note in gone["notes"])
