"""Notices: ZeroMQ messages that announce a new version. A lost notice costs latency and nothing else.

Start with ``publisher`` and ``subscriber``; ``broker`` connects them where they cannot reach each other. May import
``trust`` and what is below.
"""

from vllm_delta_sync.notice.broker import Broker
from vllm_delta_sync.notice.messages import Notice
from vllm_delta_sync.notice.publisher import NoticePublisher
from vllm_delta_sync.notice.subscriber import NoticeSubscriber

__all__ = ["Broker", "Notice", "NoticePublisher", "NoticeSubscriber"]
