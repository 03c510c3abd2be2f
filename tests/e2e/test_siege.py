"""Every row of docs/attacks.md, carried out: nothing unsigned is applied, nobody is blocked, nobody is left behind."""

import pytest

from tests.e2e.siege import ATTACKS
from tests.e2e.siege.world import Attack, Siege, execute_plan

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("signed")]
ROWS = [
    pytest.param(attack, id=attack.name.replace(" ", "-"), marks=[] if attack.quick else [pytest.mark.slow])
    for attack in ATTACKS
]


@pytest.mark.parametrize("attack", ROWS)
def test_attack(siege: Siege, attack: Attack) -> None:
    execute_plan(siege, attack)
