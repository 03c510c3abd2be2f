"""Any sequence of calls leaves a bucket as it would leave a dict."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.bucket.contract.conftest import reachable
from tests.bucket.contract.crowd import patient
from tests.bucket.dict_machine import DictMachine
from tests.support.stores import STORES


@pytest.mark.hypothesis
@pytest.mark.parametrize("place", sorted(STORES))
def test_a_bucket_is_a_sorted_dict(place: str) -> None:
    class Machine(DictMachine):
        def __init__(self) -> None:
            super().__init__()
            store = self.stack.enter_context(reachable(place, self.folder))
            self.bucket = self.stack.enter_context(patient(store.url))

    # What goes over a network takes ten times as long.
    share = 1 if place in ("local", "memory") else 6
    examples = settings().max_examples // share
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=20))
