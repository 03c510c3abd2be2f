"""Calls from the API server to the ranks: ports and clients there; hooks, watchdog and rank calls in the engine core.

May import ``engine.worker`` and what is below. Begin with ``ports``.
"""
