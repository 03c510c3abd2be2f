"""What crosses between a controller and its ranks: each engine's own entries, errors, and nothing that is unknown.

Every other test of a receiver sends its requests and answers as bytes, too (``ModulePort``)."""

from unittest import mock

import msgspec
import pytest

from vllm_delta_sync.engine.protocol import (
    OPERATIONS,
    ClearExternalWrite,
    Committed,
    Done,
    Poll,
    RankAnswer,
    RankFailure,
    RankState,
    Scan,
    SetVersion,
    decode_answers,
    decode_request,
    encode_answer,
    encode_request,
    serve,
    set_failed_step,
    unwrap,
)
from vllm_delta_sync.errors import BusyError, DigestError, EngineError

STATE = RankState(None, True, False, [3, None], 10, "wake_up", 2, True)


def test_only_what_changes_weights_needs_a_pause() -> None:
    assert [name for name, request in OPERATIONS.items() if request.paused] == ["commit", "revert"]


def test_each_engine_gets_the_entries_of_its_own_ranks() -> None:
    everywhere = SetVersion(1, [], [[[rank]] for rank in range(4)], [])
    second = decode_request(encode_request(everywhere, 2, 4))
    assert second == msgspec.structs.replace(everywhere, groups=[[[2]], [[3]]])
    assert decode_request(encode_request(ClearExternalWrite([5, 6, 7]), 1, 2)) == ClearExternalWrite([6])
    assert decode_request(encode_request(Scan([5, 6, 7]), 1, 2)) == Scan([5, 6, 7])


def test_errors_cross_with_kind_message_and_step() -> None:
    error = DigestError("objects/a is damaged")
    set_failed_step(error, 3)
    failing = mock.Mock(side_effect=error)
    with pytest.raises(DigestError, match="objects/a is damaged") as caught:
        unwrap(decode_answers(Scan([]), [serve(encode_request(Scan([])), failing)]))
    assert vars(caught.value)["step"] == 3
    with pytest.raises(BusyError):
        unwrap([Done(), RankFailure(BusyError.kind, "busy"), RankFailure("engine", "later")])
    with pytest.raises(EngineError, match="of a later release"):
        unwrap([RankFailure("no_such_kind", "of a later release")])


def test_any_error_is_an_answer() -> None:
    failing = mock.Mock(side_effect=ZeroDivisionError("by zero"))
    (answer,) = decode_answers(Poll(), [serve(encode_request(Poll()), failing)])
    assert answer == RankFailure("engine", "unexpected ZeroDivisionError: by zero")


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode({"operation": "load"}), msgspec.msgpack.encode({"operation": "commit"})],
)
def test_unknown_requests_are_refused(payload: bytes) -> None:
    (answer,) = decode_answers(Poll(), [serve(payload, lambda request: Done())])
    assert isinstance(answer, RankFailure)
    assert "different releases" in answer.message


@pytest.mark.parametrize("answer", [Done(), Committed({}), STATE])
def test_answers_to_another_request_are_refused(answer: RankAnswer) -> None:
    with pytest.raises(EngineError, match="did not answer poll"):
        decode_answers(Poll(), [encode_answer(answer)])
