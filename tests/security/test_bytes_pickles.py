"""Pickles wherever weights are expected: nothing is unpickled, so the payload never runs."""

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.security.build import next_object, untouched
from tests.security.reader import Reader
from tests.support.samples import RunWriter, random_bits
from tests.support.written import TABLE, Written
from vllm_delta_sync.bucket import open_bucket


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


def plain(mark: Path) -> bytes:
    return pickle.dumps({"model.weight": Payload(mark)})


def of_torch(mark: Path) -> bytes:
    """As ``torch.save`` writes it: a zip with a pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", plain(mark))
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def of_numpy(mark: Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Payload(mark)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


FORMS = [plain, of_torch, of_numpy]
NAMES = ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth", "model.pkl", "model.ckpt", "weights.npy"]


@pytest.mark.parametrize("form", FORMS)
def test_the_payload_runs_where_it_is_unpickled(form: object, mark: Path) -> None:
    """Else the other tests here would show nothing."""
    data = form(mark)  # type: ignore[operator]
    if form is of_torch:
        data = zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")
    if form is of_numpy:
        np.load(io.BytesIO(data), allow_pickle=True)
    else:
        pickle.loads(data)  # noqa: S301
    assert mark.exists()


@pytest.mark.parametrize("form", FORMS)
def test_in_a_checkpoint(form: object, reader: Reader, mark: Path, tmp_path: Path) -> None:
    data = form(mark)  # type: ignore[operator]
    folder = tmp_path / "base"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes(data)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map":{"model.weight":"pytorch_model.bin"}}')
    assert "only safetensors" in reader.refused("checkpoint", folder, kind="not_found")
    for name in [*NAMES, "model.safetensors"]:
        (folder / name).write_bytes(data)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.weight": name}}))
        assert name in reader.refused("checkpoint", folder, kind=("format", "limit"))
    (folder / "model.safetensors.index.json").unlink()
    assert "model.safetensors" in reader.refused("checkpoint", folder, kind=("format", "limit"))
    writer = RunWriter(open_bucket(tmp_path / "run"), TABLE)
    writer.reference(random_bits(TABLE, np.random.default_rng(1)), str(folder))
    reader.refused("tensors", tmp_path / "run", kind=("format", "limit"))
    assert not mark.exists()


@pytest.mark.parametrize("form", FORMS)
def test_as_an_object(form: object, reader: Reader, written: Written, mark: Path, tmp_path: Path) -> None:
    next_object(written, form(mark))  # type: ignore[operator]
    for door in ("tensors", "verify"):
        reader.refused(door, written.folder, kind=("format", "limit"))
    reader.refused("pieces", written.folder, 5, tmp_path, kind=("format", "limit"))
    untouched(reader, written)
    assert not mark.exists()


@pytest.mark.parametrize("key", ["run.json", "tensors.json", "HEAD.json", "versions/0000000004.json"])
def test_as_a_document(key: str, reader: Reader, written: Written, mark: Path) -> None:
    for form in FORMS:
        (written.folder / key).write_bytes(form(mark))
        assert key in reader.refused("head", written.folder, kind="format")
    assert not mark.exists()


def test_beside_a_run(reader: Reader, written: Written, mark: Path) -> None:
    """Files that nobody asked for are not opened."""
    for name in [*NAMES, "conftest.py", "sitecustomize.py", "config.json", "modeling.py"]:
        (written.folder / name).write_bytes(plain(mark))
    assert reader.reads("tensors", written.folder)
    assert reader.reads("findings", written.folder) == []
    assert not mark.exists()
