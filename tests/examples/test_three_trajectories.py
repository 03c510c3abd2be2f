"""Trajectories on their way through a bucket: written once, read in order, and refused unless they are whole."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from examples.three_machines import trajectories
from examples.three_machines.trajectories import MAX_BYTES, Batch, Reader, Writer, decode, encode, key_of, place_of
from tests.support.three import some_batch
from tests.trainer.faults.hooks import FailAt, Hooked
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import DeltaSyncError, FormatError, LimitError, StoreError, UnsupportedError, UsageError
from vllm_delta_sync.wire.canonical import dump_canonical
from vllm_delta_sync.wire.compression import compress

KEY = key_of("w1", 0)


@pytest.fixture
def bucket(tmp_path: Path) -> Hooked:
    return Hooked(tmp_path / "trajectories")


def packed(document: Any) -> bytes:
    return compress(np.frombuffer(dump_canonical(document), np.uint8), "zstd").tobytes()


def keys(reader: Reader) -> list[str]:
    return [found.key for found in reader.new()]


def test_what_is_written_is_what_is_read(bucket: Hooked) -> None:
    written = Writer(bucket, "w1").put(some_batch())
    assert KEY == "trajectories/w1/0000000000.json.zst"
    (found,) = Reader(bucket).new()
    assert (found.key, place_of(found.key)) == (KEY, ("w1", 0))
    read = Reader(bucket).read(found)
    assert read.model_dump() == written.model_dump() == some_batch().model_dump() | {"created_at": written.created_at}


def test_writers_go_on_under_the_next_free_number(bucket: Hooked) -> None:
    assert [Writer(bucket, "w1").put(some_batch()).number for _ in range(3)] == [0, 1, 2]
    assert Writer(bucket, "w2").number == 0
    assert Writer(bucket, "w").number == 0


def test_a_put_that_failed_after_it_arrived_is_not_there_twice(bucket: Hooked) -> None:
    writer, batch = Writer(bucket, "w1"), some_batch()
    bucket.after = FailAt(KEY)
    with pytest.raises(StoreError, match="injected"):
        writer.put(batch)
    assert writer.put(batch).number == 0
    assert keys(Reader(bucket)) == [KEY]


def test_a_number_that_something_else_has_taken_meanwhile_is_left_alone(bucket: Hooked) -> None:
    writer = Writer(bucket, "w1")
    late = encode(some_batch(0, version=7))
    bucket.put(KEY, late)
    assert writer.put(some_batch()).key == key_of("w1", 1)
    assert bucket.get(KEY) == late


def test_a_writer_killed_at_any_moment_leaves_a_whole_object_or_none(bucket: Hooked) -> None:
    for moment in ("before", "after"):
        child = os.fork()
        if child == 0:
            setattr(bucket, moment, lambda key: os.kill(os.getpid(), signal.SIGKILL))
            Writer(bucket, "w1").put(some_batch())
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert [Reader(bucket).read(found).number for found in Reader(bucket).new()] == [0] * (moment == "after")
    assert Writer(bucket, "w1").number == 1


def test_readers_take_turns_between_workers_and_each_batch_once(bucket: Hooked) -> None:
    for worker, count in (("a", 3), ("b", 2)):
        writer = Writer(bucket, worker)
        for _ in range(count):
            writer.put(some_batch())
    reader = Reader(bucket)
    expected = [key_of("a", 0), key_of("b", 0), key_of("a", 1), key_of("b", 1), key_of("a", 2)]
    assert keys(reader) == expected
    for found in list(reader.new())[:3]:
        reader.pass_by(found)
    assert reader.cursor == {"a": 2, "b": 1}
    assert keys(Reader(bucket, reader.cursor)) == [key_of("a", 2), key_of("b", 1)]


def test_other_keys_are_not_looked_at(bucket: Hooked) -> None:
    for key in (
        "trajectories/w1/1.json.zst",
        "trajectories/w1/0000000001.json",
        "trajectories/x.y/0000000001.json.zst",
    ):
        bucket.put(key, b"")
    assert keys(Reader(bucket)) == []


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a.b", "x" * 64, "ä"])
def test_names_that_cannot_be_part_of_a_key_are_refused(bucket: Hooked, name: str) -> None:
    with pytest.raises(UsageError, match="is no name; give up to 63 of"):
        Writer(bucket, name)


def without(path: str) -> Callable[[dict[str, Any]], None]:
    *owners, last = path.split(".")

    def change(document: dict[str, Any]) -> None:
        del _at(document, owners)[last]

    return change


def setting(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *owners, last = path.split(".")

    def change(document: dict[str, Any]) -> None:
        owner = _at(document, owners)
        owner[int(last) if isinstance(owner, list) else last] = value

    return change


def _at(value: Any, path: list[str]) -> Any:
    for part in path:
        value = value[int(part) if isinstance(value, list) else part]
    return value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("run"), "field 'run'"),
        (setting("run", "x"), "field 'run'"),
        (setting("number", -1), "field 'number'"),
        (setting("number", 1), "holds batch 1 of worker 'w1'; it was put under another key"),
        (setting("worker", "w2"), "it was put under another key"),
        (setting("games", []), "field 'games'"),
        (setting("plays", 4), "6 games are not groups of 4"),
        (setting("games.1.game", 9), "plays from 0 on are not all of one game"),
        (setting("highest", 9), "versions 0 to 9 are not those of the spans"),
        (setting("games.0.reward", "1.0"), "field 'games.0.reward'"),
        (setting("games.0.turns", []), "field 'games.0.turns'"),
        (setting("games.0.turns.0.output", []), "field 'games.0.turns.0.output'"),
        (setting("games.0.turns.0.output.0", -1), "field 'games.0.turns.0.output.0'"),
        (setting("games.0.turns.0.output.0", 0.5), "field 'games.0.turns.0.output.0'"),
        (setting("games.0.turns.0.logprobs", [-1]), "1 logprobs for 3 output tokens"),
        (setting("games.0.turns.0.logprobs.0", 0.5), "field 'games.0.turns.0.logprobs.0'"),
        (setting("games.0.turns.0.spans", []), "field 'games.0.turns.0.spans'"),
        (setting("games.0.turns.0.spans.0.end", 2), "spans end at 2, the output has 3 tokens"),
        (setting("games.0.turns.0.spans.0.start", 1), "span 1-3 of version 0 does not go on from 0"),
        (setting("games.0.turns.0.spans.0.version", -1), "field 'games.0.turns.0.spans.0.version'"),
        (setting("games.0.turns.1.prompt.0", 40), "the prompt of turn 1 does not begin with all of turn 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: Callable[[dict[str, Any]], None], message: str) -> None:
    document = json.loads(some_batch().to_bytes())
    change(document)
    with pytest.raises(FormatError) as refused:
        decode(packed(document), KEY)
    assert KEY in refused.value.message
    assert message in refused.value.message


def test_spans_may_cross_versions_but_never_go_back() -> None:
    document = json.loads(some_batch(version=3).to_bytes())
    turn = document["games"][0]["turns"][0]
    turn["spans"] = [{"version": 3, "start": 0, "end": 2}, {"version": 5, "start": 2, "end": 3}]
    document["highest"] = 5
    assert decode(packed(document), KEY).games[0].versions == {3, 5}
    turn["spans"][0]["version"] = 6
    with pytest.raises(FormatError, match="span 2-3 of version 5 does not go on from 2"):
        decode(packed(document), KEY)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", FormatError, "is not a zstd frame"),
        (b"{}", FormatError, "is not a zstd frame"),
        (encode(some_batch())[:-7], FormatError, KEY),
        (encode(some_batch()) + b"x", FormatError, KEY),
        (packed([]), FormatError, "is not a JSON object"),
        (packed({}), FormatError, "format_version"),
        (packed({"format_version": 2}), UnsupportedError, "upgrade to read it"),
        (zstandard.ZstdCompressor().compress(b" " * (MAX_BYTES + 1)), LimitError, "MAX_"),
        (zstandard.ZstdCompressor().compress(b'{"run":1,"run":2}'), FormatError, "duplicate key 'run'"),
        (zstandard.ZstdCompressor().compress(b'{"reward": NaN}'), FormatError, "NaN is not JSON"),
        (zstandard.ZstdCompressor().compress(b"[" * 1000), FormatError, "nested deeper"),
    ],
)
def test_bytes_that_are_no_batch_are_refused(data: bytes, error: type[DeltaSyncError], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(data, KEY)


def test_a_stored_object_beyond_the_limit_is_not_fetched(bucket: Hooked, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put(KEY, encode(some_batch()))
    monkeypatch.setattr(trajectories, "MAX_STORED_BYTES", 100)
    reader = Reader(bucket)
    with pytest.raises(LimitError, match="more than the 100 allowed"):
        reader.read(next(iter(reader.new())))


def test_a_batch_too_large_to_be_read_is_not_written(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "MAX_BYTES", 1000)
    with pytest.raises(LimitError, match="MAX_BYTES"):
        Writer(bucket, "w1").put(some_batch())


def test_later_fields_are_ignored() -> None:
    document = json.loads(some_batch().to_bytes())
    document["colour"] = document["games"][0]["colour"] = "green"
    assert isinstance(decode(packed(document), KEY), Batch)
