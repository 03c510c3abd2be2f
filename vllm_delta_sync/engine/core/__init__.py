"""Calls from the API server to the ranks: ``ports`` there, ``pause_watchdog`` in the engine core's process.

May import ``engine.worker`` and what is below. Begin with ``ports``.
"""
