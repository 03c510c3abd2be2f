"""The bucket of a dry run: reads another, and keeps what is written to itself."""

from pathlib import Path

import pytest

from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.bucket.middleware.dry_run import DryRunBucket
from vllm_delta_sync.errors import ConflictError, NotFoundError


def test_the_overlay_of_a_dry_run_is_a_bucket(tmp_path: Path) -> None:
    inner = open_bucket(tmp_path / "inner")
    for key in ("a", "b/c", "d"):
        inner.put(key, b"inner")
    with DryRunBucket(inner) as overlay:
        overlay.put("b/c", b"outer!")
        overlay.put("e", b"new", if_absent=True)
        overlay.delete("a")
        with pytest.raises(ConflictError):
            overlay.put("d", b"x", if_absent=True)
        assert [(item.key, item.bytes) for item in overlay.list()] == [("b/c", 6), ("d", 5), ("e", 3)]
        assert (overlay.get("b/c"), overlay.get("d"), overlay.get_range("e", 1, 9)) == (b"outer!", b"inner", b"ew")
        assert overlay.stat("b/c").bytes == 6
        for call in (overlay.get, overlay.stat):
            with pytest.raises(NotFoundError):
                call("a")
        overlay.put("a", b"again", if_absent=True)
        assert overlay.get("a") == b"again"
    assert [(item.key, item.bytes) for item in inner.list()] == [("a", 5), ("b/c", 5), ("d", 5)]
