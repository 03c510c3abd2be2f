"""Members that stand twice, at every level of every document: two readers would believe two things."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.security.build import container, tag, untouched
from tests.security.reader import Reader
from tests.support.written import Written
from vllm_delta_sync.wire import documents as side


def spots(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Paths of all objects in a value that have members."""
    found = [path] if isinstance(value, dict) and value else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        found += spots(item, (*path, name))
    return found


def doubled(value: object, spot: tuple[object, ...]) -> str:
    """Compact JSON with the first member of one object standing twice, the second time with another value."""
    if isinstance(value, dict):
        members = [f"{json.dumps(n)}:{doubled(v, spot[1:] if spot[:1] == (n,) else (None,))}" for n, v in value.items()]
        if not spot:
            members.insert(1, f"{json.dumps(next(iter(value)))}:0")
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        items = [doubled(v, spot[1:] if spot[:1] == (i,) else (None,)) for i, v in enumerate(value)]
        return "[" + ",".join(items) + "]"
    return json.dumps(value)


def keys_of(written: Written, scratch: Path) -> dict[str, str]:
    """Keys of one document of each kind, and the kind of error that a reader that needs it gives."""
    written.writer.fold(0, 4)
    written.writer.beside(3, scratch)
    tag(written, 2)
    return {
        "run": "run.json",
        "tensors": "tensors.json",
        "head": "HEAD.json",
        "delta": "versions/0000000004.json",
        "anchor": "versions/0000000000.json",
        "beside": side.anchor_key(3),
        "fold": side.fold_key(0, 4),
        "tag": side.tag_key("kept"),
    }


@pytest.mark.parametrize("kind", ["run", "tensors", "head", "delta", "anchor", "beside", "fold", "tag"])
def test_in_documents(kind: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    key = keys_of(written, tmp_path)[kind]
    good = (written.folder / key).read_text()
    value = json.loads(good)
    found = spots(value)
    assert found[0] == ()
    doors: tuple[Any, ...] = {
        "beside": ("anchor", 3),
        "fold": ("folded", 0, 4),
        "tag": ("tensors", "tag:kept"),
        "anchor": ("tensors", 0),
    }.get(kind, ("head",))
    # The first and the last of many rows stand for all of them.
    for spot in dict.fromkeys([*found[:6], *found[-2:]]):
        (written.folder / key).write_text(doubled(value, spot))
        message = reader.refused(doors[0], written.folder, *doors[1:], kind="format")
        assert "duplicate key" in message
        assert key in message
    (written.folder / key).write_text(good)
    untouched(reader, written)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map":{},"weight_map":{"a":"model.safetensors"}}',
        '{"weight_map":{"a":"x.safetensors","a":"model.safetensors"}}',
        '{"metadata":{"total_size":1,"total_size":2},"weight_map":{"a":"model.safetensors"}}',
        '{"weight_map":{"a":"x","\\u0061":"y"}}',
    ],
)
def test_in_the_index_of_a_checkpoint(text: str, reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        container(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")
    )
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "duplicate key" in reader.refused("checkpoint", tmp_path, kind="format")
