"""Start straight from the bucket: ``load_format="delta_sync"`` against a fresh load of the head's checkpoint.

A server that starts so, from an anchor, and follows: tests/e2e/test_bucket_alone.py. An output head that the folder
lacks: tests/e2e/test_tied_heads.py.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_features import DRAFT_MODEL, EAGER, follow

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("offline")]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"cold": "moved", "family": "llama"}, id="moved"),
        pytest.param({"cold": "bare", "speculative_config": DRAFT_MODEL}, id="draft"),
    ],
)
def test_cold_start_is_a_fresh_load_of_the_head(tmp_path: Path, options: dict[str, Any]) -> None:
    seen = follow(tmp_path, {**EAGER, **options})
    assert seen["cold"] == seen["fresh"]
    assert seen["loaded"] == [True, True, True]
    patched, fresh, cold = seen["weights"]
    assert patched == fresh == cold
    if "drafts" in seen:
        # The draft is no part of the run: it comes from its own folder.
        assert seen["drafts"][0] == seen["drafts"][1] == seen["drafts"][2] != cold
