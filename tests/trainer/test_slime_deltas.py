"""Deltas that slime wrote become versions, bit for bit, or are refused by name."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.support.chains import Chain
from tests.support.checkpoints import write_checkpoint
from tests.support.commands import answer, delta_sync, kind
from tests.support.publishing import Tensors, assert_holds
from tests.support.slime_folders import INDEX, folder_of, write_delta
from tests.support.slime_stream import STREAMS, VERSIONS, base_weights, weights_at
from trainer_side.checkpoint_folders import CheckpointPublisher, CheckpointWatcher
from vllm_delta_sync import follow, open_run
from vllm_delta_sync.errors import ChainError, DeltaSyncError, UnsupportedError, UsageError
from vllm_delta_sync.format.table import TensorTable

WRITTEN = Path(__file__).parent / "slime_written"
POLL = 0.05
FILE = "model-00000-of-00001.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """slime's --hf-checkpoint."""
    return write_checkpoint(tmp_path / "hf", base_weights())


def flat(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().copy() for name, tensor in tensors.items()}


def delta(out: Path, version: int, **metadata: str) -> Path:
    return write_delta(out, version, flat(weights_at(version - 1)), flat(weights_at(version)), **metadata)


def watch_once(out: Path, url: str, base: Path | None) -> tuple[list[tuple[str, str, int]], dict[str, str]]:
    """Name, outcome and version of each folder, and what is refused, of a process that starts anew."""
    with CheckpointPublisher(url, base) as publisher:
        watcher = CheckpointWatcher(out, publisher, POLL)
        results = list(watcher.watch(once=True))
    return [(each.folder.name, each.outcome, each.manifest.version) for each in results], watcher.refused


def assert_stream(url: str, last: int) -> None:
    run = open_run(url)
    assert [(manifest.version, manifest.step) for manifest in run.log()] == [(n, n) for n in range(last + 1)]
    for version in range(last + 1):
        assert_holds(run, version, weights_at(version))


# What slime wrote


@pytest.mark.parametrize("stream", STREAMS)
def test_what_slime_wrote_is_read_bit_for_bit(url: str, base: Path, stream: str) -> None:
    """Each encoding and checksum, as slime's own code wrote it: tests/trainer/slime_written/README.md."""
    document = answer("publish", "--watch", WRITTEN / stream, "--bucket", url, "--base", base, "--once", "--poll", POLL)
    assert [each["outcome"] for each in document["checkpoints"]] == ["published"] * VERSIONS
    assert_stream(url, VERSIONS)


def test_one_at_a_time_across_restarts(url: str, base: Path, out: Path) -> None:
    for version in range(1, VERSIONS + 1):
        shutil.copytree(folder_of(WRITTEN / STREAMS[0], version), folder_of(out, version))
        results, refused = watch_once(out, url, base)
        assert results[-1] == (f"weight_v{version:06d}", "published", version)
        assert {outcome for _, outcome, _ in results[:-1]} <= {"older"}
        assert not refused
    assert all(outcome == "older" for _, outcome, _ in watch_once(out, url, base)[0])
    assert_stream(url, VERSIONS)


def test_whole_checkpoints_between_deltas(url: str, base: Path, out: Path) -> None:
    """Version 3 equals version 2, and the delta after it builds on it all the same."""
    delta(out, 1)
    for version in (2, 3):
        write_checkpoint(folder_of(out, version), weights_at(version))
    delta(out, 4)
    results, refused = watch_once(out, url, base)
    assert [outcome for _, outcome, _ in results] == ["published", "published", "unchanged", "published"]
    assert not refused
    run = open_run(url)
    for version, step in ((1, 1), (2, 2), (3, 4)):
        assert_holds(run, version, weights_at(step))


def test_a_run_may_begin_with_a_whole_checkpoint(url: str, out: Path) -> None:
    write_checkpoint(folder_of(out, 1), weights_at(1))
    delta(out, 2)
    assert [outcome for _, outcome, _ in watch_once(out, url, None)[0]] == ["published", "published"]
    assert_holds(open_run(url), 1, weights_at(2))


def test_a_tied_head_of_the_base_follows_the_embedding(url: str, out: Path, tmp_path: Path) -> None:
    """slime sends that of a tied model once."""
    embedding, head = "model.embed.weight", "lm_head.weight"
    base = write_checkpoint(tmp_path / "hf", base_weights() | {head: base_weights()[embedding]})
    (base / "config.json").write_text('{"tie_word_embeddings": true}')
    delta(out, 1)
    write_checkpoint(folder_of(out, 2), weights_at(2))
    results, refused = watch_once(out, url, base)
    assert ([outcome for _, outcome, _ in results], refused) == (["published", "published"], {})
    for version in (1, 2):
        expected = weights_at(version)
        assert_holds(open_run(url), version, expected | {head: expected[embedding]})


# Out and in


@given(
    growth=st.lists(
        st.fixed_dictionaries(
            {
                "share": st.sampled_from([0.0, 0.003, 0.1, 0.6]),
                "full": st.lists(st.integers(0, 5), max_size=2, unique=True),
                "count": st.integers(1, 3),
            },
            optional={"base": st.just(0)},
        ),
        max_size=4,
    ),
    keep=st.integers(1, 3),
    whole=st.booleans(),
)
def test_out_and_in_it_is_the_same_run(
    growth: list[dict[str, Any]], keep: int, whole: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A run that is followed as slime's folders, and published from them, has the same bits at each version read."""
    root = tmp_path_factory.mktemp("round")
    chain, second = Chain(root, base=True), str(root / "second")
    (root / "base" / "config.json").write_text("{}")
    for number, options in enumerate([{}, *growth]):
        if number:
            chain.grow(**options)
        for _ in follow(chain.url, root / "out", once=True, keep=keep, format="slime-full" if whole else "slime"):
            pass
        results, refused = watch_once(root / "out", second, root / "base")
        assert not refused
        run = open_run(second)
        newest = len(chain.manifests) - 1
        if results and results[-1][1] == "published":
            assert run.head().step == newest
        held = run.snapshot()
        table: TensorTable = run.table
        for tensor, spec in enumerate(chain.table):
            assert np.array_equal(held.bits[table.index(spec.name)], chain.bits[newest][tensor])
    shutil.rmtree(root)


# Gaps and other bases


def test_a_gap_waits_for_what_is_missing(url: str, base: Path, out: Path, tmp_path: Path) -> None:
    for version in range(1, 5):
        delta(out, version)
    os.rename(folder_of(out, 2), tmp_path / "later")
    done = delta_sync("publish", "--watch", out, "--bucket", url, "--base", base, "--once", "--poll", POLL)
    assert done.code == 1
    assert open_run(url).head().version == 1
    with CheckpointPublisher(url, base) as publisher:
        watcher = CheckpointWatcher(out, publisher, POLL)
        list(watcher.watch(once=True))
        assert sorted(watcher.refused) == ["weight_v000003", "weight_v000004"]
        assert "builds on version 2 of its trainer" in watcher.refused["weight_v000003"]
        os.rename(tmp_path / "later", folder_of(out, 2))
        results = [*watcher.watch(once=True), *watcher.watch(once=True)]
        published = [each.folder.name for each in results if each.outcome == "published"]
        assert published == [f"weight_v{version:06}" for version in (2, 3, 4)]
        assert not watcher.refused
    assert_stream(url, 4)


def test_a_trainer_that_began_again_is_refused(url: str, base: Path, out: Path) -> None:
    """Its version 1 builds on its --hf-checkpoint again, and its version 3 on a version 2 that is not the run's."""
    for version in (1, 2):
        delta(out, version)
    watch_once(out, url, base)
    shutil.rmtree(out)
    other = {name: tensor.clone() for name, tensor in weights_at(1).items()}
    other["model.steps"] += 5
    write_delta(out, 1, flat(weights_at(0)), flat(other))
    _, refused = watch_once(out, url, base)
    assert "publish into a new run" in refused["weight_v000001"]
    write_delta(out, 2, flat(other), flat(weights_at(2)))
    delta(out, 3)
    delta(out, 4)
    _, refused = watch_once(out, url, base)
    assert sorted(refused) == ["weight_v000001", "weight_v000002", "weight_v000003", "weight_v000004"]
    assert "written again after it was published" in refused["weight_v000003"]
    assert_stream(url, 2)


def test_without_a_base_there_is_nothing_to_build_on(url: str, out: Path) -> None:
    folder = delta(out, 1)
    with CheckpointPublisher(url) as publisher:
        with pytest.raises(ChainError, match="give the trainer's --hf-checkpoint as --base"):
            publisher.publish(folder)
        watcher = CheckpointWatcher(out, publisher, POLL)
        assert not list(watcher.watch(once=True))
        assert "--base" in watcher.left_out["weight_v000001"]
    assert kind(1, "publish", "--from", folder, "--bucket", url) == "chain"
    assert not Path(url).exists()


def test_another_step_is_refused(url: str, base: Path, out: Path) -> None:
    with CheckpointPublisher(url, base) as publisher, pytest.raises(UsageError, match=r"step 7 is not that of .*, 1"):
        publisher.publish(delta(out, 1), step=7)


# Damaged, hostile, unknown


STEPS = "model.steps"
Places = dict[str, str | None]
"""Tensor → its file, or its checksum; None removes it."""


def rewrite(
    folder: Path, frames: dict[str, np.ndarray] | None = None, sums: dict[str, str | None] | None = None
) -> None:
    """Change frames and checksums of a delta's file. Args: sums: None removes one."""
    with safe_open(folder / FILE, "np") as file:
        held, known = {name: file.get_tensor(name) for name in sorted(set(file.keys()))}, dict(file.metadata())
    declared = {name: text for name, text in (known | (sums or {})).items() if text is not None}
    save_file(held | (frames or {}), folder / FILE, metadata=declared)


def reindex(folder: Path, places: Places | None = None, **fields: Any) -> None:
    document = json.loads((folder / INDEX).read_text())
    document["metadata"] |= fields
    document["weight_map"] |= places or {}
    document["weight_map"] = {name: place for name, place in document["weight_map"].items() if place is not None}
    (folder / INDEX).write_text(json.dumps(document))


def framed(content: bytes) -> np.ndarray:
    return np.frombuffer(zstandard.ZstdCompressor().compress(content), np.uint8)


def numbers(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def index(places: Places | None = None, **fields: Any) -> Callable[[Path], None]:
    return lambda folder: reindex(folder, places, **fields)


def frame(content: np.ndarray, **fields: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        reindex(folder, **fields)
        rewrite(folder, {STEPS: content})

    return act


def unknown(folder: Path) -> None:
    rewrite(folder, {"lm_head.weight": framed(b"x")})
    reindex(folder, {"lm_head.weight": FILE})


def cut(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-3])


HOSTILE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a path out of the folder": (index({STEPS: "../../hf/model.safetensors"}), "format", "cannot be a file of that"),
    "a file that ends too early": (cut, "format", "is not complete"),
    "a wrong checksum": (lambda folder: rewrite(folder, sums={STEPS: "01"}), "fingerprint", "01 is declared"),
    "no checksum": (lambda folder: rewrite(folder, sums={STEPS: None}), "fingerprint", "None is declared"),
    "an unknown encoding": (index(delta_encoding="gap"), "unsupported", "'gap', and only xor, overwrite can be read"),
    "an unknown compression": (index(compression_format="lz4"), "unsupported", "compression_format is 'lz4'"),
    "an unknown checksum": (index(checksum_format="md5"), "unsupported", "checksum_format is 'md5'"),
    "another number": (index(version="000002"), "format", "version 2, and its folder is named weight_v000001"),
    "a base that is not before it": (index(base_version="000001"), "format", "which is not before it"),
    "no base": (index(base_version=None), "format", "base_version is 'None'"),
    "a tensor that the run lacks": (unknown, "tensor", "lm_head.weight"),
    "a tensor elsewhere": (index({"model.norm": FILE}), "format", "'model.norm' is not where and as"),
    "a file that its index lacks": (index({STEPS: None}), "format", "does not name"),
    "frames of another dtype": (frame(np.zeros(2, np.float32)), "format", "'model.steps' is not where and as"),
    "changes of another size": (frame(framed(b"1234567")), "format", "declares 7 bytes, 8 expected"),
    "no zstd": (frame(np.ones(9, np.uint8)), "format", "is not a zstd frame"),
    "more changes than bytes": (frame(framed(bytes(1000)), delta_encoding="overwrite"), "limit", "bytes of changes"),
    "a position outside": (
        frame(framed(numbers(1, 8) + b"x"), delta_encoding="overwrite"), "format", "position 8 lies outside",
    ),
    "fewer changes than it says": (
        frame(framed(numbers(2, 0) + b"x"), delta_encoding="overwrite"), "format", "2 changes do not take 9 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_delta_is_refused_by_name_and_changes_nothing(url: str, base: Path, out: Path, name: str) -> None:
    spoil, kind, message = HOSTILE[name]
    before, after = flat(weights_at(0)), flat(weights_at(0)) | {STEPS: flat(weights_at(1))[STEPS]}
    spoil(write_delta(out, 1, before, after))
    with CheckpointPublisher(url, base) as publisher, pytest.raises(DeltaSyncError, match=message) as raised:
        publisher.publish(folder_of(out, 1))
    assert raised.value.kind == kind
    assert not [outcome for _, outcome, _ in watch_once(out, url, base)[0] if outcome == "published"]
    shutil.rmtree(folder_of(out, 1))
    write_delta(out, 1, before, after)
    assert watch_once(out, url, base)[0] == [("weight_v000001", "published", 1)], "the whole one is taken"
    assert int(dict(open_run(url).tensors())[STEPS]) == 1


def test_a_bad_delta_does_not_end_the_watch(url: str, base: Path, out: Path) -> None:
    """Versions 1 and 2 are published; of version 3 one tensor is good and the next is not, so nothing of it is."""
    for version in (1, 2):
        delta(out, version)
    after = flat(weights_at(2))
    after["model.embed.weight"][5] ^= 1
    after["model.steps"][0] ^= 1
    folder = write_delta(out, 3, flat(weights_at(2)), after)
    rewrite(folder, sums={STEPS: "0"})
    with CheckpointPublisher(url, base) as publisher:
        watcher = CheckpointWatcher(out, publisher, POLL)
        assert [each.manifest.version for each in watcher.watch(once=True)] == [1, 2]
        assert "'model.steps'" in watcher.refused["weight_v000003"]
        shutil.rmtree(folder)
        delta(out, 3)
        assert [each.manifest.version for each in watcher.watch(once=True) if each.outcome == "published"] == [3]
    assert_stream(url, 3)


def test_a_delta_made_against_other_weights_is_refused(url: str, out: Path, tmp_path: Path) -> None:
    other = base_weights()
    other["model.steps"] += 3
    base = write_checkpoint(tmp_path / "hf", other)
    delta(out, 1)
    _, refused = watch_once(out, url, base)
    assert "was made against other weights" in refused["weight_v000001"]


def test_a_checksum_needs_its_package(url: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with CheckpointPublisher(url, base) as publisher:
        with pytest.raises(UnsupportedError, match=r"xxhash is not installed; run pip install '.*\[slime\]'"):
            publisher.publish(folder_of(WRITTEN / STREAMS[0], 1))
