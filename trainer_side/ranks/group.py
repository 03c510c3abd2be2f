"""``ProcessGroup``: communication of ranks that publish one run together, and detection of lost ranks.

Documents are JSON, never pickled. Rank 0 gathers from each other rank and answers each, so that it knows which one it
waits for. Documents are small. Only one question before each comparison (``reduce_on_rank0``) delays the training step.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from vllm_delta_sync.errors import DeltaSyncError, PublishError, UsageError, error_kinds
from vllm_delta_sync.logs import guarded_logger

logger = guarded_logger(__name__)

CALL_SECONDS = 1800.0
"""How long a rank waits for another to reach the same call. A process that has ended is noticed at once."""
WORK_SECONDS = 4 * 3600.0
"""How long the background threads wait for each other: one may still be storing gigabytes over a slow link."""

PIECE_BYTES = 16 * 1024 * 1024
"""Bytes sent at once."""
_HEAD_BYTES = 512
"""Bytes of the first message between two ranks: the size of the data, and its beginning. Most documents fit in."""
_PARTING_SECONDS = 5.0
"""How long rank 0 tries to notify a rank that another one is lost."""

Json = Any
Bytes = npt.NDArray[np.uint8]
_Result = TypeVar("_Result")
Judge = Callable[[list[Json]], Json]
_Number = TypeVar("_Number", int, float)


class LostRankError(PublishError):
    """A rank does not answer, or the ranks are at different calls; nothing more is published."""


def in_world() -> bool:
    """Return whether this process is one of several of a ``torch.distributed`` world."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def leave(group: "distributed.ProcessGroup | None") -> None:
    """Destroy a process group, unless ``destroy_process_group()`` has ended it with its world."""
    if group is not None:
        with suppress(ValueError):  # it is not one of the present world; there may be none
            distributed.destroy_process_group(group)


def rank_in_world() -> int:
    """Return the rank of this process, also before ``init_process_group``; 0 if nothing says that it has one."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


class ProcessGroup:
    """The ranks that publish together, each with one thread at a time. Every rank makes the same calls in one order.

    A process that publishes alone is a group of one, which communicates with nothing. Each call raises LostRankError if
    a rank is lost or at another call.

    Attributes:
        rank, size: of the group. is_rank0: whether this is rank 0. alone: whether there is no other rank.

    Args:
        seconds: how long a rank waits for another before it counts as lost.
        alone: a group of this process only; otherwise of all ranks of the world.
    """

    def __init__(self, seconds: float, alone: bool = False) -> None:
        self._seconds = seconds
        self._sequence = 0
        self._broken: str | None = None
        self._group: distributed.ProcessGroup | None = None
        self.rank, self.size, self.alone = 0, 1, alone
        if not alone:
            try:
                self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
            except RuntimeError as error:
                raise LostRankError(
                    f"not all ranks have come together in {seconds:.0f} s ({_reason(error)}): every rank of the world "
                    "has to make the publisher, with the model that is sharded over them"
                ) from error
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.is_rank0 = self.rank == 0

    # Collective calls

    def gather(self, what: str, document: Json) -> list[Json] | None:
        """Bring a document of each rank to rank 0, which must ``broadcast`` next.

        Returns:
            On rank 0 those of all ranks, in order; None elsewhere.
        """
        self.check()
        self._sequence += 1
        mine = {"what": what, "sequence": self._sequence, "value": document}
        if not self.is_rank0:
            self._send_bytes(0, encode_document(mine))
            return None
        reports: list[Json] = [document]
        problem: LostRankError | None = None
        for rank in range(1, self.size):
            try:
                # After a loss, still receive from the others, so that they wait for the notification.
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
        """Return rank 0's document on every rank, ignoring those of others."""
        self.check()
        self._sequence += 1
        mine = {"what": what, "sequence": self._sequence, "value": document}
        if self.is_rank0:
            problem: LostRankError | None = None
            for rank in range(1, self.size):
                try:
                    self._send_bytes(rank, encode_document(mine))
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
        """Do ``work`` on rank 0; return its result on every rank."""
        if not self.is_rank0:
            answer = self.broadcast(what)
            if "error" in answer:
                raise error_from_rank(answer["error"], 0)
            return answer["value"]
        try:
            value = work()
        except Exception as error:  # the other ranks wait for an answer, whatever the error is
            self.broadcast(what, {"error": error_document(error)})
            raise
        self.broadcast(what, {"value": value})
        return value

    def all_or_raise(self, what: str, work: Callable[[], Json], judge: Judge = lambda reports: None) -> list[Json]:
        """Do ``work`` on every rank; raise on all of them unless it succeeded on each.

        Args:
            judge: checks the results of all ranks, on rank 0, and may raise.

        Returns:
            On rank 0 the result of each rank; none elsewhere.
        """
        found: list[Json] = []

        def judged(reports: list[Json]) -> None:
            found.extend(reports)
            judge(reports)

        self.reduce_on_rank0(what, work, judged)
        return found

    def on_every_rank(
        self,
        what: str,
        work: Callable[[], _Result],
        report: Callable[[_Result], Json] = lambda value: None,
        judge: Judge = lambda reports: None,
    ) -> _Result:
        """Return what ``work`` returns here, after it succeeded on every rank.

        Args:
            report: makes of it what ``judge`` gets of each rank, on rank 0; that may raise.
        """
        found: list[_Result] = []

        def reported() -> Json:
            found.append(work())
            return report(found[0])

        self.reduce_on_rank0(what, reported, judge)
        return found[0]

    def reduce_on_rank0(self, what: str, work: Callable[[], Json], judge: Callable[[list[Json]], Json]) -> Json:
        """Do ``work`` on every rank; return, on every rank, what ``judge`` on rank 0 makes of the results.

        Raises:
            DeltaSyncError: on every rank, the error of any rank, or of ``judge``.
        """
        own_error: Exception | None = None
        document: Json = None
        try:
            document = {"value": work()}
        except Exception as error:  # noqa: BLE001 - raised below, once the other ranks have received it
            own_error, document = error, {"error": error_document(error)}
        reports = self.gather(what, document)

        def verdict() -> Json:
            failed = first_error(reports or [])
            return {"failed": failed} if failed else {"value": judge([item["value"] for item in reports or []])}

        try:
            try:
                answer = self.from_rank0(f"{what}: verdict", verdict)
            except DeltaSyncError:
                if own_error is None:
                    raise
            if own_error is not None:
                raise own_error
        finally:
            own_error = None  # else this frame and the error keep each other, and what its frames hold, in memory
        if "failed" in answer:
            raise error_from_rank(answer["failed"]["error"], answer["failed"]["rank"])
        return answer["value"]

    def sums(self, what: str, work: Callable[[], Sequence[float]]) -> list[float]:
        """Do ``work`` on every rank; return, on every rank, the sums of the numbers that it returns, in their order.

        Rank 0 adds them in the order of the ranks, so all have the same bits. Raises as ``reduce_on_rank0``.
        """
        found: list[float] = self.reduce_on_rank0(
            what, work, lambda reports: [sum(numbers) for numbers in zip(*reports, strict=True)]
        )
        return found

    def ranks_where(self, what: str, flags: Sequence[bool]) -> list[list[int]]:
        """Return for each flag the ranks that have set it; the same on every rank."""

        def judge(reports: list[Json]) -> Json:
            return [[rank for rank, theirs in enumerate(reports) if theirs[place]] for place in range(len(flags))]

        found: list[list[int]] = self.reduce_on_rank0(what, lambda: [bool(flag) for flag in flags], judge)
        return found

    # Between two ranks

    def send(self, rank: int, data: Bytes) -> None:
        """Send (n,) bytes to a rank, which must ``receive`` them."""
        self.check()
        self._send_bytes(rank, data)

    def receive(self, rank: int, into: Bytes | None = None) -> Bytes:
        """Return the (n,) bytes that a rank sends, received in ``into`` if given."""
        self.check()
        return self._receive_bytes(rank, into=into)

    def check(self) -> None:
        """Raise LostRankError if the connection of the ranks is broken."""
        if self._broken is not None:
            raise LostRankError(self._broken)
        if not self.alone and not distributed.is_initialized():
            raise self._break(
                "torch.distributed was ended while a sharded model was still published; close the publisher before "
                "destroy_process_group()"
            )

    def close(self) -> None:
        """Release sockets and threads; other ranks notice it if they still wait for this one."""
        group, self._group = self._group, None
        leave(group)
        # Its connections close when the last reference is dropped.
        self._broken = self._broken or "the publisher is closed"

    # Messages

    def _check_place(self, rank: int, theirs: Json, mine: Json) -> None:
        if theirs["what"] == mine["what"] and theirs["sequence"] == mine["sequence"]:
            return
        raise self._break(
            f"rank {rank} is at {theirs['what']!r} ({theirs['sequence']}) while rank {self.rank} is at "
            f"{mine['what']!r} ({mine['sequence']}): every rank has to call the publisher's methods, at the same "
            "places; start the job again"
        )

    def _break(self, reason: str) -> LostRankError:
        self._broken = self._broken or reason
        return LostRankError(reason)

    def _lost(self, rank: int, error: Exception) -> LostRankError:
        # A timeout of gloo closes all connections of rank 0, so it cannot say which rank it waited for.
        or_lost = "" if self.is_rank0 else "; or it has lost another rank, which its own error names"
        return self._break(
            f"rank {rank} did not answer rank {self.rank} (it has ended, closed its publisher, or did nothing for "
            f"{self._seconds:.0f} s{or_lost}): {_reason(error)}. The newest version in the bucket is complete: start "
            "the job again, which continues from it"
        )

    def _notify_lost(self, error: LostRankError) -> None:
        """Send the other ranks the reason why rank 0 stops."""
        for rank in range(1, self.size):
            try:
                self._send_bytes(rank, encode_document({"lost": error.message}), _PARTING_SECONDS)
            except LostRankError:
                logger.debug("rank %d could not be notified that another rank is lost", rank)

    def _receive_document(self, rank: int, seconds: float | None = None) -> Json:
        return json.loads(self._receive_bytes(rank, seconds).tobytes())

    def _send_bytes(self, rank: int, data: Bytes, seconds: float | None = None) -> None:
        head = np.zeros(_HEAD_BYTES, np.uint8)
        first = data[: _HEAD_BYTES - 8]
        head[:8].view(np.int64)[0] = data.size
        head[8 : 8 + first.size] = first
        try:
            for tensor in map(torch.from_numpy, (head, *_pieces(data[first.size :]))):
                work = distributed.isend(tensor, group=self._group, group_dst=rank)
                self._wait(work, seconds)
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def _receive_bytes(self, rank: int, seconds: float | None = None, into: Bytes | None = None) -> Bytes:
        head = np.zeros(_HEAD_BYTES, np.uint8)
        try:
            self._wait(distributed.irecv(torch.from_numpy(head), group=self._group, group_src=rank), seconds)
            size = int(head[:8].view(np.int64)[0])
            first = head[8 : 8 + min(size, _HEAD_BYTES - 8)]
            found = np.empty(size, np.uint8) if into is None else into
            if found.size != size:
                raise self._break(f"rank {rank} sends {size} bytes where {found.size} belong; start the job again")
            found[: first.size] = first
            for data in map(torch.from_numpy, _pieces(found[first.size :])):
                self._wait(distributed.irecv(data, group=self._group, group_src=rank), seconds)
        except RuntimeError as error:
            raise self._lost(rank, error) from error
        except MemoryError as error:
            raise self._break(f"rank {self.rank} has no memory for {size} bytes that rank {rank} sends") from error
        return found

    def _wait(self, work: "distributed.Work | None", seconds: float | None) -> None:
        if work is None:
            raise RuntimeError("this process is not part of the group")
        work.wait(timedelta(seconds=self._seconds if seconds is None else seconds))


class RankGroups:
    """The ranks of a publisher: ``caller`` for the thread that calls it, ``work`` for its background thread.

    Every rank of a world constructs it at the same point of the program.

    Args:
        alone: this process publishes without others.
    """

    def __init__(self, alone: bool = False) -> None:
        self.caller = ProcessGroup(CALL_SECONDS, alone)
        self.work = ProcessGroup(WORK_SECONDS, alone)
        self.is_rank0, self.alone = self.caller.is_rank0, alone

    def close(self) -> None:
        """Release sockets and threads."""
        self.caller.close()
        self.work.close()


def added_rows(reports: Iterable[Iterable[tuple[int, _Number]]]) -> dict[int, _Number]:
    """Return key → sum of its numbers, from the (key, number) of each rank, added in the order of the ranks."""
    sums: dict[int, _Number] = {}
    for rows in reports:
        for key, number in rows:
            sums[key] = sums[key] + number if key in sums else number
    return sums


def check_same(name: str, reports: Sequence[Json]) -> None:
    """Raise UsageError unless all ranks have the same value. ``reports``: the value of each rank."""
    for rank, theirs in enumerate(reports):
        if theirs != reports[0]:
            raise UsageError(
                f"{name} is {theirs!r} on rank {rank}, and {reports[0]!r} on rank 0; give all ranks the same"
            )


def error_document(error: BaseException) -> Json:
    """Return an error in the form that other ranks receive."""
    if isinstance(error, DeltaSyncError):
        return {"kind": error.kind, "message": error.message}
    return {"kind": PublishError.kind, "message": f"failed unexpectedly: {error!r}"}


def error_from_rank(document: Json, rank: int) -> DeltaSyncError:
    """Return the error that another rank reported, of the same kind."""
    kind = error_kinds().get(document["kind"], PublishError)
    return kind(f"rank {rank}: {document['message']}")


def first_error(reports: Sequence[Json]) -> Json:
    """Return the first report with an error, and its rank; None if there is none."""
    return next(({"rank": rank, **item} for rank, item in enumerate(reports) if "error" in item), None)


def _pieces(data: Bytes) -> list[Bytes]:
    """Return views of (n,) bytes, as they are sent."""
    return [data[at : at + PIECE_BYTES] for at in range(0, data.size, PIECE_BYTES)]


def _reason(error: Exception) -> str:
    """Return gloo's message about a connection, without the location in its source."""
    return str(error).split("] ", 1)[-1].split(". ", 1)[0][:200]


def encode_document(document: Json) -> Bytes:
    """Return a document as bytes to ``send``."""
    return np.frombuffer(json.dumps(document).encode(), np.uint8).copy()
