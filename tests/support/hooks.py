"""Faults at chosen moments: before or after a call into an engine, and while a commit reads a destination."""

from collections.abc import Callable
from typing import Any

import torch

from tests.support.modules import ModulePort, named
from tests.support.world import World
from vllm_delta_sync.engine.model import device_patch, patch
from vllm_delta_sync.engine.model.device_batch import BatchPart, PackedBatch
from vllm_delta_sync.engine.model.route import Destination
from vllm_delta_sync.engine.protocol import A, RankFailure, RankRequest
from vllm_delta_sync.engine.worker.rank_worker import RankWorker
from vllm_delta_sync.errors import EngineError

Hook = Callable[[str, dict[str, Any]], None]


class HookedPort(ModulePort):
    """An engine with hooks around every call: ``before`` may fail it, ``after`` lose its answer.

    ``pause``, ``label`` and ``resume`` are calls too. ``on_resume`` comes before generation goes on: True if it already
    did.
    """

    def __init__(self, *models: Any) -> None:
        super().__init__(*models)
        self.before: Hook = nothing
        self.after: Hook = nothing
        self.on_resume: Callable[[], bool] = lambda: False

    def call(self, request: RankRequest[A]) -> list[A | RankFailure]:
        self.before(*named(request))
        answers = super().call(request)
        self.after(*named(request))
        return answers

    def pause(self) -> None:
        self.before("pause", {})
        super().pause()
        self.after("pause", {})

    def label(self, version: int | None, run: str | None) -> None:
        self.before("label", {"version": version})
        super().label(version, run)
        self.after("label", {"version": version})

    def resume(self) -> bool:
        self.before("resume", {})
        expired = self.on_resume()
        return super().resume() or expired


def nothing(method: str, arguments: dict[str, Any]) -> None:
    """No fault."""


def failing(method: str, times: int = 1) -> Hook:
    """Fail that call, so many times."""
    left = [times]

    def hook(called: str, arguments: dict[str, Any]) -> None:
        if called == method and left[0]:
            left[0] -= 1
            raise EngineError(f"the engine did not answer {method} in time")

    return hook


def hooked(world: World) -> HookedPort:
    """Let the world's receiver start over on a port with hooks."""
    port = HookedPort(*world.models)
    world.use(port)
    return port


class WatchedDestination(Destination):
    """Does something each time that a commit takes its memory, to write there."""

    on_take: Callable[[], None]

    @property
    def address(self) -> int:
        self.on_take()
        return super().address


def _watched_piece(
    scratch: torch.Tensor, packed: PackedBatch, part: BatchPart, piece: slice, sums: torch.Tensor, reverse: bool
) -> None:
    if isinstance(part.destination, WatchedDestination):
        part.destination.on_take()
    _commit_piece(scratch, packed, part, piece, sums, reverse)


# For all tests that use these hooks: on a device nothing asks a destination for its address, and in host memory each
# patch is a batch of its own, so that something can happen between two.
_commit_piece = device_patch._commit_piece
device_patch._commit_piece = _watched_piece
_kind = patch._kind
patch._kind = lambda patch: (*_kind(patch), patch.destination, patch.group)


def watch_commits(rank: RankWorker, parameter: str, on_take: Callable[[], None]) -> None:
    """Call ``on_take`` at each pass of a commit over a parameter of a rank that is proven."""
    assert rank.routes is not None
    for destination in rank.routes.destinations:
        if destination.name == parameter:
            destination.__class__ = WatchedDestination
            vars(destination)["on_take"] = on_take
