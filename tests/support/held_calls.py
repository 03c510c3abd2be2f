"""Calls that hang until a test lets them go on."""

import threading
from typing import Any

import pytest


class HeldCalls:
    """Calls of a function of an object or a module: ``reached`` is set by the first, none goes on before ``open`` is.

    Args:
        owner: what the function is an attribute of. name: its name there.
    """

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        call = getattr(owner, name)

        def held(*arguments: Any, **named: Any) -> Any:
            self.reached.set()
            assert self.open.wait(120)
            return call(*arguments, **named)

        patch.setattr(owner, name, held)
