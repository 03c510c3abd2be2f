"""Codec ``context`` under tensor parallelism, on real vLLM: each rank decodes the tiles that it holds."""

import json
from pathlib import Path

import pytest

from tests.e2e.parallel import VERSIONS
from tests.e2e.test_parallel import run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


# Of 320 rows each rank holds half. 300 are padded before they are cut: then a tile is held in part.
@pytest.mark.parametrize(("vocabulary", "rebuilt"), [("320", False), ("300", True)])
def test_two_ranks_follow_bit_for_bit(tmp_path: Path, vocabulary: str, rebuilt: bool) -> None:
    said = run(tmp_path, "llama", "2", "context", vocabulary)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [each["status"]["served"]["version"] for each in seen] == [*range(VERSIONS + 1), 2]
    for each in seen[1:]:
        assert [rank["different"] for rank in each["equal"]] == [[], []], each["status"]["served"]
        assert all(rank["compared"] > 10 for rank in each["equal"])
    assert all(each["verify"]["verdict"] for each in seen[1:-1])
    assert seen[-2]["outputs"] != seen[0]["outputs"], "the versions do not differ enough to tell"
    assert ("is rebuilt from the bucket" in said) is rebuilt
