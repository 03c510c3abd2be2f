"""Nothing is compiled once a server's weights are identified: no staging waits for the compiler, and no pause."""

import json
from pathlib import Path

import pytest

from tests.support.compiled import IDENTIFY
from tests.support.running import run_python

EXPECTED = ("fingerprint_box", "commit_each", "merge_layers", "decode_tensors", "fill_tables")


@pytest.mark.parametrize(
    ("dtypes", "new_machine"),
    [
        pytest.param(["BF16"], False, id="bf16, with the compiler's cache"),
        pytest.param(["BF16"], True, id="bf16", marks=pytest.mark.slow),
        pytest.param(["BF16", "F32"], True, id="bf16 and f32", marks=pytest.mark.slow),
        pytest.param(["F8_E4M3", "BF16"], True, id="fp8", marks=pytest.mark.slow),
        pytest.param(["I8", "F32"], True, id="int8", marks=pytest.mark.slow),
        pytest.param(["F32", "I64"], True, id="f32 and int64", marks=pytest.mark.slow),
    ],
)
def test_all_is_compiled_when_weights_are_identified(tmp_path: Path, dtypes: list[str], new_machine: bool) -> None:
    """Versions of every codec, several merged, tensors in full, anchors, rollbacks, a repair: on a machine that has
    never compiled anything, and again with the compiler's cache."""
    cache = tmp_path / "cache"
    run_python("-m", "tests.support.compiled", "write", str(tmp_path), *dtypes)
    compiled: list[set[Path]] = []
    for _ in range(2 if new_machine else 1):
        own_cache = {"NUMBA_CACHE_DIR": str(cache)} if new_machine else {}
        run_python("-m", "tests.support.compiled", "follow", str(tmp_path), environment=own_cache)
        steps = json.loads((tmp_path / "compiled.json").read_text())
        loops = steps.pop(IDENTIFY)
        assert all(any(f".{name}(" in loop for loop in loops) for name in EXPECTED)
        assert len(steps) > 15
        assert {name: found for name, found in steps.items() if found} == {}
        compiled.append(set(cache.rglob("*.nbc")))
    assert compiled[0] == compiled[-1]
    assert len(compiled[0]) > len(EXPECTED) or not new_machine
