"""What crosses between a controller and its ranks: every message arrives as it was, and nothing else is accepted."""

from typing import Any

import msgspec
import pytest

from vllm_delta_sync.engine.model.route import Region
from vllm_delta_sync.engine.protocol import (
    OPERATIONS,
    ClaimedVersion,
    ClearExternalWrite,
    Commit,
    Committed,
    Confirm,
    Describe,
    Done,
    Identified,
    Identify,
    Outcome,
    PlainPlan,
    PlainStep,
    Poll,
    Progress,
    RankAnswer,
    RankFailure,
    RankRequest,
    RankState,
    Repair,
    Revert,
    Scan,
    Scanned,
    SetVersion,
    Stage,
    Staged,
    decode_answers,
    decode_request,
    encode_answer,
    encode_request,
    serve,
    set_failed_step,
    unwrap,
)
from vllm_delta_sync.errors import BusyError, DigestError, EngineError
from vllm_delta_sync.format.fingerprint import Fingerprint

LARGEST = Fingerprint(2**64 - 1, 2**64 - 1)
CLAIM = ClaimedVersion("run", "memory://run", 3, [Fingerprint(1, 2), LARGEST])
PLAN = PlainPlan(b"target", [PlainStep(b"step", True, False, ("memory://other", "digest"))], None, False)
SCANNED = Scanned({4: [LARGEST], 0: []}, {4: LARGEST, 0: Fingerprint()}, ["norm"])
STAGED = Staged(5, LARGEST, 10, 3, {"fetch": 0.5}, {"process": "host:1", "kinds": {"get": [1, 2.5, None]}}, SCANNED)
IDENTIFIED = Identified([[Region(7, (2, 3), (12, 1))], []], [[LARGEST], []], CLAIM, ["a"], ["b"], {"trace": 1.0})
STATE = RankState(None, True, False, [3, None], 10, "wake_up", 2, True)
MESSAGES: list[tuple[RankRequest[Any], RankAnswer]] = [
    (Describe(), STATE),
    (SetVersion(None, [LARGEST], [[[0, -1]], [[1]]], [True], CLAIM), Done()),
    (Commit(5), Committed({0: LARGEST})),
    (Revert(None), Done()),
    (Confirm(2**40), STATE),
    (ClearExternalWrite([1, 2]), Done()),
    (Poll(), Progress(True)),
    (Identify("memory://run", "/cache", 5, "digest", ["key"], {"endpoint": None, "deadline": 1.5}, 9), Done()),
    (Stage(PLAN, None, [1, 2]), Done()),
    (Repair(b"manifest"), Done()),
    (Scan([1, 2]), Done()),
    (Outcome("identify"), IDENTIFIED),
    (Outcome("stage"), STAGED),
    (Outcome("repair"), STAGED),
    (Outcome("scan"), SCANNED),
]


def test_every_operation_has_its_messages_here() -> None:
    assert {request.operation for request, _ in MESSAGES} == set(OPERATIONS)


@pytest.mark.parametrize(("request_", "answer"), MESSAGES, ids=lambda value: type(value).__name__)
def test_messages_arrive_as_they_were(request_: RankRequest[Any], answer: RankAnswer) -> None:
    seen: list[RankRequest[Any]] = []

    def answering(decoded: RankRequest[Any]) -> RankAnswer:
        seen.append(decoded)
        return answer

    served = serve(encode_request(request_), answering)
    assert seen == [request_]
    assert unwrap(decode_answers(request_, [served])) == [answer]


def test_only_what_changes_weights_needs_a_pause() -> None:
    assert [name for name, request in OPERATIONS.items() if request.paused] == ["commit", "revert"]


def test_each_engine_gets_the_entries_of_its_own_ranks() -> None:
    everywhere = SetVersion(1, [], [[[rank]] for rank in range(4)], [])
    second = decode_request(encode_request(everywhere, 2, 4))
    assert second == msgspec.structs.replace(everywhere, groups=[[[2]], [[3]]])
    assert decode_request(encode_request(ClearExternalWrite([5, 6, 7]), 1, 2)) == ClearExternalWrite([6])
    assert decode_request(encode_request(Scan([5, 6, 7]), 1, 2)) == Scan([5, 6, 7])


def test_errors_cross_with_kind_message_and_step() -> None:
    def failing(request: RankRequest[Any]) -> RankAnswer:
        error = DigestError("objects/a is damaged")
        set_failed_step(error, 3)
        raise error

    with pytest.raises(DigestError, match="objects/a is damaged") as caught:
        unwrap(decode_answers(Scan([]), [serve(encode_request(Scan([])), failing)]))
    assert vars(caught.value)["step"] == 3
    with pytest.raises(BusyError):
        unwrap([Done(), RankFailure(BusyError.kind, "busy"), RankFailure("engine", "later")])
    with pytest.raises(EngineError, match="of a later release"):
        unwrap([RankFailure("no_such_kind", "of a later release")])


def test_any_error_is_an_answer() -> None:
    def failing(request: RankRequest[Any]) -> RankAnswer:
        raise ZeroDivisionError("by zero")

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
