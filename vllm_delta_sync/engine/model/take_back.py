"""``take_back`` undoes writes of weights after a failure midway, or says that the weights are lost."""

from collections.abc import Callable, Iterable

from vllm_delta_sync.errors import WeightsLostError


def take_back(undo: Iterable[Callable[[], object]], what: str, cause: BaseException) -> None:
    """Call each of ``undo`` in order.

    Args:
        what: what is taken back, for the message.

    Raises:
        WeightsLostError: one of them failed, so that nobody knows what the weights are.
    """
    try:
        for step in undo:
            step()
    except WeightsLostError:
        raise
    except BaseException as error:  # after any failure here, an interrupt included, the weights are unknown
        raise WeightsLostError(
            f"taking back {what} failed midway ({type(error).__name__}: {error}) after {cause}; start the server again"
        ) from error
