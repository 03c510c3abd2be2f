"""Places that lead elsewhere: URLs of runs, names of tags and receivers, and where a version 0 says that it lies."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.security.build import edit
from tests.security.reader import Reader
from tests.support.samples import RunWriter, random_bits
from tests.support.written import TABLE, Written
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.checkpoint import resolve_base
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.wire.documents import lease_key, tag_key, tag_of_key

URLS = [
    "",
    "\0",
    "/data\0/run",
    "file:///data/%00/run",
    "file://elsewhere/data",
    "file://../../etc",
    "file:data",
    "file:///data?x=/etc",
    "file:///data#/etc",
    "http://169.254.169.254/latest",
    "ftp://host/run",
    "javascript://run",
    "FILE:relative",
]


@pytest.mark.parametrize("url", URLS)
def test_urls_of_runs(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_bucket(url)
    assert caught.value.message.isprintable()


NAMES = [
    "../x",
    "..",
    ".",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a\0",
    "a\n",
    "%2e%2e",
    "",
    "a" * 101,
    "tаg",
    "\x1b[2J",
    "-rf",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_tags_and_receivers(name: str, reader: Reader, written: Written) -> None:
    for key in (tag_key, lease_key):
        with pytest.raises(UsageError) as caught:
            key(name)
        assert caught.value.message.isprintable()
    reader.refused("tensors", written.folder, f"tag:{name}", kind="usage")
    assert tag_of_key(f"tags/{name}.json") is None


BASES = {
    "a device": "/dev/zero",
    "a directory of the system": "/etc",
    "a process": "/proc/self",
    "a zero byte": "a\0b",
    "up": "../../../../../../etc",
    "a URL": "http://127.0.0.1:1/x",
    "an escape": "/nowhere\x1b[2J\nWARNING forged",
    "nothing": "",
    "a revision that leads up": "org/model@../../../etc",
}


@pytest.mark.parametrize("name", BASES)
def test_a_version_0_that_lies_elsewhere(name: str, reader: Reader, tmp_path: Path) -> None:
    writer = RunWriter(open_bucket(tmp_path / "run"), TABLE)
    writer.reference(random_bits(TABLE, np.random.default_rng(1)), BASES[name])
    reader.refused("tensors", tmp_path / "run", kind=("not_found", "format", "tensor", "usage"))


BRANCHES = {**{name: text for name, text in BASES.items() if name != "a revision that leads up"}, "S3": "s3://x/y"}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_of_a_run_elsewhere(name: str, reader: Reader, tmp_path: Path) -> None:
    writer = RunWriter(open_bucket(tmp_path / "run"), TABLE)
    writer.reference(random_bits(TABLE, np.random.default_rng(1)), BRANCHES[name])
    (tmp_path / "run" / "HEAD.json").unlink()
    source = {"run": "ab" * 16, "version": 0, "manifest": "cd" * 32}
    edit(tmp_path / "run", "versions/0000000000.json", lambda value: value["base"].update(source))
    reader.refused("tensors", tmp_path / "run", kind=("not_found", "usage", "store", "chain"))


def test_a_checkpoint_that_is_pipes(reader: Reader, tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
        reader.refused("checkpoint", tmp_path, kind="not_found")


@pytest.mark.parametrize("revision", ["..", "../x", "/etc", "a/../../b", "a/.", "./a"])
def test_revisions_that_lead_elsewhere_are_none(revision: str) -> None:
    """They would become a path below the Hub's cache."""
    assert resolve_base(f"org/model@{revision}").model is None


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", "a\0b", "a\nb", "\x1b[2J", "a" * 300, "no.such.file", "a\\b"]
)
def test_files_that_an_index_names(name: str, reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    reader.refused("checkpoint", tmp_path, kind=("format", "not_found", "store"))


def test_an_index_of_a_tebibyte(reader: Reader, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, 2**40)
    assert "MAX_JSON_BYTES" in reader.refused("checkpoint", tmp_path, kind="limit")
