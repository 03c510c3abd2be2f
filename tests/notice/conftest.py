"""Ends of the notice channel that are closed after the test."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from vllm_delta_sync.notice import NoticePublisher, NoticeSubscriber


class Ends:
    """Opens ends as their classes do."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def publisher(self, *arguments: Any, **named: Any) -> NoticePublisher:
        return self._stack.enter_context(closing(NoticePublisher(*arguments, **named)))

    def subscriber(self, *arguments: Any, **named: Any) -> NoticeSubscriber:
        return self._stack.enter_context(closing(NoticeSubscriber(*arguments, **named)))


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(stack)
