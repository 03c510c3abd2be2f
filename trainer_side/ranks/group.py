"""Ranks that publish one run together: what they tell each other, and how a rank that is gone is noticed.

Documents are JSON, never pickled. Rank 0 is in the middle: it gathers from each of the others and answers each, so that
it knows which one it waits for. Nothing here is large, and nothing of it is on the way of the training step but one
question before each comparison (``who``).
"""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from vllm_delta_sync.errors import DeltaSyncError, PublishError, UsageError, error_kinds
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)

CALL_SECONDS = 1800.0
"""How long a rank waits for another to come to the same call. One whose process has ended is noticed at once."""
WORK_SECONDS = 4 * 3600.0
"""How long the background threads wait for each other: one may still store gigabytes on a slow link."""

PIECE_BYTES = 16 * 1024 * 1024
"""What goes from rank to rank at once, so that a rank that has no memory for all of it can still take it."""
_PARTING_SECONDS = 5.0
"""How long rank 0 tries to tell another that a third is lost."""

Json = Any
Bytes = npt.NDArray[np.uint8]


class LostRankError(PublishError):
    """A rank does not answer any more, or the ranks are not at the same place; nothing is published from here on."""


class ProcessGroup:
    """All ranks over one process group, each with one thread at a time. Every rank makes the same calls in one order.

    Attributes:
        rank, size: of the world. leads: whether this is rank 0.

    Args:
        seconds: how long a rank waits for another before it takes it for lost.

    Raises:
        LostRankError: a rank does not take part.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        try:
            self._group: distributed.ProcessGroup | None = distributed.new_group(
                backend="gloo", timeout=timedelta(seconds=seconds)
            )
        except RuntimeError as error:
            raise LostRankError(
                f"not all ranks have come together in {seconds:.0f} s ({_reason(error)}): every rank of the world has "
                "to make the publisher, with the model that is shared out among them"
            ) from error
        self._sequence = 0
        self._broken: str | None = None
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.is_rank0 = self.rank == 0

    # Each of these is called by all ranks

    def gather(self, what: str, document: Json) -> list[Json] | None:
        """Bring a document of each rank to rank 0, which has to ``broadcast`` next.

        Returns:
            on rank 0 those of all ranks, in their order; None elsewhere.

        Raises:
            LostRankError: a rank is gone, or at another place than this one.
        """
        self.check()
        self._sequence += 1
        mine = {"what": what, "turn": self._sequence, "value": document}
        if not self.is_rank0:
            self._send_document(0, mine)
            return None
        reports: list[Json] = [document]
        problem: LostRankError | None = None
        for rank in range(1, self.size):
            try:
                # Where one is lost the others are heard out, so that they listen to what they are told then.
                theirs = self._receive_document(rank, None if problem is None else _PARTING_SECONDS)
                self._check_place(rank, theirs, mine)
                reports.append(theirs["value"])
            except LostRankError as error:
                problem = problem or error
        if problem is not None:
            self._notify_lost(problem)
            raise problem
        return reports

    def broadcast(self, what: str, document: Json = None) -> Json:
        """Rank 0's document, on every rank; the others' are not looked at. Raises LostRankError as ``gather``."""
        self.check()
        self._sequence += 1
        mine = {"what": what, "turn": self._sequence, "value": document}
        if self.is_rank0:
            problem: LostRankError | None = None
            for rank in range(1, self.size):
                try:
                    self._send_document(rank, mine)
                except LostRankError as error:
                    problem = problem or error
            if problem is not None:
                raise problem
            return document
        theirs = self._receive_document(0)
        if "lost" in theirs:
            raise self._break(theirs["lost"])
        self._check_place(0, theirs, mine)
        return theirs["value"]

    def from_rank0(self, what: str, work: Callable[[], Json]) -> Json:
        """What ``work`` gives on rank 0, on every rank.

        Raises:
            DeltaSyncError: whatever it raised there. LostRankError: as ``gather``.
        """
        if not self.is_rank0:
            answer = self.broadcast(what)
            if "error" in answer:
                raise error_from_rank(answer["error"], 0)
            return answer["value"]
        try:
            value = work()
        except Exception as error:  # whatever it is, the others must hear of it rather than wait
            self.broadcast(what, {"error": error_document(error)})
            raise
        self.broadcast(what, {"value": value})
        return value

    def all_or_raise(
        self, what: str, work: Callable[[], Json], judge: Callable[[list[Json]], None] | None = None
    ) -> list[Json] | None:
        """Have each rank do its part; it is done only if all have done theirs.

        Args:
            judge: looks at what all have given, on rank 0, and may raise.

        Returns:
            on rank 0 what each rank's ``work`` gave; None elsewhere.

        Raises:
            DeltaSyncError: as ``agree``.
        """
        found: list[Json] = []

        def judged(reports: list[Json]) -> None:
            found.extend(reports)
            if judge is not None:
                judge(reports)

        self.reduce_on_rank0(what, work, judged)
        return found if self.is_rank0 else None

    def reduce_on_rank0(self, what: str, work: Callable[[], Json], judge: Callable[[list[Json]], Json]) -> Json:
        """What ``judge`` makes on rank 0 of what ``work`` gives on each rank; the same on every rank.

        Raises:
            DeltaSyncError: on every rank, what was raised on one, or by ``judge``. LostRankError: as ``gather``.
        """
        own_error: Exception | None = None
        document: Json = None
        try:
            document = {"value": work()}
        except Exception as error:  # noqa: BLE001 - raised below, once the others have been told
            own_error, document = error, {"error": error_document(error)}
        reports = self.gather(what, document)

        def verdict() -> Json:
            failed = first_error(reports or [])
            return {"failed": failed} if failed else {"value": judge([item["value"] for item in reports or []])}

        try:
            answer = self.from_rank0(f"{what}: verdict", verdict)
        except DeltaSyncError as error:
            raise error if own_error is None else own_error from None
        if own_error is not None:
            raise own_error
        if "failed" in answer:
            raise error_from_rank(answer["failed"]["error"], answer["failed"]["rank"])
        return answer["value"]

    def ranks_where(self, what: str, flags: Sequence[bool]) -> list[list[int]]:
        """For each flag, the ranks that have set it; the same on every rank."""
        reports = self.gather(what, [bool(flag) for flag in flags])
        found = None
        if reports is not None:
            found = [[rank for rank, theirs in enumerate(reports) if theirs[place]] for place in range(len(flags))]
        answer: list[list[int]] = self.broadcast(what, found)
        return answer

    # Between two ranks

    def send(self, rank: int, data: Bytes) -> None:
        """Give (n,) bytes to a rank, which has to ``receive`` them. Raises LostRankError as ``gather``."""
        self.check()
        self._send_bytes(rank, data)

    def receive(self, rank: int, into: Bytes | None = None) -> Bytes:
        """The (n,) bytes that a rank sends here, in ``room`` if that is given.

        Raises:
            LostRankError: as ``gather``; or they are not as many as there is room for.
        """
        self.check()
        return self._receive_bytes(rank, into=into)

    def skip(self, rank: int) -> None:
        """Receive what a rank sends here, and throw it away, in the memory of one piece. Raises LostRankError."""
        self.check()
        self._receive_bytes(rank, skip=True)

    def check(self) -> None:
        """Raise LostRankError if the ranks have lost each other."""
        if self._broken is not None:
            raise LostRankError(self._broken)
        if not distributed.is_initialized():
            raise self._break(
                "torch.distributed was ended while a sharded model was still published; close the publisher before "
                "destroy_process_group()"
            )

    def close(self) -> None:
        """Give back sockets and threads; the others notice it if they still wait for this rank."""
        group, self._group = self._group, None
        if distributed.is_initialized() and group is not None:
            distributed.destroy_process_group(group)
        # Its connections are closed when nobody holds it any more.
        self._broken = self._broken or "the publisher is closed"

    # Below

    def _check_place(self, rank: int, theirs: Json, mine: Json) -> None:
        if theirs["what"] == mine["what"] and theirs["turn"] == mine["turn"]:
            return
        raise self._break(
            f"rank {rank} is at {theirs['what']!r} ({theirs['turn']}) while rank {self.rank} is at {mine['what']!r} "
            f"({mine['turn']}): every rank has to call the publisher's methods, at the same places; start the job again"
        )

    def _break(self, reason: str) -> LostRankError:
        self._broken = self._broken or reason
        return LostRankError(reason)

    def _lost(self, rank: int, error: Exception) -> LostRankError:
        return self._break(
            f"rank {rank} did not answer rank {self.rank} (it has ended, closed its publisher, or did nothing for "
            f"{self._seconds:.0f} s): {_reason(error)}. The newest version in the bucket is whole: start the job "
            "again, which goes on from there"
        )

    def _notify_lost(self, error: LostRankError) -> None:
        """Have the other ranks know why rank 0 does not go on."""
        for rank in range(1, self.size):
            try:
                self._send_bytes(rank, encode_document({"lost": error.message}), _PARTING_SECONDS)
            except LostRankError:
                logger.debug("rank %d cannot be told that another rank is lost", rank)

    def _send_document(self, rank: int, document: Json) -> None:
        self._send_bytes(rank, encode_document(document))

    def _receive_document(self, rank: int, seconds: float | None = None) -> Json:
        return json.loads(self._receive_bytes(rank, seconds).tobytes())

    def _send_bytes(self, rank: int, data: Bytes, seconds: float | None = None) -> None:
        size = torch.tensor([data.size], dtype=torch.int64)
        try:
            for tensor in (size, *map(torch.from_numpy, _pieces(data))):
                work = distributed.isend(tensor, group=self._group, group_dst=rank)
                self._wait(work, seconds)
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def _receive_bytes(
        self, rank: int, seconds: float | None = None, into: Bytes | None = None, skip: bool = False
    ) -> Bytes:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            self._wait(distributed.irecv(size, group=self._group, group_src=rank), seconds)
            if skip:
                # The same memory for each piece.
                found = np.empty(min(int(size), PIECE_BYTES), np.uint8)
                pieces = [found[: min(PIECE_BYTES, int(size) - at)] for at in range(0, int(size), PIECE_BYTES)]
            else:
                found = np.empty(int(size), np.uint8) if into is None else into
                pieces = _pieces(found)
                if found.size != int(size):
                    raise self._break(
                        f"rank {rank} sends {int(size)} bytes where {found.size} belong; start the job again"
                    )
            for data in map(torch.from_numpy, pieces):
                self._wait(distributed.irecv(data, group=self._group, group_src=rank), seconds)
        except RuntimeError as error:
            raise self._lost(rank, error) from error
        return found

    def _wait(self, work: distributed.Work | None, seconds: float | None) -> None:
        if work is None:
            raise RuntimeError("this process is not part of the group")
        work.wait(timedelta(seconds=self._seconds if seconds is None else seconds))


class RankGroups:
    """The ranks of this world: ``calls`` for the thread that calls the publisher, ``work`` for the background one.

    Made by all ranks at the same place.
    """

    def __init__(self) -> None:
        self.caller = ProcessGroup(CALL_SECONDS)
        self.work = ProcessGroup(WORK_SECONDS)
        self.rank, self.size, self.is_rank0 = self.caller.rank, self.caller.size, self.caller.is_rank0

    def close(self) -> None:
        """Give back sockets and threads."""
        self.caller.close()
        self.work.close()


def check_same(name: str, reports: Sequence[Json]) -> None:
    """Raise UsageError unless all ranks were given the same. ``told``: by each rank, as ``name``."""
    for rank, theirs in enumerate(reports):
        if theirs != reports[0]:
            raise UsageError(
                f"{name} is {theirs!r} on rank {rank}, and {reports[0]!r} on rank 0; give all ranks the same"
            )


def error_document(error: BaseException) -> Json:
    """An error as other ranks are told of it."""
    if isinstance(error, DeltaSyncError):
        return {"kind": error.kind, "message": error.message}
    return {"kind": PublishError.kind, "message": f"unexpectedly: {error!r}"}


def error_from_rank(document: Json, rank: int) -> DeltaSyncError:
    """An error that another rank has met, of the same kind."""
    kind = error_kinds().get(document["kind"], PublishError)
    return kind(f"rank {rank}: {document['message']}")


def first_error(reports: Sequence[Json]) -> Json:
    """The first of the documents that reports an error, and whose; None if none does."""
    return next(({"rank": rank, **item} for rank, item in enumerate(reports) if "error" in item), None)


def _pieces(data: Bytes) -> list[Bytes]:
    """(n,) bytes as they go from rank to rank; views."""
    return [data[at : at + PIECE_BYTES] for at in range(0, data.size, PIECE_BYTES)]


def _reason(error: Exception) -> str:
    """What gloo says of a connection, without where in its source it says so."""
    return str(error).split("] ", 1)[-1].split(". ", 1)[0][:200]


def encode_document(document: Json) -> Bytes:
    """A document as bytes to ``send``."""
    return np.frombuffer(json.dumps(document).encode(), np.uint8).copy()
