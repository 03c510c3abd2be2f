"""Every row of docs/attacks.md, carried out: nothing unsigned is applied, nobody is blocked, nobody is left behind."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.e2e.siege import ATTACKS
from tests.e2e.siege.world import Attack, Siege, carry_out

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    with ExitStack() as stack:
        yield Siege(tmp_path_factory.mktemp("siege"), stack)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_attack(siege: Siege, attack: Attack) -> None:
    carry_out(siege, attack)
