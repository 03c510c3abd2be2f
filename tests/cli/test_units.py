"""Durations and sizes: what commands and settings take, by one parser each."""

import pytest

from tests.support.commands import kind
from vllm_delta_sync import units
from vllm_delta_sync.cli.text import times
from vllm_delta_sync.errors import SettingsError
from vllm_delta_sync.settings import load_settings


def test_durations() -> None:
    found = {"0": 0, "2": 2, "0.5": 0.5, "500ms": 0.5, "90s": 90, "15m": 900, "1.5h": 5400, "7d": 604800, "1e3": 1000}
    assert {text: units.duration(text) for text in found} == found
    assert units.duration("2 H") == 7200
    assert units.duration("999999d") == units.duration("1e18") == units.LONGEST_SECONDS


def test_sizes() -> None:
    found = {
        "0": 0,
        "4096": 4096,
        "500MB": 500_000_000,
        "5gb": 5 * 10**9,
        "8GiB": 8 * 2**30,
        "1.5kB": 1500,
        "3 KiB": 3072,
    }
    assert {text: units.byte_count(text) for text in found} == found


def test_figures_have_no_exponent() -> None:
    found = {0.0: "0", 0.00123: "0.00123", 12.345: "12.3", 999.6: "1,000", 8000.4: "8,000", 1234567.0: "1,234,567"}
    assert {value: units.rounded(value) for value in found} == found
    assert (times(2_000_000, 1000), times(641, 1)) == ("2,000x", "641x")


@pytest.mark.parametrize(
    "text", ["", "-1", "s", "1x", "1 min", "nan", "inf", "1_0", "٣", "1s2", "1.s", " 1", "1e999", "1\n"]
)
def test_what_is_neither(text: str) -> None:
    assert (units.duration(text), units.byte_count(text)) == (None, None)
    for command in (
        ("gc", "--keep-for"),
        ("fleet", "wait", "--timeout"),
        ("doctor", "--bytes"),
        ("export", "--to", "x", "--shard-bytes"),
    ):
        assert kind(2, *command[:-1], f"{command[-1]}={text}", "--bucket", "x") == "usage"


def test_settings_take_the_same() -> None:
    given = {
        "bucket": "/x",
        "poll_seconds": "500ms",
        "cache_bytes": "200GB",
        "heartbeat_seconds": "2m",
        "store_deadline": "1m",
    }
    settings = load_settings(given, {"DELTA_SYNC_UNDO_BYTES": "1GiB"})
    assert (settings.poll_seconds, settings.cache_bytes, settings.heartbeat_seconds) == (0.5, 200 * 10**9, 120)
    assert (settings.store_deadline, settings.undo_bytes) == (60, 2**30)
    for name, text in (("poll_seconds", "2x"), ("cache_bytes", "2h"), ("poll_seconds", "2h")):
        with pytest.raises(SettingsError, match=name):
            load_settings({"bucket": "/x", name: text}, {})
