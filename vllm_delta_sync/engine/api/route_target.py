"""``POST /delta_sync/target``: what is followed is changed while the server runs."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from vllm_delta_sync.engine.api.access import Answer, GuardedRoute
from vllm_delta_sync.settings import TARGET

router = APIRouter(prefix="/delta_sync", tags=["delta_sync"], route_class=GuardedRoute, default_response_class=Answer)


class TargetRequest(BaseModel):
    """Body of ``POST /delta_sync/target``."""

    model_config = ConfigDict(extra="forbid")
    target: Annotated[str, Field(pattern=TARGET, description="What to follow: head, a version's number, or tag:NAME.")]
    bucket: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=4096,
            description="URL of a run beside the configured one: the same with another last part. None: the run "
            "followed now.",
        ),
    ] = None


@router.post("/target")
async def target(request: Request, body: TargetRequest) -> dict[str, Any]:
    """Follow something else from now on, newer or older, or another run; a hold ends. Answers with the status reached.

    It outlives a restart. If it cannot be done, what was followed before is followed still, and served."""
    service = request.app.state.delta_sync
    outcome: dict[str, Any] = await asyncio.wrap_future(service.request("target", (body.target, body.bucket)))
    return outcome
