"""What the codec benchmark measures against is lossless and counts right, so that its comparisons are fair."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import breakeven, charts, codec, peer_formats, synthetic
from benchmarks.bounds import bounds, histogram
from benchmarks.breakeven import Way, beats_below
from benchmarks.folding import folding
from benchmarks.formats import Own, join, split
from benchmarks.peer_formats import narrow, widened
from benchmarks.render import render
from benchmarks.tables import grid, value_of
from benchmarks.training_data import Pair, Sequence, Weights, changed_share

FORMATS = {format.name: format for format in codec.all_formats()}
SPECIAL = (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x0001, 0x3F80)


def weights(seed: int = 0) -> Weights:
    """Shapes that formats may trip over, in ascending order of names."""
    generator = np.random.default_rng(seed)
    shapes = {"a": (3, 5), "b": (7,), "c": (90_000, 1), "d": (2, 300, 4), "e": (1, 1), "f": (64, 2000)}
    return {name: generator.integers(0, 1 << 16, shape).astype(np.uint16) for name, shape in shapes.items()}


def moved(old: Weights) -> Weights:
    """First and last elements, a gap of more than 16 bits, every pattern of note; one tensor whole, one not at all."""
    new = {name: bits.copy() for name, bits in old.items()}
    new["a"] ^= 0x8001
    new["c"][[0, 70_000, 89_999]] ^= 1
    new["d"].reshape(-1)[: len(SPECIAL)] = SPECIAL
    new["e"] += 1
    sparse = np.random.default_rng(1).choice(new["f"].size, 900, replace=False)
    new["f"].reshape(-1)[sparse] += np.uint16(1)
    new["f"][-1, -1] = 0x7FC1
    return new


def pair_of(old: Weights, new: Weights) -> Pair:
    return Pair(changed_share(old, new), 1e-6, old, new)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_back_the_new_bits(name: str) -> None:
    old = weights()
    new = moved(old)
    before = {key: bits.copy() for key, bits in old.items()}
    codec.checked(FORMATS[name], pair_of(old, new))
    assert all(np.array_equal(old[key], before[key]) for key in old)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_carries_no_change(name: str) -> None:
    old = weights()
    codec.checked(FORMATS[name], pair_of(old, {key: bits.copy() for key, bits in old.items()}))


def test_a_format_that_loses_a_bit_is_found_out() -> None:
    class Forgetful(Own):
        def encode(self, old: Weights, new: Weights) -> bytes:
            return super().encode(old, {**new, "f": old["f"]})

    with pytest.raises(SystemExit, match="'f'"):
        codec.checked(Forgetful("packed"), pair_of(weights(), moved(weights())))


def test_integers_take_the_least_width_that_holds_them() -> None:
    assert narrow(np.array([0, 255]), 1, 2, 4).dtype == np.dtype("u1")
    assert narrow(np.array([0, 256]), 1, 2, 4).dtype == np.dtype("<u2")
    assert narrow(np.array([65536]), 2, 4).dtype == np.dtype("<u4")
    assert narrow(np.array([], np.int64), 2, 4).dtype == np.dtype("<u2")
    assert widened(narrow(np.array([7, 65536]), 2, 4).tobytes(), 2).tolist() == [7, 65536]
    parts: list[np.ndarray] = [np.arange(3, dtype=np.uint8), np.empty(0, np.uint16), np.array([513], "<u2")]
    assert split(join(parts)) == [b"\0\1\2", b"", b"\1\2"]


def test_gap_format_takes_four_bytes_for_a_change() -> None:
    old = {"w": np.zeros((64, 64), np.uint16)}
    new = {"w": old["w"].copy()}
    new["w"][:, 3] = 1
    size = len(peer_formats.Gaps("u16 gap + bf16", compress=False).encode(old, new))
    assert size == 64 * 4 + 3 * 4


def test_bounds_of_a_case_that_can_be_counted() -> None:
    # Exponent 0: one of two moved, by 1. Exponent 1: all of two moved, by 1 and 2.
    old = {"w": np.array([0x0010, 0x0011, 0x0080, 0x0081], np.uint16)}
    new = {"w": np.array([0x0010, 0x0012, 0x0081, 0x0083], np.uint16)}
    found = bounds(pair_of(old, new))
    share = 3 / 4
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share))
    assert found.position == pytest.approx(4 * entropy / 3 / 8)
    assert found.value == pytest.approx(-(2 / 3 * np.log2(2 / 3) + 1 / 3 * np.log2(1 / 3)) / 8)
    # Two bits say which of exponent 0 moved, two more by how much those of exponent 1 did.
    assert found.given_exponent == pytest.approx((2 + 2) / 3 / 8)
    assert found.with_mask is None
    rows = {row.power: (row.share, row.changed) for row in histogram(pair_of(old, new))}
    assert rows == {-127: (50, 50), -126: (50, 100)}


def test_the_last_mask_lowers_the_bound_where_it_tells() -> None:
    generator = np.random.default_rng(2)
    before = {"w": np.full(4096, 0x3F80, np.uint16)}
    flips = generator.random(4096) < 0.1
    old = {"w": before["w"] + flips.astype(np.uint16)}
    found = bounds(Pair(0.1, 1e-6, old, before, before))
    assert found.with_mask == pytest.approx(0, abs=1e-9)
    assert found.given_exponent > 0.5


def test_packed_keeps_above_its_bound_on_weights_that_adam_moved() -> None:
    shapes = synthetic.transformer_shapes(layers=1, hidden=256, inner=512, vocabulary=512)
    [pair] = synthetic.pairs(shapes, (0.02,))
    assert pair.share == pytest.approx(0.02, rel=0.15)
    limits = bounds(pair)
    assert limits.given_exponent < limits.independent
    size = len(codec.checked(Own("packed"), pair)) / codec.changed(pair)
    assert limits.independent < size < 2 * limits.independent


def test_links_decide_between_a_delta_and_whole_weights() -> None:
    delta, whole = Way("packed", compute=2.0, moved=0.01, crossings=2), Way("direct", 0.1, 1.0, 1)
    speed = beats_below(delta, whole, cores=1)
    assert delta.seconds(speed * 0.99) < whole.seconds(speed * 0.99)
    assert delta.seconds(speed * 1.01) > whole.seconds(speed * 1.01)
    assert beats_below(delta, whole, cores=4) == pytest.approx(4 * speed)
    assert beats_below(Way("packed", 0.05, 0.01, 2), whole, 1) == breakeven.MOST
    assert beats_below(Way("packed", 2.0, 0.9, 2), whole, 1) == breakeven.LEAST


def test_versions_follow_from_their_steps() -> None:
    base = {"a": np.zeros((2, 2), np.uint16), "b": np.zeros(3, np.uint16)}
    steps = [
        (np.array([1, 4], np.uint32), np.array([5, 6], np.uint16)),
        (np.array([1], np.uint32), np.array([7], np.uint16)),
    ]
    first, second = Sequence(base, steps).versions()
    assert first["a"].tolist() == [[0, 5], [0, 0]]
    assert first["b"].tolist() == [6, 0, 0]
    assert second["a"].tolist() == [[0, 7], [0, 0]]
    assert not base["a"].any()


def test_rows_become_tables_and_charts(tmp_path: Path) -> None:
    old = weights()
    new = moved(old)
    steps = []
    for here, there in ((old, new), (new, old)):
        was, flat = (np.concatenate([bits.reshape(-1) for bits in one.values()]) for one in (here, there))
        where = np.flatnonzero(flat != was)
        steps.append((where.astype(np.uint32), flat[where]))
    rows = folding("codec", Sequence(old, [*steps, steps[0]]), [Own("packed")])
    assert value_of(rows, "real dense 1%, 2 folded", "changed share") == 0
    for data in (codec.REAL, codec.SYNTHETIC):
        rows += codec.compare_formats(data, [(0.01, pair_of(old, new))], timed=False, repeats=1)
    text = "\n".join(codec.tables(rows + codec.published()))
    assert "| synthetic dense 1%, packed |" in text
    assert "| real dense 1%, NeMo-RL xor |" in text
    delta, whole, direct = Way("packed", 2.0, 0.01, 2), Way("full", 1.0, 1.0, 2), Way("direct", 0.1, 1.0, 1)
    crossings = breakeven.rows_of("dense 1%", [delta, whole, direct])
    assert "| dense 1% | " in "\n".join(breakeven.tables(crossings))
    # Drawing takes long; these two have the most in them.
    for draw in (charts.sizes, charts.breakeven):
        draw(rows + crossings, tmp_path / "chart.png")
        assert (tmp_path / "chart.png").stat().st_size > 5000


def test_a_grid_has_a_line_for_each_case() -> None:
    rows = [
        {"bench": "b", "case": "one", "metric": "size", "value": 2.0, "unit": "B"},
        {"bench": "b", "case": "one", "metric": "ratio", "value": 12345.6, "unit": "x", "peer": "raw"},
        {"bench": "b", "case": "two", "metric": "size", "value": 0.04567, "unit": "B"},
        {"bench": "b", "case": "three", "metric": "other", "value": 1.0, "unit": "B"},
    ]
    assert grid("case", rows, ("size", "/ raw", "absent")) == [
        "| case | size [B] | / raw [x] |",
        "|---|---:|---:|",
        "| one | 2 | 12,300 |",
        "| two | 0.0457 |  |",
    ]
    with pytest.raises(KeyError, match="'none'"):
        value_of(rows, "one", "none")


def test_sections_of_other_benchmarks_are_kept(tmp_path: Path) -> None:
    item = {"bench": "notice", "case": "direct", "metric": "p50", "value": 1.5, "unit": "ms"}
    (tmp_path / "notice.json").write_text(json.dumps({"machine": "this one", "rows": [item]}))
    before = (
        "# Benchmarks\n\nold head\n\n## apply\n\nkept\n\n### within\n\nkept too\n\n## notice\n\nold\n\n## zeta\n\nend\n"
    )
    text = render(tmp_path, before)
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## apply", "## notice", "## zeta"]
    assert "## apply\n\nkept\n\n### within\n\nkept too\n\n## notice\n" in text
    assert "Measured on: this one." in text
    assert "| direct | p50 | 1.5 | ms |  |\n\n## zeta\n\nend\n" in text
    assert "old" not in text
    (tmp_path / "notice.json").unlink()
    assert render(tmp_path, text) == text
