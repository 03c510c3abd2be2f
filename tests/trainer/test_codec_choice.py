"""What ``codec="auto"`` chooses, from what, and when it tells."""

import logging
import math

import numpy as np
import pytest

from trainer_side.codec_choice import (
    CONTEXT_SHARE,
    ENCODE,
    LEAST_CHANGED,
    VALUE_BYTES,
    CodecChoice,
    Known,
    Work,
    better,
    packed_bytes,
    seconds,
)
from vllm_delta_sync.wire.changes import Changes, Full, Sparse
from vllm_delta_sync.wire.delta import Codec
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

KB, MB, GB = 1e3, 1e6, 1e9
FAST = 1000 * MB


def work(elements: float, share: float) -> Work:
    return Work(int(elements), int(elements * share))


def both(rate: float) -> Known:
    return Known(rate, rate)


# Slower than about a megabyte per second, ``context`` wins; how much slower depends on how many elements are read for
# each that changed, and hardly on the size of the model.
@pytest.mark.parametrize("elements", [1e7, 6e8, 7e9, 7e11])
@pytest.mark.parametrize(
    ("rate", "share", "expected"),
    [
        (20 * KB, 0.001, "context"), (20 * KB, 0.01, "context"), (20 * KB, 0.1, "context"),
        (100 * KB, 0.0001, "packed"), (100 * KB, 0.003, "context"), (100 * KB, 0.05, "context"),
        (300 * KB, 0.001, "packed"), (300 * KB, 0.01, "context"), (300 * KB, 0.1, "context"),
        (1 * MB, 0.001, "packed"), (1 * MB, 0.01, "packed"), (1 * MB, 0.1, "context"), (3 * MB, 0.1, "packed"),
        (10 * MB, 0.01, "packed"), (100 * MB, 0.01, "packed"), (10 * GB, 1.0, "packed"),
    ],
)  # fmt: skip
def test_the_link_decides(elements: float, rate: float, share: float, expected: Codec) -> None:
    assert better("packed", work(elements, share), both(rate)) == expected


def test_what_takes_no_time_anyway_stays_packed() -> None:
    small = work(60_000, 0.05)
    assert better("packed", small, both(100 * KB)) == "packed"
    assert better("packed", small, both(1 * KB)) == "context"


def test_what_was_chosen_stays_until_it_is_clearly_worse() -> None:
    one = work(1e9, 0.01)
    rates = np.geomspace(10 * KB, 10 * MB, 200)
    enter = max(rate for rate in rates if better("packed", one, both(rate)) == "context")
    stay = max(rate for rate in rates if better("context", one, both(rate)) == "context")
    assert stay > 1.5 * enter
    between = both(math.sqrt(enter * stay))
    assert (better("packed", one, between), better("context", one, between)) == ("packed", "context")


def test_it_takes_a_fifth_less_time_to_begin_with_context() -> None:
    one = work(1e9, 0.01)
    for rate in np.geomspace(10 * KB, 10 * MB, 50):
        known = both(rate)
        saved = 1 - seconds("context", one, known) / seconds("packed", one, known)
        assert (better("packed", one, known) == "context") == (saved >= 0.2)


def test_slow_receivers_count_as_much_as_slow_uploads() -> None:
    one = work(1e9, 0.01)
    assert better("packed", one, Known(up=FAST, down=100 * KB)) == "context"
    assert better("packed", one, Known(up=100 * KB, down=FAST)) == "context"
    assert better("packed", one, Known(up=FAST, down=FAST)) == "packed"


def test_a_slow_processor_speaks_against_context() -> None:
    one = work(1e9, 0.01)
    assert better("packed", one, Known(100 * KB, 100 * KB, slowness={"packed": 20.0})) == "packed"
    assert better("packed", one, Known(100 * KB, 100 * KB, slowness={"packed": 20.0, "context": 1.0})) == "context"


def test_positions_take_their_entropy() -> None:
    assert packed_bytes(Work(1000, 1000), 0.25) == 250
    assert packed_bytes(Work(1000, 500), 0.0) == pytest.approx(1000 / 8)
    assert packed_bytes(Work(2**30, 2**20), 0.0) == pytest.approx(2**20 * (10 + math.log2(math.e)) / 8, rel=1e-3)


def test_full_tensors_are_no_work() -> None:
    table = TensorTable([TensorSpec(name, "BF16", (size,)) for name, size in (("a", 100), ("b", 50), ("c", 7))])
    positions, data = np.array([1, 5, 2]), np.ones(3, np.uint16)
    group = Sparse("BF16", np.array([0, 2], np.uint32), np.array([2, 1]), positions, data, relative=True)
    changes = Changes([group], [Full(1, np.zeros(50, np.uint16))])
    assert Work.of(changes, table) == Work(107, 3)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    caplog.clear()
    return lines


def test_the_log_says_why_when_it_is_chosen_and_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    choice, one = CodecChoice(), work(1e9, 0.01)
    assert [choice.choose(version, one, None) for version in (1, 2)] == ["packed", "packed"]
    assert said(caplog) == ["codec 'auto': 'packed' from version 1 on: no upload was measured yet"]
    assert [choice.choose(version, one, FAST) for version in (3, 4)] == ["packed", "packed"]
    [line] = said(caplog)
    assert line.startswith(
        "codec 'auto': 'packed' from version 3 on: 10,000,000 of 1,000,000,000 elements changed; at 1e+03 MB/s up and "
        "1e+03 MB/s down new weights take about 0."
    )
    assert [choice.choose(version, one, 50 * KB) for version in (5, 6)] == ["context", "context"]
    [line] = said(caplog)
    assert line.startswith("codec 'auto': 'context' from version 5 on:")
    assert "at 0.05 MB/s up and 0.05 MB/s down" in line
    assert choice.choose(7, one, FAST) == "packed"
    assert "'packed' from version 7 on" in said(caplog)[0]


def test_a_version_without_changes_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    choice, one = CodecChoice(), work(1e9, 0.01)
    choice.choose(1, one, 50 * KB)
    said(caplog)
    assert choice.choose(2, Work(0, 0), FAST) == "packed"
    assert choice.choose(3, one, 50 * KB) == "context"
    assert said(caplog) == []


def test_receivers_rate_replaces_the_publishers() -> None:
    one = work(1e9, 0.01)
    assert CodecChoice(receivers=100 * KB).choose(1, one, FAST) == "context"
    assert CodecChoice(receivers=FAST).choose(1, one, FAST) == "packed"


def test_what_encoding_takes_is_learnt_from_the_last_versions() -> None:
    one = work(1e9, 0.01)
    usual = {codec: cost.seconds(one) for codec, cost in ENCODE.items()}
    size = int(packed_bytes(one, VALUE_BYTES))
    choice = CodecChoice()
    choice.learn("packed", one, size, usual["packed"])
    assert choice.choose(1, one, 100 * KB) == "context"
    for _ in range(3):
        choice.learn("context", one, int(CONTEXT_SHARE * size), 100 * usual["context"])
    assert choice.choose(2, one, 100 * KB) == "packed", "it takes this machine too long"
    for _ in range(5):
        choice.learn("context", one, int(CONTEXT_SHARE * size), usual["context"])
    assert choice.choose(3, one, 100 * KB) == "context"
    for _ in range(5):
        choice.learn("context", one, int(0.95 * size), usual["context"])
    assert choice.choose(4, one, 100 * KB) == "packed", "it saves too little on such weights"


def test_one_odd_measurement_decides_nothing() -> None:
    one = work(1e9, 0.01)
    choice = CodecChoice()
    usual = ENCODE["packed"].seconds(one)
    for slowness in (1, 1, 1000, 1):
        choice.learn("packed", one, int(packed_bytes(one, VALUE_BYTES)), slowness * usual)
    assert choice.choose(1, one, 100 * KB) == "context"


def test_small_versions_teach_nothing() -> None:
    one = work(1e9, 0.01)
    choice = CodecChoice()
    choice.learn("packed", Work(10**6, LEAST_CHANGED - 1), 10**9, 3600.0)
    assert choice.choose(1, one, 100 * KB) == "context"
