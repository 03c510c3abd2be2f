"""``undo_writes`` undoes writes of weights after a failure midway, or says that the weights are lost."""

from collections.abc import Callable, Iterable

from vllm_delta_sync.errors import WeightsLostError


def undo_writes(undo: Iterable[Callable[[], object]], what: str, cause: BaseException) -> None:
    """Call each of ``undo`` in order, after a write has failed.

    Args:
        what: what is undone, for the message.

    Raises:
        WeightsLostError: one of them failed, so the weights are unknown.
    """
    try:
        for step in undo:
            step()
    except WeightsLostError:
        raise
    except BaseException as error:  # after any failure here, an interrupt included, the weights are unknown
        raise WeightsLostError(
            f"undoing {what} failed midway ({type(error).__name__}: {error}) after {cause}; start the server again"
        ) from error
