"""The bases of the errors, by which handlers decide what to do."""

import re
from pathlib import Path

from vllm_delta_sync import errors
from vllm_delta_sync.errors import DataError, DeltaSyncError, StoreError, error_kinds

ROOT = Path(__file__).parents[2]
BASES = tuple(
    getattr(errors, f"{name}Error")
    for name in ["Busy", "Conflict", "Data", "Engine", "Incomplete", "Model", "Notice", "Publish", "Store", "Usage"]
)
CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, DeltaSyncError)]


def kinds_below(base: type[DeltaSyncError]) -> set[str]:
    return {cls.kind for cls in CLASSES if issubclass(cls, base) and "kind" in vars(cls)}


def test_each_error_has_exactly_one_of_the_bases_that_handlers_tell_apart() -> None:
    for cls in CLASSES:
        if cls is not DeltaSyncError:
            assert sum(issubclass(cls, base) for base in BASES) == 1, cls


def test_what_counts_as_bad_data_and_what_as_a_failing_store() -> None:
    assert kinds_below(DataError) == {
        "not_found", "format", "limit", "digest", "unsupported", "chain", "fork", "replay", "signature", "expired",
        "fingerprint", "tensor", "base",
    }  # fmt: skip
    assert kinds_below(StoreError) == {"store", "access", "unavailable", "deadline"}


def test_only_subclasses_of_the_base_for_bad_data_are_raised() -> None:
    assert DataError not in error_kinds().values()
    for folder in ("vllm_delta_sync", "trainer_side"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"(?<!class )\bDataError\(", path.read_text(encoding="utf-8")), path
