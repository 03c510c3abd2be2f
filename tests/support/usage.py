"""What this process has used its stores for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_delta_sync.bucket.middleware.usage import PROCESS


@contextmanager
def counted(*names: str) -> Iterator[Callable[[], list[float | int]]]:
    """Yield a function that returns what was added to these sums since the block began."""
    before = PROCESS.snapshot()
    yield lambda: [PROCESS.snapshot()[name] - before[name] for name in names]
