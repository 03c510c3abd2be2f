"""Attacks and network faults against a real trainer, broker and vLLM server, each a process of its own."""

from tests.e2e.siege import bucket, notices, routes
from tests.e2e.siege.world import ATTACKS

__all__ = ["ATTACKS", "bucket", "notices", "routes"]
