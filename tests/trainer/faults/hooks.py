"""Former place of ``tests.support.publishers``."""

from tests.support.publishers import FailAt as FailAt
from tests.support.publishers import Hooked as Hooked
from tests.support.publishers import Trainer as Trainer
from tests.support.publishers import nothing as nothing
from tests.support.publishers import small_trainer as small_trainer
