"""What servers have left behind in a run and nobody asks for any more: leases long ended, turns long over."""

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.fleet.heartbeats import Leases
from vllm_delta_sync.format.documents import TURNS_PREFIX, pause_slot_of_key
from vllm_delta_sync.run.documents import RunDocuments

SHOWN_SECONDS = 24 * 3600.0
"""How long a lease stays after its end, so that people see who is gone."""


def left_behind(run: RunDocuments, leases: Leases, now: float, min_age: float) -> list[ObjectInfo]:
    """Leases that have ended a day ago or more, and turns that were taken ``min_age`` ago or more.

    The newest turn of each slot stays for ever: the next one counts on from it.

    Args:
        now: by the store's clock, as ``min_age`` in seconds.

    Raises:
        StoreError: the store failed.
    """
    ended = [held.info for held in leases.held if now - held.expires >= max(min_age, SHOWN_SECONDS)]
    turns = [(where, info) for info in run.bucket.list(TURNS_PREFIX) if (where := pause_slot_of_key(info.key))]
    newest: dict[int, int] = {}
    for (slot, number, _), _ in turns:
        newest[slot] = max(number, newest.get(slot, 0))
    over = [info for (slot, number, _), info in turns if number < newest[slot] and now - info.modified >= min_age]
    return ended + over
