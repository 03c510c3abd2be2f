"""Writing leases: what a receiver says of itself. They are read in ``fleet.heartbeats``."""

from typing import Any

from pydantic import ValidationError

from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.documents import Lease, lease_key
from vllm_delta_sync.format.manifest import timestamp
from vllm_delta_sync.run.documents import RunDocuments


def write_lease(
    run: RunDocuments,
    receiver_id: str,
    served: int | None,
    target: int | None = None,
    pins: list[int] | None = None,
    seconds: int = 600,
    **more: Any,
) -> Lease:
    """Say what a receiver serves; replaces what it said before. Repeat well before ``seconds`` are over.

    Args:
        served: version, None before one is proven. target: version on its way to. pins: others to keep readable.
        more: further members of ``Lease``.

    Raises:
        UsageError: the id is not a name, or a value is out of bounds. StoreError: the store failed.
    """
    key = lease_key(receiver_id)
    fields: dict[str, Any] = {
        "run": run.info.run,
        "receiver": receiver_id,
        "served": served,
        "target": target,
        "pins": [] if pins is None else pins,
        "seconds": seconds,
        "created_at": timestamp(),
        **more,
    }
    try:
        lease = Lease.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise UsageError(
            f"lease of {receiver_id!r}: {where} is {str(problem['input'])[:80]}: {problem['msg']}"
        ) from error
    run.bucket.put(key, lease.to_bytes())
    return lease
