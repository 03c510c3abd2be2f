"""Draft heads that belong to the run, on vLLM: they say and accept what a fresh load would, after each version."""

import json
from pathlib import Path

import pytest

from tests.e2e.draft_heads import ROLLBACK, VERSIONS
from tests.e2e.warm import see

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("offline")]
LEAST = 0.5
"""Share of drafts that are accepted where a head has learnt what its model has."""


@pytest.mark.slow
@pytest.mark.parametrize("head", ["mtp", "eagle", "eagle3", "medusa"])
def test_a_head_follows_with_its_model(tmp_path: Path, head: str) -> None:
    seen = see("tests.e2e.draft_heads", tmp_path, head, seconds=900)
    assert seen["first"]["accepted"] >= LEAST, "the head does too little to tell"
    assert seen["verdicts"] == [True] * VERSIONS
    assert seen["synced"] == seen["fresh"]
    assert len({json.dumps(said["weights"]) for said in (seen["first"], *seen["synced"])}) == VERSIONS + 1
    assert seen["rolled back"] == seen["fresh"][ROLLBACK - 1]
    assert seen["asleep"].startswith("busy: ")
    assert "wake it up" in seen["asleep"]
    assert seen["awake"] == seen["cold"] == seen["fresh"][-1]
    assert seen["same places"], "compiled code and captured graphs read where weights no longer are"
    assert seen["synced"][-1]["accepted"] >= LEAST > seen["stale"]["accepted"]
    assert seen["stale"]["tokens"] == seen["fresh"][-1]["tokens"]
