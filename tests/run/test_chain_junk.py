"""Documents that strangers put into a bucket: what one look at the head costs, and that it is found all the same."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.chains import Chain
from tests.support.trusted import keyring_at
from vllm_delta_sync.chain import Run, open_run
from vllm_delta_sync.chain.glance import GLANCE_BYTES, check_glance
from vllm_delta_sync.chain.newest import BAD_DOCUMENTS, BAD_IN_A_ROW, newest_before
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    FormatError,
    LimitError,
    NotFoundError,
    SignatureError,
    StoreError,
)
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.upkeep.compaction_anchor import make_anchor
from vllm_delta_sync.upkeep.compaction_fold import make_fold
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.canonical import dump_canonical, load_canonical
from vllm_delta_sync.wire.manifest import Manifest, Signature

HEAD = 3


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return keyring_at(tmp_path / "trainer.key")


@pytest.fixture
def chain(tmp_path: Path, ring: Keyring) -> Chain:
    chain = Chain(tmp_path, keyring=ring)
    chain.grow(HEAD)
    return chain


def junk(chain: Chain, version: int, size: int, key: str) -> bytes:
    """A canonical manifest of about so many bytes, with a signature that is none."""
    fields = chain.manifests[HEAD].model_dump(mode="json")
    signature = {"key": key, "value": "0" * 128}
    fields |= {"version": version, "base_version": version - 1, "signature": signature}
    return dump_canonical({**fields, "zzz": "@@"}).replace(b'"@@"', b"[" + b"0," * (size // 2) + b"0]")


def put(chain: Chain, version: int, data: bytes) -> None:
    (chain.folder / keys.version_key(version)).write_bytes(data)


@contextmanager
def reading(run: Run) -> Iterator[list[int]]:
    """Sizes of what is read from the bucket."""
    sizes: list[int] = []
    good: Callable[..., bytes] = run.bucket.get

    def get(key: str, *, max_bytes: int | None = None) -> bytes:
        sizes.append(0)
        data = good(key, max_bytes=max_bytes)
        sizes[-1] = len(data)
        return data

    with mock.patch.object(run.bucket, "get", get):
        yield sizes


@contextmanager
def parsing() -> Iterator[list[int]]:
    """Sizes of the documents that are parsed."""
    sizes: list[int] = []

    def load(data: bytes, *arguments: Any) -> Any:
        sizes.append(len(data))
        return load_canonical(data, *arguments)

    with mock.patch("vllm_delta_sync.wire.manifest.load_canonical", load):
        yield sizes


@pytest.mark.parametrize("whose", ["trainer", "stranger", "nobody"])
def test_large_junk_behind_the_head_is_not_parsed(whose: str, chain: Chain, ring: Keyring, tmp_path: Path) -> None:
    key = {"trainer": ring.public, "stranger": keyring_at(tmp_path / "stranger.key").public, "nobody": "x"}[whose]
    run = open_run(chain.url, ring)
    for version in range(HEAD + 1, HEAD + 40):
        put(chain, version, junk(chain, version, run.document_limit // 2 - 2000, key or ""))
    with reading(run) as read, parsing() as parsed:
        manifest, error = run.reachable_head()
    assert manifest.version == HEAD
    assert isinstance(error, SignatureError)
    assert 0 < max(parsed) < GLANCE_BYTES
    assert sum(read) < (BAD_DOCUMENTS + 1) * run.document_limit


def test_junk_without_keys_is_read_up_to_a_size(chain: Chain) -> None:
    run = open_run(chain.url)
    for version in range(HEAD + 1, HEAD + 20):
        put(chain, version, b"[" + b" " * (run.document_limit - 10) + b"]")
    with reading(run) as read:
        manifest, error = run.reachable_head()
    assert (manifest.version, type(error)) == (HEAD, FormatError)
    assert BAD_DOCUMENTS * run.document_limit < sum(read) < (BAD_DOCUMENTS + 1) * run.document_limit + GLANCE_BYTES


def test_more_than_the_limit_is_not_read(chain: Chain, ring: Keyring) -> None:
    run = open_run(chain.url, ring)
    put(chain, HEAD + 1, b" " * (run.document_limit + 1))
    with reading(run) as read:
        manifest, error = run.reachable_head()
    assert (manifest.version, type(error)) == (HEAD, LimitError)
    assert sum(read) < GLANCE_BYTES
    for key, get in ((side.anchor_key(2), lambda: run.anchor(2)), (side.fold_key(0, 2), lambda: run.folded(0, 2))):
        (chain.folder / key).parent.mkdir()
        (chain.folder / key).write_bytes(b" " * (run.document_limit + 1))
        with pytest.raises(LimitError):
            get()


def test_large_junk_beside_the_chain_is_not_parsed(chain: Chain, ring: Keyring) -> None:
    run = open_run(chain.url, ring)
    for key in (side.anchor_key(2), side.fold_key(0, 2)):
        (chain.folder / key).parent.mkdir()
        (chain.folder / key).write_bytes(junk(chain, 2, 20_000, ring.public or ""))
    with parsing() as parsed:
        for get in (lambda: run.anchor(2), lambda: run.folded(0, 2)):
            with pytest.raises(SignatureError):
                get()
    assert parsed == []


@pytest.mark.parametrize("count", [1, BAD_IN_A_ROW])
@pytest.mark.parametrize("far", [0, 2000])
def test_the_head_is_found_without_head_json(count: int, far: int, chain: Chain, ring: Keyring) -> None:
    for version in [*range(HEAD + 1, HEAD + 1 + count), *range(9_000_000_000, 9_000_000_000 + far)]:
        put(chain, version, b"{}")
    (chain.folder / keys.HEAD_KEY).write_bytes(b"{}")
    run = open_run(chain.url, ring)
    with reading(run) as read:
        manifest, error = run.reachable_head()
    assert manifest.version == HEAD
    assert isinstance(error, FormatError)
    assert keys.HEAD_KEY in error.message
    assert len(read) < 4 * BAD_IN_A_ROW


def test_more_junk_than_is_passed_over(chain: Chain, ring: Keyring) -> None:
    for version in range(HEAD + 1, HEAD + 2 + BAD_IN_A_ROW):
        put(chain, version, b"{}")
    run = open_run(chain.url, ring)
    manifest, error = run.reachable_head()
    assert (manifest.version, type(error)) == (HEAD, FormatError)
    (chain.folder / keys.HEAD_KEY).write_bytes(b"{}")
    with reading(run) as read, pytest.raises(FormatError, match=keys.HEAD_KEY):
        run.reachable_head()
    assert len(read) < 2 * BAD_IN_A_ROW


def test_a_lost_manifest_hides_nothing_beyond_it(chain: Chain, ring: Keyring) -> None:
    (chain.folder / keys.version_key(1)).unlink()
    (chain.folder / keys.HEAD_KEY).write_bytes(b"{}")
    assert open_run(chain.url, ring).reachable_head()[0].version == HEAD


def test_a_large_version_behind_large_junk(tmp_path: Path) -> None:
    """Too large to be read after so much, and found from the one before it."""
    chain = Chain(tmp_path)
    chain.grow(HEAD)
    run = open_run(chain.url)
    last = json.loads((chain.folder / keys.version_key(HEAD)).read_bytes())
    put(chain, HEAD, dump_canonical({**last, "zzz": "x" * (run.document_limit // 2)}))
    for version in range(HEAD + 1, HEAD + 1 + BAD_DOCUMENTS):
        put(chain, version, b"x" * (run.document_limit * 15 // 16))
    (chain.folder / keys.HEAD_KEY).write_bytes(b"{}")
    manifest, error = run.reachable_head()
    assert (manifest.version, type(error)) == (HEAD, FormatError)


def test_newest_before_at_its_edges(chain: Chain) -> None:
    reason = ChainError("why")
    with pytest.raises(ChainError, match="why"):
        newest_before({}, 100, lambda version: chain.manifests[version], 5, reason)
    with pytest.raises(ChainError, match="why"):
        newest_before({3: 50}, 100, lambda version: chain.manifests[version], 3, reason)
    assert newest_before({3: 50, 2: 100}, 100, lambda version: chain.manifests[version], 9, reason).version == 3
    assert newest_before({3: 101, 2: 100}, 100, lambda version: chain.manifests[version], 9, reason).version == 2

    def fails(version: int) -> Manifest:
        raise StoreError("gone")

    with pytest.raises(StoreError, match="gone"):
        newest_before({3: 50}, 100, fails, 9, reason)

    def lacks(version: int) -> Manifest:
        raise NotFoundError("between listing and reading")

    with pytest.raises(ChainError, match="why"):
        newest_before({3: 50}, 100, lacks, 9, reason)


# The glance


def signed(ring: Keyring, **fields: Any) -> bytes:
    """An object with a signature over the rest of it."""
    signature = ring.sign_bytes("manifest", dump_canonical(fields))
    assert signature is not None
    return dump_canonical({**fields, "signature": signature.model_dump()})


def allowed(ring: Keyring) -> frozenset[str]:
    return frozenset([ring.public or ""])


@pytest.mark.parametrize("fields", [{}, {"a": 1}, {"z": 1}, {"a": 1, "z": 'x"signature":{'}], ids=str)
def test_a_good_signature_wherever_it_stands(fields: dict[str, Any], ring: Keyring) -> None:
    check_glance(signed(ring, **fields), "manifest", ring, allowed(ring), "it")


def test_a_signature_in_a_member_that_is_not_known(ring: Keyring) -> None:
    other = Signature(key="0" * 64, value="0" * 128).model_dump()
    check_glance(signed(ring, a={"signature": other}, z=1), "manifest", ring, allowed(ring), "it")


BAD: dict[str, tuple[Callable[[bytes], bytes], type[DeltaSyncError]]] = {
    "changed": (lambda data: data.replace(b'"a":1', b'"a":2'), SignatureError),
    "signature taken away": (lambda data: b'{"a":1}', SignatureError),
    "cut off": (lambda data: data[:-2], FormatError),
    "zeros in it": (lambda data: data.replace(b'"a"', b"\0\0\0"), FormatError),
    "nothing": (lambda data: b"", FormatError),
    "many signatures": (lambda data: b"{" + data[7:-1].replace(b"0", b"1") * 50 + b"}", SignatureError),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_at_a_glance(name: str, ring: Keyring) -> None:
    change, kind = BAD[name]
    with pytest.raises(kind, match="it") as caught:
        check_glance(change(signed(ring, a=1)), "manifest", ring, allowed(ring), "it")
    assert type(caught.value) is kind


def test_another_kind_and_another_key(ring: Keyring, tmp_path: Path) -> None:
    stranger = keyring_at(tmp_path / "stranger.key")
    with pytest.raises(SignatureError, match="changed"):
        check_glance(signed(ring, a=1), "anchor", ring, allowed(ring), "it")
    with pytest.raises(SignatureError, match="not trusted"):
        check_glance(signed(stranger, a=1), "manifest", ring, allowed(ring), "it")


def test_large_documents_that_are_good(chain: Chain, ring: Keyring) -> None:
    fields = chain.manifests[HEAD].model_dump(mode="json")
    fields |= {"version": HEAD + 1, "parent": chain.manifests[HEAD].digest, "base_version": HEAD}
    fields |= {"zzz": "x" * 2 * GLANCE_BYTES}
    del fields["signature"]
    put(chain, HEAD + 1, signed(ring, **fields))
    assert open_run(chain.url, ring).head().version == HEAD + 1


# Writers


def test_writers_beside_the_chain_keep_to_the_limit(chain: Chain, ring: Keyring) -> None:
    run = open_run(chain.url, ring)
    usual = run.document_limit

    def shrink() -> bool:
        """Once the manifests are read."""
        run.document_limit = 200
        return False

    for make in (lambda: make_anchor(run, HEAD, stop=shrink), lambda: make_fold(run, 0, HEAD, stop=shrink)):
        run.document_limit = usual
        with pytest.raises(LimitError, match=r"/0.*document_limit"):
            make()
    assert not (chain.folder / "folds").exists()
    assert not (chain.folder / "anchors").exists()
