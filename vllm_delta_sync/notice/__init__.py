"""Notices: "version n is there, look now". A hint over ZeroMQ; losing one costs latency and nothing else.

A message has two frames: the run id as topic, and ``{"manifest", "run", "version"}`` as canonical JSON, with a
``signature`` if the publisher has a signing key. Whoever reaches a port without CURVE keys can send one, so a notice is
never trusted: receivers look into the bucket and believe only that.

What was sent last is sent again about every second, and to whoever subscribes: that heals every loss.
"""

from vllm_delta_sync.notice.broker import Broker
from vllm_delta_sync.notice.messages import Notice
from vllm_delta_sync.notice.publisher import NoticePublisher
from vllm_delta_sync.notice.subscriber import NoticeSubscriber

__all__ = ["Broker", "Notice", "NoticePublisher", "NoticeSubscriber"]
