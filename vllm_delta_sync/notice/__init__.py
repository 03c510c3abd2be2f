"""Notices: "version n is there, poll now". A hint over ZeroMQ; losing one costs latency and nothing else.

May import ``trust`` and what is below. Begin with ``publisher`` and ``subscriber``; ``broker`` sits between them where
they cannot reach each other.
"""

from vllm_delta_sync.notice.broker import Broker
from vllm_delta_sync.notice.messages import Notice
from vllm_delta_sync.notice.publisher import NoticePublisher
from vllm_delta_sync.notice.subscriber import NoticeSubscriber

__all__ = ["Broker", "Notice", "NoticePublisher", "NoticeSubscriber"]
