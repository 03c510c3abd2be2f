"""What a commit does to requests and caches, by ``pause_mode`` and ``prefix_cache``; docs/pause.md has the table."""

from typing import Any

import pytest

from tests.e2e.attached import BLOCK, MODES, PROMPT, SHORT, STARTED, TOKENS

pytestmark = pytest.mark.e2e

CACHED = PROMPT // BLOCK * BLOCK
NEAR = 1e-3
"""Log probabilities that differ by no more are those of the same weights and keys, summed in another order."""


def trial(attached: dict[str, Any], mode: str, cache: str) -> dict[str, Any]:
    seen: dict[str, Any] = attached[f"{mode}, {cache}"]
    assert (seen["version"], seen["verdict"]) == (seen["before"] + 1, True)
    return seen


def farthest(left: list[float], right: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("cache", ["reset", "keep"])
def test_keep_lets_requests_go_on_with_new_weights(attached: dict[str, Any], cache: str) -> None:
    seen = trial(attached, "keep", cache)
    for answer in seen["flying"]:
        assert (answer["ended"], len(answer["tokens"])) == ("length", TOKENS)
        (old, start, cut), (new, begin, end) = answer["spans"]
        assert (old, new) == (str(seen["before"]), str(seen["version"]))
        assert (start, begin, end) == (0, cut, TOKENS)
        assert cut >= STARTED


def test_reset_recomputes_what_running_requests_had_cached(attached: dict[str, Any]) -> None:
    """After the commit they say what the new weights say of all that was said before, from the first token on."""
    seen = trial(attached, "keep", "reset")
    answer, rest = seen["flying"][0], seen["rest"]
    assert rest["tokens"] == answer["tokens"][seen["cut"] :]
    assert farthest(rest["logprobs"], answer["logprobs"][seen["cut"] :]) < NEAR


def test_keep_leaves_running_requests_on_keys_of_the_old_weights(attached: dict[str, Any]) -> None:
    seen = trial(attached, "keep", "keep")
    answer, rest = seen["flying"][0], seen["rest"]
    # The first token after the commit was asked of both with the same tokens before it.
    assert abs(rest["logprobs"][0] - answer["logprobs"][seen["cut"]]) > NEAR


@pytest.mark.parametrize(("mode", "cache"), MODES)
def test_later_requests_meet_old_keys_only_where_they_are_kept(attached: dict[str, Any], mode: str, cache: str) -> None:
    seen = trial(attached, mode, cache)
    again, fresh = seen["again"], seen["fresh"]
    assert fresh["cached"] == 0
    # The first of two requests in flight had its prompt in the cache; it is computed anew after a reset.
    went_on = mode == "keep" and cache == "reset"
    assert again["cached"] == (CACHED if cache == "keep" or went_on else 0)
    distance = farthest(again["logprobs"], fresh["logprobs"])
    assert distance > NEAR if cache == "keep" else distance < NEAR


@pytest.mark.parametrize("cache", ["reset", "keep"])
def test_wait_finishes_requests_first(attached: dict[str, Any], cache: str) -> None:
    seen = trial(attached, "wait", cache)
    assert "draining" in seen["states"]
    for answer in seen["flying"]:
        assert (answer["ended"], len(answer["tokens"])) == ("length", TOKENS)
        assert answer["spans"] == [[str(seen["before"]), 0, TOKENS]]


@pytest.mark.parametrize("cache", ["reset", "keep"])
def test_abort_ends_requests(attached: dict[str, Any], cache: str) -> None:
    seen = trial(attached, "abort", cache)
    for answer in seen["flying"]:
        assert answer["ended"] == "abort"
        assert STARTED <= len(answer["tokens"]) < TOKENS
        assert answer["spans"] == [[str(seen["before"]), 0, len(answer["tokens"])]]
    # Those that waited for a place are ended too, before their first token.
    assert (seen["queued"]["ended"], seen["queued"]["tokens"], seen["queued"]["spans"]) == ("abort", [], [])


@pytest.mark.parametrize(("mode", "cache"), MODES)
def test_requests_that_come_meanwhile_wait_for_the_new_weights(attached: dict[str, Any], mode: str, cache: str) -> None:
    seen = trial(attached, mode, cache)
    late = seen["late"]
    if mode == "abort":
        # What was asked a moment before the pause is ended by it, like all that is queued.
        waited = [late] if late is not None and late["ended"] != "abort" else []
    else:
        waited = [seen["queued"], *([] if late is None else [late])]
    if mode == "wait":
        assert late is not None
    for answer in waited:
        assert (answer["ended"], len(answer["tokens"])) == ("length", SHORT)
        assert answer["spans"] == [[str(seen["version"]), 0, SHORT]]


def test_wait_has_a_bound_and_gives_up_the_commit(attached: dict[str, Any]) -> None:
    """The server goes on as before, and the commit succeeds once requests are through."""
    seen = attached["drain"]
    assert seen["error"].startswith("DrainError: requests in flight did not finish within wait_seconds = 0.05")
    status = seen["status"]
    assert status["last_error"]["kind"] == "drain"
    assert (status["state"], status["served"]["version"], status["lag"]) == ("idle", seen["before"], 1)
    answer = seen["answer"]
    assert (answer["ended"], len(answer["tokens"])) == ("length", TOKENS)
    assert answer["spans"] == [[str(seen["before"]), 0, TOKENS]]
    assert seen["reached"] == seen["version"]
