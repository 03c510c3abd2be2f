"""The background thread never touches weights of an engine that sleeps."""

from tests.support.running import run_python


def test_no_read_touches_weights_that_a_sleep_has_taken_away() -> None:
    """A touch would end the process with SIGSEGV."""
    run_python("-m", "tests.tools.guarded_weights")
