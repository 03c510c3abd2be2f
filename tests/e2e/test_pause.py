"""What a commit does to requests and caches, by ``pause_mode`` and ``prefix_cache``; docs/pause.md has the table."""

from typing import Any

import pytest

from tests.e2e.attached import BLOCK, OTHERS, PROMPT, SHORT, SOME, STARTED, TOKENS

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("attached")]

CACHED = PROMPT // BLOCK * BLOCK
NEAR = 2**-7
"""Log probabilities that differ by no more are those of the same weights and keys, summed in another order.

A sum in another order may round a bfloat16 the other way: a logit below 1 then moves by 2^-8, as was seen of one token
among others that moved by 10^-4. Keys of older weights move them by 0.017 or more here.
"""


MODES = [*SOME, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]


@pytest.fixture
def seen(request: pytest.FixtureRequest, mode: str, cache: str) -> dict[str, Any]:
    """What became of requests with that mode and setting."""
    fixture = "attached" if (mode, cache) in SOME else "attached_again"
    seen: dict[str, Any] = request.getfixturevalue(fixture)[f"{mode}, {cache}"]
    assert (seen["version"], seen["verdict"]) == (seen["before"] + 1, True)
    return seen


def cases(*modes: str) -> Any:
    """Parameters of the fixture ``seen``: with each cache setting, the modes named, or all."""
    chosen = [each for each in MODES if not modes or (each if isinstance(each, tuple) else each.values)[0] in modes]
    return pytest.mark.parametrize(("mode", "cache"), chosen)


def farthest(left: list[float], right: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(left, right, strict=True))


@cases("keep")
def test_keep_lets_requests_go_on_with_new_weights(seen: dict[str, Any]) -> None:
    for answer in seen["flying"]:
        assert (answer["ended"], len(answer["tokens"])) == ("length", TOKENS)
        (old, start, cut), (new, begin, end) = answer["spans"]
        assert (old, new) == (str(seen["before"]), str(seen["version"]))
        assert (start, begin, end) == (0, cut, TOKENS)
        assert cut >= STARTED


@pytest.mark.parametrize(("mode", "cache"), [("keep", "reset")])
def test_reset_recomputes_what_running_requests_had_cached(seen: dict[str, Any]) -> None:
    """After the commit they say what the new weights say of all that was said before, from the first token on."""
    answer, rest = seen["flying"][0], seen["rest"]
    assert rest["tokens"] == answer["tokens"][seen["cut"] :]
    assert farthest(rest["logprobs"], answer["logprobs"][seen["cut"] :]) < NEAR


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "cache"), [("keep", "keep")])
def test_keep_leaves_running_requests_on_keys_of_the_old_weights(seen: dict[str, Any]) -> None:
    answer, rest = seen["flying"][0], seen["rest"]
    # The first token after the commit was asked of both with the same tokens before it.
    assert abs(rest["logprobs"][0] - answer["logprobs"][seen["cut"]]) > NEAR


@pytest.mark.parametrize(("mode", "cache"), [("keep", "salt")])
def test_salt_leaves_running_requests_on_their_keys_which_no_other_finds(seen: dict[str, Any]) -> None:
    answer, rest = seen["flying"][0], seen["rest"]
    assert abs(rest["logprobs"][0] - answer["logprobs"][seen["cut"]]) > NEAR
    # It starts with all that the running request has said until the commit; only a later request's blocks are found.
    assert rest["cached"] == CACHED


@pytest.mark.parametrize(("mode", "cache"), [("keep", "salt")])
def test_after_a_rollback_no_block_of_another_commit_is_found(seen: dict[str, Any]) -> None:
    back, again, fresh = seen["back"], seen["back again"], seen["back fresh"]
    assert [back["spans"], fresh["spans"]] == [[[str(seen["before"]), 0, SHORT]]] * 2
    assert (back["cached"], again["cached"], fresh["cached"]) == (0, CACHED, 0)
    assert back["tokens"] == fresh["tokens"]
    assert back["logprobs"] == fresh["logprobs"] != seen["fresh"]["logprobs"]


@cases()
def test_later_requests_meet_old_keys_only_where_they_are_kept(seen: dict[str, Any], mode: str, cache: str) -> None:
    again, fresh = seen["again"], seen["fresh"]
    assert fresh["cached"] == 0
    # The first of two requests in flight had its prompt in the cache; it is computed anew after a reset.
    went_on = mode == "keep" and cache == "reset"
    assert again["cached"] == (CACHED if cache == "keep" or went_on else 0)
    distance = farthest(again["logprobs"], fresh["logprobs"])
    assert distance > NEAR if cache == "keep" else distance < NEAR


@cases("wait")
def test_wait_finishes_requests_first(seen: dict[str, Any]) -> None:
    assert "draining" in seen["states"]
    for answer in seen["flying"]:
        assert (answer["ended"], len(answer["tokens"])) == ("length", TOKENS)
        assert answer["spans"] == [[str(seen["before"]), 0, TOKENS]]


@cases("abort")
def test_abort_ends_requests(seen: dict[str, Any]) -> None:
    for answer in seen["flying"]:
        assert answer["ended"] == "abort"
        assert STARTED <= len(answer["tokens"]) < TOKENS
        assert answer["spans"] == [[str(seen["before"]), 0, len(answer["tokens"])]]
    # Those that waited for a place are ended too, before their first token.
    assert (seen["queued"]["ended"], seen["queued"]["tokens"], seen["queued"]["spans"]) == ("abort", [], [])


@cases()
def test_requests_that_come_meanwhile_wait_for_the_new_weights(seen: dict[str, Any], mode: str) -> None:
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


def test_a_request_that_waits_with_its_blocks_costs_no_other_its_own(attached: dict[str, Any]) -> None:
    """It cannot compute them again before more of its input has come, so nothing can be dropped until then."""
    seen = attached["held"]["reset"]
    assert seen["error"].startswith("HeldBlocksError: keys and values of requests that wait")
    assert (seen["status"]["state"], seen["status"]["lag"]) == ("idle", 1)
    assert seen["preempted"] == 0
    assert seen["answers"] == [2 * SHORT, TOKENS]
    assert seen["reached"] == seen["version"]


def test_with_salt_a_request_that_waits_delays_no_commit(attached: dict[str, Any]) -> None:
    seen = attached["held"]["salt"]
    assert seen["error"] == ""
    assert seen["status"]["served"]["version"] == seen["version"]
    assert seen["preempted"] == 0
    assert seen["answers"] == [2 * SHORT, TOKENS]
