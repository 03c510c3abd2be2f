"""Key files, and the file of what was seen before."""

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.signers import ROOT, RUN, TRAINER, public, ring
from vllm_delta_sync.errors import ChainError, ConflictError, ForkError, SettingsError, SignatureError, StoreError
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import MAX_KEY_BYTES, generate, load_private, load_public
from vllm_delta_sync.trust.mark import Mark, MarkFile

# Key files


def test_generated_keys(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = generate(tmp_path / "trainer")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "trainer").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "trainer.pub").stat().st_mode) == 0o644
    assert load_public(tmp_path / "trainer.pub") == made == public(load_private(tmp_path / "trainer"))
    assert generate(tmp_path / "other") != made


@pytest.mark.parametrize("there", ["trainer", "trainer.pub"])
def test_keys_that_are_there_are_not_replaced(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConflictError, match="is there already"):
        generate(tmp_path / "trainer")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {there: "mine"}


def test_keys_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be written"):
        generate(tmp_path / "no" / "folder")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o601])
def test_private_key_that_others_can_reach(mode: int, tmp_path: Path) -> None:
    generate(tmp_path / "trainer")
    (tmp_path / "trainer").chmod(mode)
    with pytest.raises(SettingsError, match="chmod 600"):
        Keyring.load(None, tmp_path / "trainer")


def _pem(key: Any, password: bytes | None = None) -> bytes:
    how = NoEncryption() if password is None else BestAvailableEncryption(password)
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)
    return pem


def _curve_pem() -> bytes:
    return _pem(ec.generate_private_key(ec.SECP256R1()))


BAD_PRIVATE = {
    "nothing": (b"", "no private key"),
    "text": (b"not a key", "no private key"),
    "password": (_pem(TRAINER, b"secret"), "without a password"),
    "another kind": (_curve_pem(), "not an Ed25519 key"),
    "public": (TRAINER.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), "no private key"),
    "huge": (_pem(TRAINER) + b"\n" * MAX_KEY_BYTES, "longer than"),
}


@pytest.mark.parametrize("name", BAD_PRIVATE)
def test_bad_private_keys(name: str, tmp_path: Path) -> None:
    data, match = BAD_PRIVATE[name]
    file = tmp_path / "key"
    file.write_bytes(data)
    file.chmod(0o600)
    with pytest.raises(SettingsError, match=match) as caught:
        load_private(file)
    # Nothing of the file is shown: it may hold a key all the same.
    assert not any(line in str(caught.value) for line in data.decode().splitlines() if line)


BAD_PUBLIC = {
    "nothing": (b"", "no public key"),
    "text": (b"not a key", "no public key"),
    "private": (_pem(TRAINER), r"is a private key; give the public one \(key\.pub\)"),
    "another kind": (
        ec.generate_private_key(ec.SECP256R1())
        .public_key()
        .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "not an Ed25519 key",
    ),
    "huge": (b"\n" * (MAX_KEY_BYTES + 1), "longer than"),
}


@pytest.mark.parametrize("name", BAD_PUBLIC)
def test_bad_public_keys(name: str, tmp_path: Path) -> None:
    data, match = BAD_PUBLIC[name]
    (tmp_path / "key").write_bytes(data)
    with pytest.raises(SettingsError, match=match):
        Keyring.load([tmp_path / "key"])


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for files in ({"trusted_keys": str(tmp_path / "x")}, {"signing_key": tmp_path / "x"}, {"signing_key": tmp_path}):
        with pytest.raises(SettingsError, match="cannot be read"):
            Keyring.load(**files)  # type: ignore[arg-type]


def test_keyring_from_files(tmp_path: Path) -> None:
    first, second = generate(tmp_path / "a"), generate(tmp_path / "b")
    assert Keyring.load(f"{tmp_path / 'a.pub'} , {tmp_path / 'b.pub'},").trusted == {first, second}
    assert Keyring.load([tmp_path / "a.pub", str(tmp_path / "b.pub")]).trusted == {first, second}
    alone = Keyring.load(None, tmp_path / "a")
    assert (set(alone.trusted), alone.public, alone.signs, alone.checks) == ({first}, first, True, True)
    apart = Keyring.load(str(tmp_path / "b.pub"), str(tmp_path / "a"))
    assert (set(apart.trusted), apart.public) == ({second}, first)
    none = Keyring.load()
    assert (none.trusted, none.public, none.signs, none.checks) == (frozenset(), None, False, False)
    empties: list[str | list[str]] = ["", " , ", []]
    for empty in empties:
        with pytest.raises(SettingsError, match="names no file"):
            Keyring.load(empty)
    secret = [line for line in (tmp_path / "a").read_text().splitlines() if "KEY" not in line]
    assert secret
    assert not any(line in repr(alone) for line in secret)


def test_a_run_begins_with_a_trusted_key() -> None:
    ring(ROOT, ROOT).check_begins()
    ring(None, ROOT).check_begins()
    Keyring().check_begins()
    with pytest.raises(SignatureError, match="cannot begin"):
        ring(TRAINER, ROOT).check_begins()


# What was seen before


def mark(keys: int, version: int, **fields: str) -> Mark:
    return replace(Mark(RUN, keys, version, f"{version:064d}", public(TRAINER)), **fields)  # type: ignore[arg-type]


def test_mark_is_kept_across_restarts(tmp_path: Path) -> None:
    file = MarkFile(tmp_path / "state" / "deep", "file:///run")
    assert file.load() is None
    file.raise_to(mark(0, 3))
    assert MarkFile(tmp_path / "state" / "deep", "file:///run").load() == mark(0, 3)
    assert MarkFile(tmp_path / "state" / "deep", "file:///other").load() is None
    assert stat.S_IMODE((tmp_path / "state" / "deep").stat().st_mode) == 0o700


def test_mark_only_rises(tmp_path: Path) -> None:
    file = MarkFile(tmp_path, "x")
    file.raise_to(mark(2, 5))
    file.raise_to(mark(1, 4))
    assert file.load() == mark(2, 5)
    file.raise_to(mark(3, 4))
    assert file.load() == mark(3, 5)
    file.raise_to(mark(1, 6))
    assert file.load() == mark(3, 6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_marks_of_several_servers(tmp_path_factory: pytest.TempPathFactory, seen: list[tuple[int, int]]) -> None:
    file = MarkFile(tmp_path_factory.mktemp("marks"), "x")
    threads = [threading.Thread(target=file.raise_to, args=(mark(keys, version),)) for keys, version in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    version = max(version for _, version in seen)
    assert file.load() == mark(max(keys for keys, _ in seen), version)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"{}", b'{"run":"x"}', b'{"run":1,"keys":0,"version":0,"manifest":"","key":""}',
     b'{"run":"x","keys":true,"version":0,"manifest":"","key":""}', b"\xff\xfe"],
)  # fmt: skip
def test_damaged_mark_is_not_taken_for_none(data: bytes, tmp_path: Path) -> None:
    file = MarkFile(tmp_path, "x")
    file.raise_to(mark(0, 3))
    file.path.write_bytes(data)
    for call in (file.load, lambda: file.raise_to(mark(0, 4))):
        with pytest.raises(SettingsError, match="does not say what was seen"):
            call()
    assert file.path.read_bytes() == data


def test_mark_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StoreError, match="state_dir"):
        MarkFile(tmp_path / "state", "x").raise_to(mark(0, 3))
    with pytest.raises(SettingsError, match="set state_dir"):
        MarkFile(tmp_path / "state", "x").prepare()


def test_mark_of_another_history_or_run_is_not_written_over(tmp_path: Path) -> None:
    file = MarkFile(tmp_path, "x")
    file.prepare()
    assert file.load() is None
    file.raise_to(mark(1, 5))
    with pytest.raises(ForkError, match="history was forked"):
        file.raise_to(mark(2, 5, manifest="f" * 64))
    with pytest.raises(ChainError, match="was seen here"):
        file.raise_to(mark(2, 9, run="cd" * 16))
    assert file.load() == mark(1, 5)


def test_mark_is_lowered_only_from_what_was_believed(tmp_path: Path) -> None:
    file = MarkFile(tmp_path, "x")
    file.raise_to(mark(1, 9))
    file.lower_to(mark(1, 8), mark(2, 3))
    assert file.load() == mark(1, 9)
    file.lower_to(mark(1, 9), mark(2, 3))
    assert file.load() == mark(2, 3)
