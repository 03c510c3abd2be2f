"""All that is put around stores, together: a bucket that fails now and then is still a dict."""

import random
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.support.store_faults import FlakyBucket, GatedBucket, Impatience, dressed
from vllm_delta_sync.bucket import Bucket, StoreOptions, open_bucket, retrying
from vllm_delta_sync.bucket.metered import Metrics
from vllm_delta_sync.bucket.retrying import RetryingBucket
from vllm_delta_sync.errors import (
    ConflictError,
    NotFoundError,
)

OPTIONS = StoreOptions(store_progress="off")
KEYS = st.sampled_from(["a/x", "a/y", "a-x", "b/x/deep", "HEAD.json"])
DATA = st.binary(max_size=40)


@pytest.fixture
def local(url: str) -> Bucket:
    return open_bucket(url)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to no pauses between tries."""
    monkeypatch.setattr(retrying, "FIRST_PAUSE_SECONDS", 1e-5)
    monkeypatch.setattr(retrying, "LONGEST_PAUSE_SECONDS", 1e-4)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("all_of_them", [False, True], ids=["retrying", "all wrappers"])
def test_a_store_that_breaks_off_at_random_is_still_a_dict(all_of_them: bool) -> None:
    failures = [0]

    class Machine(RuleBasedStateMachine):
        @initialize(seed=st.integers(0, 2**32))
        def begin(self, seed: int) -> None:
            self.folder = tempfile.TemporaryDirectory()
            self.file = Path(self.folder.name) / "file"
            self.flaky = FlakyBucket(open_bucket(Path(self.folder.name) / "bucket"), random.Random(seed))
            self.metrics = Metrics()
            self.bucket = (
                dressed(self.flaky, OPTIONS, self.metrics)
                if all_of_them
                else RetryingBucket(self.flaky, OPTIONS, self.metrics)
            )
            self.model: dict[str, bytes] = {}

        def teardown(self) -> None:
            if hasattr(self, "bucket"):
                self.bucket.close()
                self.folder.cleanup()
                assert self.metrics.snapshot()["retries"] == self.flaky.failures
                failures[0] += self.flaky.failures

        def source(self, data: bytes, as_file: bool) -> bytes | Path:
            if not as_file:
                return data
            self.file.write_bytes(data)
            return self.file

        @rule(key=KEYS, data=DATA, as_file=st.booleans())
        def put(self, key: str, data: bytes, as_file: bool) -> None:
            self.bucket.put(key, self.source(data, as_file))
            self.model[key] = data

        @rule(key=KEYS, data=DATA, as_file=st.booleans())
        def create(self, key: str, data: bytes, as_file: bool) -> None:
            try:
                self.bucket.put(key, self.source(data, as_file), if_absent=True)
                created = True
            except ConflictError:
                created = False
            # With the very bytes that are there already, nobody can tell afterwards whose they are.
            assert created == (key not in self.model) or self.model[key] == data
            self.model.setdefault(key, data)

        @rule(key=KEYS)
        def delete(self, key: str) -> None:
            self.bucket.delete(key)
            self.model.pop(key, None)

        @rule(key=KEYS, start=st.integers(0, 50), length=st.integers(0, 50))
        def read(self, key: str, start: int, length: int) -> None:
            if key in self.model:
                assert self.bucket.get(key) == self.model[key]
                assert self.bucket.get_range(key, start, length) == self.model[key][start : start + length]
                self.bucket.get_file(key, self.file)
                assert self.file.read_bytes() == self.model[key]
            else:
                with pytest.raises(NotFoundError):
                    self.bucket.get(key)

        @invariant()
        def lists_all(self) -> None:
            if hasattr(self, "bucket"):
                found = [(info.key, info.bytes) for info in self.bucket.list()]
                assert found == sorted((key, len(data)) for key, data in self.model.items())

    examples = settings().max_examples // (3 if all_of_them else 1)
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=15))
    assert failures[0] > 100, "nothing was tried"


def test_a_hanging_request_is_tried_again_through_all_wrappers(local: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = GatedBucket(local, "put")
    # Once it is given up there is time again.
    monkeypatch.setattr(retrying.logger, "warning", lambda *arguments: gated.begun["put"].clear())
    metrics = Metrics()
    bucket = dressed(gated, Impatience.while_set(gated.begun["put"]), metrics)
    bucket.put("HEAD.json", b"new", if_absent=True)
    assert local.get("HEAD.json") == b"new"
    assert metrics.snapshot()["retries"] == 1
    gated.let_go("put")
    bucket.put("HEAD.json", b"newer")
    assert local.get("HEAD.json") == b"newer"


def test_all_wrappers_serve_many_threads(local: Bucket) -> None:
    flaky = FlakyBucket(local, random.Random(1), share=0.1, most=2)
    with dressed(flaky, OPTIONS, Metrics()) as bucket:
        wrong: list[object] = []

        def work(number: int) -> None:
            for turn in range(5):
                data = b"%d %d" % (number, turn)
                bucket.put(f"key/{number}", data)
                if bucket.get(f"key/{number}") != data:
                    wrong.append((number, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(list(bucket.list("key/"))) == 20
