"""``fix_examples`` makes what a test draws depend on it and the seed alone, not on what was imported or ran before.

``tests/tools/test_fixed_examples.py`` shows it, and fails if a release of Hypothesis ignores this.
"""

import random
from unittest import mock

import numpy as np
import torch
from hypothesis import register_random
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

_NONE = Constants()


class _TorchRandom:
    """torch's global generator, in the form that Hypothesis takes."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_TORCH = _TorchRandom()
"""Hypothesis holds only a weak reference."""


def fix_examples() -> None:
    """Stop Hypothesis from drawing constants of loaded modules, and let it seed torch for each example.

    Hypothesis collects the constants of whatever local modules are loaded, and has no setting against it.

    Raises:
        AttributeError: this release of Hypothesis collects them elsewhere.
    """
    mock.patch.object(providers, "_get_local_constants", new=_no_constants).start()
    register_random(_TORCH)


def _no_constants() -> Constants:
    return _NONE


def seed_generators(seed: int) -> None:
    """Seed the global generators, for what draws without Hypothesis."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
