"""A publisher that takes over a run in which strangers' manifests lie, and what none commits."""

import json

import pytest

from tests.support.publishing import assert_holds, keys, snapshot
from tests.trainer.test_resume import published, step, tensors
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import LimitError
from vllm_delta_sync.wire.canonical import dump_canonical
from vllm_delta_sync.wire.manifest import HEAD_KEY, Manifest, version_key


@pytest.mark.parametrize("strays", [(9_999_999_999,), (6, 8, 9_999_999_999)])
def test_manifests_of_strangers_beyond_a_gap_stop_nobody(strays: tuple[int, ...], url: str) -> None:
    live, _ = published(url, 3)
    bucket = open_bucket(url)
    for number in strays:
        bucket.put(version_key(number), b"{}")
    bucket.put(HEAD_KEY, b"{}")
    with Publisher(live, url) as publisher:
        assert publisher.version == 3
        step(live, 40)
        assert publisher.publish(step=100, wait=True).version == 4
    assert [manifest.base_version for manifest in open_run(url).log()] == [None, 0, 1, 2, 3]
    assert_holds(open_run(url), 4, snapshot(live))


def test_a_manifest_that_head_names_and_that_is_lost_is_no_gap(url: str) -> None:
    """The version that lies behind it takes no part in what is begun anew."""
    live, _ = published(url, 5)
    bucket = open_bucket(url)
    head = json.loads(bucket.get(HEAD_KEY))
    lost = Manifest.from_bytes(bucket.get(version_key(4)))
    bucket.put(HEAD_KEY, dump_canonical({**head, "version": 4, "manifest": lost.digest}))
    bucket.delete(version_key(4))
    with Publisher(live, url) as publisher:
        assert publisher.version == 6
    assert open_run(url).head().version == 6


def test_a_manifest_larger_than_readers_take_is_not_committed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("trainer_side.start.document_limit", lambda table: 200)
        with pytest.raises(LimitError, match=r"0000000000.*document_limit"):
            Publisher(tensors(), url)
    assert keys(url) == set()
    live, _ = published(url, 1)
    with Publisher(live, url) as publisher:
        writer, run = publisher._committer.writer, open_run(url)
        assert writer._document_limit == run.document_limit
        monkeypatch.setattr(writer, "_document_limit", 200)
        before = keys(url)
        behind = run.head().model_copy(update={"version": 2})
        with pytest.raises(LimitError, match=r"0000000002.*document_limit"):
            writer.commit(behind)
        assert keys(url) == before
