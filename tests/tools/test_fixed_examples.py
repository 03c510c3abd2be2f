"""What a test draws depends on the test and the seed alone, so a change is judged by the same examples everywhere."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.running import ROOT, run_python

DRAW = """
import importlib, sys
import tests.conftest
from hypothesis import given, settings, strategies as st

before, *during = sys.argv[1:]
importlib.import_module(before)
STRATEGIES = st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.integers(0, 10**6))

for profile in ("quick", "full"):
    settings.load_profile(profile)
    drawn = []

    def draw(values):
        # What happens to be imported while a test runs counts too.
        if len(drawn) == 10 and during:
            importlib.import_module(during.pop())
        drawn.append(values)
        print(profile, ascii(values))

    settings(max_examples=60)(given(st.tuples(*STRATEGIES))(draw))()
"""
CONSTANTS = "".join(f"N{n} = {n * 3737}, {n}.5, 'constant {n}', b'constant {n}'\n" for n in range(200))


@pytest.mark.slow
def test_modules_that_happen_to_be_loaded_change_no_example(tmp_path: Path) -> None:
    """Hypothesis would draw their constants. ``tests/support/fixed_examples.py`` stops it."""
    names = ["here", "later", "much_later"]
    for name in names:
        (tmp_path / f"{name}.py").write_text(CONSTANTS.replace("constant", name))

    def drawn(hash_seed: int, *imported: str) -> list[str]:
        environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONHASHSEED": str(hash_seed)}
        return run_python("-c", DRAW, *imported, environment=environment).stdout.splitlines()

    few = drawn(1, "os")
    assert len(few) == 120
    assert len(set(few)) > 90
    assert few == drawn(2, *names)


DRAWN: set[tuple[float, ...]] = set()


@given(st.integers())
def test_global_generators_start_alike_for_each_example(number: int) -> None:
    DRAWN.add((random.random(), np.random.random(), torch.rand(()).item()))
    assert len(DRAWN) == 1


@pytest.mark.parametrize("time", ["first", "second"])
def test_global_generators_start_alike_for_each_test(time: str, campaign_seed: int | None) -> None:
    seed = campaign_seed or 0
    assert (random.random(), np.random.random(), torch.rand(()).item()) == (
        random.Random(seed).random(),
        np.random.RandomState(seed).random(),
        torch.rand((), generator=torch.Generator().manual_seed(seed)).item(),
    )
