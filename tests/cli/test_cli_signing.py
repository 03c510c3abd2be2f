"""``delta-sync keygen``, and the keys that other commands take."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import answer, delta_sync, kind, refusal, shown
from tests.support.signed_runs import Signed
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.notice import curve
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import generate, load_public


class KeyedRun:
    """A signed run in a directory, and keys in files beside it: root, which servers trust, and others."""

    def __init__(self, folder: Path, first: str = "root") -> None:
        self.folder = folder
        self.url = str(folder / "run")
        self.public = {name: generate(self.path(name)) for name in ("root", "next", "stranger")}
        self.run = Signed(self.keyring(first), open_bucket(self.url))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def pub(self, name: str) -> str:
        return f"{self.path(name)}.pub"

    def keyring(self, name: str, *trusted: str) -> Keyring:
        return Keyring.load([self.pub(known) for known in trusted] or None, self.path(name))

    def verify(self, code: int = 0) -> Any:
        return answer("verify", "--bucket", self.url, "--all", "--trusted-keys", self.pub("root"), code=code)


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


@pytest.mark.parametrize("flags", [[], ["--notice"]])
def test_keygen_that_is_interrupted_leaves_nothing(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def interrupted(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupted)
        assert delta_sync("keygen", tmp_path / "a.key", *flags).code == 130
    assert len(synced) == 2
    assert [*tmp_path.iterdir()] == []
    assert delta_sync("keygen", tmp_path / "a.key", *flags).code == 0


@pytest.mark.parametrize("command", ["tag set best", "compact", "branch --to {folder}/branch"])
def test_what_writes_into_a_signed_run_asks_for_a_key(command: str, tmp_path: Path) -> None:
    world = KeyedRun(tmp_path)
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
    world = KeyedRun(tmp_path)
    world.run.deltas(*["plain"] * 4)
    world.run.tag("best", 2)
    for arguments in (("compact", "--dry-run"), ("gc", "--keep-last", "1"), ("tag", "rm", "best")):
        answer(*arguments, "--bucket", world.url)


def test_log_and_inspect_say_who_signed(tmp_path: Path) -> None:
    world = KeyedRun(tmp_path)
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
