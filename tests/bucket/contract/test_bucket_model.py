"""Any sequence of calls leaves a bucket as it would leave a dict."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.bucket.contract.conftest import reachable
from tests.bucket.contract.crowd import patient
from tests.support.stores import STORES
from vllm_delta_sync.errors import ConflictError, NotFoundError

KEYS = st.sampled_from(["a/x", "a/y", "a-x", "a.x", "b/x/deep", "b/x/deeper", "HEAD.json", "b-x"])
DATA = st.binary(max_size=40)


@pytest.mark.hypothesis
@pytest.mark.parametrize("place", sorted(STORES))
def test_a_bucket_is_a_sorted_dict(place: str) -> None:
    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.stack = ExitStack()
            folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            store = self.stack.enter_context(reachable(place, folder))
            self.bucket = self.stack.enter_context(patient(store.url))
            self.model: dict[str, bytes] = {}

        def teardown(self) -> None:
            self.stack.close()

        @rule(key=KEYS, data=DATA)
        def put(self, key: str, data: bytes) -> None:
            self.bucket.put(key, data)
            self.model[key] = data

        @rule(key=KEYS, data=DATA)
        def create(self, key: str, data: bytes) -> None:
            try:
                self.bucket.put(key, data, if_absent=True)
                created = True
            except ConflictError:
                created = False
            assert created == (key not in self.model)
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
                assert self.bucket.stat(key).bytes == len(self.model[key])
            else:
                for call in (self.bucket.get, self.bucket.stat, lambda key: self.bucket.get_range(key, start, length)):
                    with pytest.raises(NotFoundError):
                        call(key)

        @rule(prefix=st.sampled_from(["a", "a/", "b/x", "b/x/deep", "H", "c"]))
        def list_prefix(self, prefix: str) -> None:
            found = [info.key for info in self.bucket.list(prefix)]
            assert found == sorted(key for key in self.model if key.startswith(prefix))

        @invariant()
        def lists_all(self) -> None:
            found = [(info.key, info.bytes) for info in self.bucket.list()]
            assert found == sorted((key, len(data)) for key, data in self.model.items())

    # What goes over a network takes ten times as long.
    share = 1 if place in ("local", "memory") else 4
    examples = settings().max_examples // share
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=20))
