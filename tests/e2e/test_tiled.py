"""Codec ``tiled`` under tensor parallelism, on real vLLM: each rank decodes the tiles that it holds."""

import json
from pathlib import Path

import pytest

from tests.e2e.parallel import VERSIONS
from tests.e2e.test_parallel import run
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import UnsupportedError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


# Of 4096 rows each rank holds half. 4090 are padded before they are divided.
@pytest.mark.parametrize("vocabulary", ["4096", "4090"])
def test_two_ranks_follow_bit_for_bit(tmp_path: Path, vocabulary: str) -> None:
    said = run(tmp_path, "llama_wide", "2", "tiled", vocabulary)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [each["status"]["served"]["version"] for each in seen] == [*range(VERSIONS + 1), 2]
    for each in seen[1:]:
        assert [rank["different"] for rank in each["equal"]] == [[], []], each["status"]["served"]
        assert all(rank["compared"] > 10 for rank in each["equal"])
    assert all(each["verify"]["verdict"] for each in seen[1:-1])
    assert seen[-2]["outputs"] != seen[0]["outputs"], "the versions do not differ enough to tell"
    assert "is rebuilt from the bucket" not in said
    with open_run(str(tmp_path / "run")) as published:
        for manifest in list(published.log())[1:]:
            # Not all of its tiles are plain.
            with pytest.raises(UnsupportedError, match="only with the weights of its base version"):
                published.changes(manifest)
