"""What a cold start loads, without an engine: which version, from which base, and what it says when it cannot."""

import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

from tests.golden.regenerate import DIRECTORY, table, versions
from tests.support.modules import FusedModel, ModulePort
from tests.support.samples import RunWriter, flip
from tests.support.world import World, expect_equal
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.entrypoints import plugin
from vllm_delta_sync.engine.entrypoints.load_format import DeltaSyncLoader
from vllm_delta_sync.engine.follow.standing_orders import StandingOrder, StandingOrderStore
from vllm_delta_sync.engine.protocol import ClaimedVersion
from vllm_delta_sync.engine.staging.reconstruct import drain_tensors, newest_good_manifest, rebuild
from vllm_delta_sync.errors import BaseUnavailableError, DigestError, NotFoundError, SettingsError
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.fingerprint import fingerprint_tensor
from vllm_delta_sync.format.safetensors_file import write_anchor
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.torch_views import bits_of, tensor_from_bits

HEAD = 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(DIRECTORY, copy)
    return copy


def damage(path: Path, version: int) -> None:
    """Flip a bit of a version's object."""
    flip(path / open_run(str(path)).manifest(version).objects[0].key)


def checkpoint(folder: Path, bits: list[Bits]) -> Path:
    folder.mkdir()
    tensors = {spec.name: tensor_from_bits(bits[tensor], spec) for tensor, spec in enumerate(table())}
    save_file(tensors, folder / "model.safetensors")
    return folder


def reference_run(url: str, base: Path) -> RunWriter:
    """Version 0 lies at ``base``, version 1 is a delta."""
    writer = RunWriter(open_bucket(url), table())
    writer.reference(versions()[0], str(base))
    writer.delta(versions()[1])
    return writer


def assert_version(url: str, version: int, folder: str = "/nowhere") -> None:
    run = open_run(url)
    manifest, state = rebuild(run, newest_good_manifest(run), folder)
    assert manifest == run.manifest(version)
    for tensor, spec in enumerate(run.table):
        assert np.array_equal(state.bits[tensor], versions()[version][tensor])
        assert state.fingerprints[tensor] == fingerprint_tensor(spec.name, state.bits[tensor])


def test_vllm_finds_the_loader() -> None:
    plugin.register()
    assert type(get_model_loader(LoadConfig(load_format="delta_sync"))) is DeltaSyncLoader


def test_nothing_to_load_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = LoadConfig(load_format="delta_sync", model_loader_extra_config={"bucket": "/run"})
    with pytest.raises(SettingsError, match="set DELTA_SYNC_BUCKET"):
        DeltaSyncLoader(extra)
    monkeypatch.delenv("DELTA_SYNC_BUCKET", raising=False)
    with pytest.raises(SettingsError, match="set DELTA_SYNC_BUCKET"):
        _ = DeltaSyncLoader(LoadConfig(load_format="delta_sync")).run
    monkeypatch.setenv("DELTA_SYNC_BUCKET", url)
    monkeypatch.setenv("DELTA_SYNC_LORA_NAME", "poet")
    with pytest.raises(SettingsError, match="lora_name is 'poet', so the run in bucket is that of an adapter"):
        _ = DeltaSyncLoader(LoadConfig(load_format="delta_sync")).run
    monkeypatch.delenv("DELTA_SYNC_LORA_NAME")
    with pytest.raises(NotFoundError, match="start a publisher there, or check the URL"):
        _ = DeltaSyncLoader(LoadConfig(load_format="delta_sync")).run
    RunWriter(open_bucket(url), table())
    with pytest.raises(NotFoundError, match=r"has no version to load: .*; start its publisher first"):
        newest_good_manifest(open_run(url))


def without_manifests(path: Path) -> None:
    for version in (4, 5):
        (path / keys.version_key(version)).write_bytes(b"{")


@pytest.mark.parametrize(
    ("spoil", "version", "words"),
    [
        pytest.param(lambda path: None, HEAD, "", id="every kind of object up to the head"),
        pytest.param(without_manifests, 3, "what follows version 3 cannot be used", id="damaged manifest"),
        pytest.param(
            lambda path: damage(path, 3),
            2,
            "version 5 cannot be used, starting with version 2: object",
            id="damaged delta",
        ),
        pytest.param(lambda path: damage(path, 0), None, "damaged", id="damaged anchor"),
    ],
)
def test_damage_leaves_the_version_before(
    path: Path, spoil: Callable[[Path], None], version: int | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(path)
    if version is None:
        run = open_run(str(path))
        with pytest.raises(DigestError, match=words):
            rebuild(run, newest_good_manifest(run), "/nowhere")
    else:
        assert_version(str(path), version)
        assert words in caplog.text


def test_the_newest_anchor_is_enough(url: str, tmp_path: Path) -> None:
    writer = RunWriter(open_bucket(url), table())
    for version in (0, 1):
        file = tmp_path / f"anchor-{version}"
        write_anchor(file, table(), zip((spec.name for spec in table()), versions()[version], strict=True))
        writer.anchor(versions()[version], file.read_bytes())
    writer.delta(versions()[2])
    (Path(url) / keys.version_key(0)).unlink()
    (Path(url) / writer.manifests[0].objects[0].key).unlink()
    assert_version(url, 2)


def test_the_base_where_the_run_says_or_in_the_model_folder(url: str, tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", versions()[0])
    reference_run(url, base)
    bare = tmp_path / "bare"
    bare.mkdir()
    assert_version(url, 1, str(bare))
    assert_version(url, 1, "org/name")
    run = open_run(url)
    other = checkpoint(tmp_path / "other", versions()[1])
    with pytest.raises(BaseUnavailableError, match=r"other' is not the one that the run started from"):
        rebuild(run, newest_good_manifest(run), str(other))
    base.rename(tmp_path / "model")
    assert_version(url, 1, str(tmp_path / "model"))
    with pytest.raises(
        BaseUnavailableError, match=r"base'.*'org/name' holds no safetensors; put the original checkpoint's"
    ):
        rebuild(run, newest_good_manifest(run), "org/name")


def test_another_base_is_no_reason_to_start_with_an_earlier_version(url: str, tmp_path: Path) -> None:
    """Damage is: the head's object is lost, and the base that would tell more is not the run's."""
    base = checkpoint(tmp_path / "base", versions()[0])
    writer = reference_run(url, base)
    writer.delta(versions()[2])
    writer.beside(1, tmp_path)
    run = open_run(url)
    (Path(url) / run.head().objects[0].key).unlink()
    other = checkpoint(tmp_path / "other", versions()[1])
    with pytest.raises(BaseUnavailableError, match="start from a model folder with the original safetensors"):
        rebuild(run, run.head(), str(other))
    assert rebuild(run, run.head(), str(base))[0].version == 1


def test_drain_gives_memory_back_as_it_goes(path: Path) -> None:
    run = open_run(str(path))
    _, state = rebuild(run, newest_good_manifest(run), "/nowhere")
    first = weakref.ref(state.bits[0])
    seen = 0
    for tensor, (name, value) in enumerate(drain_tensors(run, state)):
        assert name == run.table[tensor].name
        assert tuple(value.shape) == run.table[tensor].shape
        assert np.array_equal(bits_of(value), versions()[HEAD][tensor])
        assert state.bits[tensor].base is None
        assert state.bits[tensor].size == 0
        if tensor == 1:
            assert first() is None
        seen += 1
    assert seen == len(run.table)


@pytest.mark.parametrize(
    ("target", "order", "expected"),
    [
        ("head", {}, HEAD),
        ("2", {}, 2),
        ("tag:good", {}, 3),
        ("tag:none", {}, HEAD),
        ("99", {}, HEAD),
        ("head", {"holding": True, "version": 1}, 1),
        ("head", {"holding": True, "version": 99}, HEAD),
        ("head", {"holding": True, "version": 1, "run": "f" * 32}, HEAD),
        ("head", {"target": "4"}, 4),
        ("2", {"target": "4", "setting": "head"}, 2),
        ("3", {"target": "head", "setting": "3"}, HEAD),
    ],
)
def test_what_is_to_be_served_is_loaded(
    target: str, order: dict[str, Any], expected: int, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(str(path))
    set_tag(run, "good", 3)
    settings = Settings(bucket=str(path), target=target, state_dir=tmp_path / "state")
    if order:
        StandingOrderStore(settings).save(StandingOrder(**{"setting": target, "run": run.info.run} | order))
    for name, value in (("BUCKET", path), ("TARGET", target), ("STATE_DIR", settings.state_dir)):
        monkeypatch.setenv(f"DELTA_SYNC_{name}", str(value))
    assert DeltaSyncLoader(LoadConfig(load_format="delta_sync")).choose_version().version == expected


# Data parallel engines


def load(model: Any, url: str, version: int) -> Any:
    """Load a version as this load format does in one engine."""
    run = open_run(url)
    manifest, state = run.manifest(version), run.snapshot(version)
    fingerprints = list(state.fingerprints)
    model.load_weights(drain_tensors(run, state))
    model.delta_sync_loaded = ClaimedVersion(manifest.run, url, version, fingerprints)
    return model


@pytest.mark.parametrize("versions", [(1, 2), (2, 1), (0, 1)])
def test_engines_that_loaded_different_versions_come_to_the_newest(tmp_path: Path, versions: tuple[int, int]) -> None:
    """Engines of a dense model load independently, and a version may be published meanwhile."""
    world = World(tmp_path)
    world.train(1, 2)
    models = [load(FusedModel(), world.url, version) for version in versions]
    world.use(ModulePort(*models))
    world.receiver.advance()
    assert (world.receiver.served_version, world.receiver.status()["last_error"]) == (2, None)
    (right,) = world.fresh()
    for model in models:
        expect_equal(model, right)
    assert world.receiver.verify()["verdict"]


def test_engine_that_holds_something_else_than_it_loaded_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.train(1, 2)
    models = [load(FusedModel(), world.url, version) for version in (1, 2)]
    models[1].norm.data.mul_(2)
    world.models = models
    world.use(ModulePort(*models))
    world.expect_fails("chain")
    assert world.receiver.status()["state"] == "refused"
